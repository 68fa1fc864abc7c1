"""Regret: measured time of a choice over that of the best measured candidate, for one point and for all of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from comet.config import OverlapConfig
from comet.tuner.layers import effective
from comet.tuner.machine import Machine
from comet.tuner.model import Prediction
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileEntry, ProfileStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A point that was measured: the call, what the model expected of the candidates, and what they took."""

    problem: Problem
    predictions: Sequence[Prediction]
    entry: ProfileEntry


def measured_ms(entry: ProfileEntry | None) -> dict[OverlapConfig | None, float]:
    """Candidate to ms, for those that ran."""
    return {item.setting: item.ms for item in entry.measured if item.ms is not None} if entry else {}


def model_regret(predictions: Sequence[Prediction], entry: ProfileEntry | None) -> float | None:
    """Regret of the candidate the model likes best; ``None`` if it did not run.

    Example: predicted 1.0 and 1.1 ms, measured 1.05 and 1.0 ms: 1.05.
    """
    return regret_of(min(predictions, key=lambda item: item.ms).setting, entry)


def regret_of(setting: OverlapConfig | None, entry: ProfileEntry | None) -> float | None:
    """Measured time of a candidate over that of the best one; ``None`` if it did not run."""
    measured = measured_ms(entry)
    return measured[setting] / min(measured.values()) if setting in measured else None


def regrets(points: Sequence[Tuned], store: ProfileStore, machine: Machine) -> dict[str, dict[str, float | int | None]]:
    """Mean and worst regret over all points, for each way to choose without having measured the point itself.

    Args:
        points: What was measured.
        store: Holds their entries; a point's own is left out for ``nearest``.
        machine: Where they were measured.

    Returns:
        ``{"default": ..., "model": ..., "nearest": {"mean": 1.01, "worst": 1.04, "points": 19}}``: ``points`` are those
        at which the choice was among what was measured, the others do not count.
    """
    ways = {
        "default": [_regret(point, OverlapConfig(), machine) for point in points],
        "model": [model_regret(point.predictions, point.entry) for point in points],
        "nearest": [_nearest_regret(point, store, machine) for point in points],
    }
    return {name: _summary([value for value in found if value is not None]) for name, found in ways.items()}


def regret_text(found: dict[str, dict[str, float | int | None]]) -> str:
    """One line for each way to choose that there is a figure for."""
    lines = [
        f"{name:<7}  mean {values['mean']:.3f}, worst {values['worst']:.3f}, {values['points']} points"
        for name, values in found.items()
        if values["points"]
    ]
    return "\n".join(["regret: time of the choice over the best measured", *lines])


def _regret(point: Tuned, setting: OverlapConfig | None, machine: Machine) -> float | None:
    """Of a setting, or of a candidate that comes to the same launches."""
    measured = measured_ms(point.entry)
    wanted = setting and effective(setting, point.problem, machine)
    times = [ms for item, ms in measured.items() if (item and effective(item, point.problem, machine)) == wanted]
    return min(times) / min(measured.values()) if times else None


def _nearest_regret(point: Tuned, store: ProfileStore, machine: Machine) -> float | None:
    others = {key: entry for key, entry in store.entries.items() if key != point.entry.key}
    found = ProfileStore(store.path, store.device, others).lookup(point.problem)
    return _regret(point, found[0].winner.setting, machine) if found else None


def _summary(values: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "mean": mean(values) if values else None,
        "worst": max(values, default=None),
        "points": len(values),
    }
