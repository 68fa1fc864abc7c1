"""A choice in words: predicted and measured time of each candidate, why, its regret, and the same as one line of JSON.

Regret is the measured time of a choice over that of the best measured candidate, for one point or for all of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from comet.config import OverlapConfig
from comet.tuner.choice import Resolved, broken_rule
from comet.tuner.model import Prediction
from comet.tuner.problem import Machine, Problem, candidate_name, cuda_layers, default_setting, effective
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore
from comet.utils.tables import aligned


def measured_ms(entry: ProfileEntry | None) -> dict[OverlapConfig | None, float]:
    """Candidate to ms, for those that ran."""
    return {item.setting: item.ms for item in entry.measured if item.ms is not None} if entry else {}


def model_regret(predictions: Sequence[Prediction], entry: ProfileEntry | None) -> float | None:
    """Regret of the candidate the model likes best; ``None`` if it did not run.

    Example: predicted 1.0 and 1.1 ms, measured 1.05 and 1.0 ms: 1.05.
    """
    return regret_of(min(predictions, key=lambda item: item.ms).setting, entry)


def regret_of(
    setting: OverlapConfig | None,
    entry: ProfileEntry | None,
    taken: Callable[[OverlapConfig | None], OverlapConfig | None] = lambda setting: setting,
) -> float | None:
    """Measured time of a candidate over that of the best one, candidates being equal as ``taken`` says; ``None`` if it
    did not run.
    """
    measured = measured_ms(entry)
    times = [ms for item, ms in measured.items() if taken(item) == taken(setting)]
    return min(times) / min(measured.values()) if times else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A choice and what it was made from."""

    problem: Problem  # the layer call
    machine: Machine  # where it runs
    predictions: Sequence[Prediction]  # settings with their predicted times
    resolved: Resolved  # the choice; marked in the table where it is one of the candidates
    entry: ProfileEntry | None = None  # measurements, if any, maybe at another number of tokens or of other kernels
    profile: Path | None = None  # the file they were read from

    def name(self, setting: OverlapConfig | None) -> str:
        """Of a candidate."""
        return candidate_name(setting, self.problem, self.machine)

    def taken(self, setting: OverlapConfig | None) -> OverlapConfig | None:
        """The setting as the layer takes it; settings that come to the same launches are one candidate."""
        return setting and effective(setting, self.problem)

    def is_chosen(self, setting: OverlapConfig | None) -> bool:
        """Whether a candidate comes to the same launches as the choice."""
        return self.taken(setting) == self.taken(self.resolved.setting)

    def candidates(self) -> list[Prediction]:
        """The predictions of what is possible, one for each way to launch."""
        possible = [item for item in self.predictions if not broken_rule(item.setting, self.problem, self.machine)]
        merged = {self.taken(item.setting): item for item in reversed(possible)}
        return [replace(item, setting=setting) for setting, item in reversed(merged.items())]

    def comparable(self) -> ProfileEntry | None:
        """The entry with the candidates that ran the kernels they run here, of equal ones the fastest.

        Example: one in Triton keeps the plain path alone where the layer runs in CUDA C++.
        """
        if self.entry is None:
            return None
        merged: dict[OverlapConfig | None, Measured] = {}
        for item in sorted(self.entry.measured, key=lambda item: math.inf if item.ms is None else item.ms):
            if self._ran_alike(item.setting, self.entry):
                setting = self.taken(item.setting)
                merged.setdefault(setting, replace(item, setting=setting))
        ran = any(item.ms is not None for item in merged.values())
        return replace(self.entry, measured=tuple(merged.values())) if ran else None

    def _ran_alike(self, setting: OverlapConfig | None, entry: ProfileEntry) -> bool:
        if setting is None:
            return True
        machine = replace(self.machine, cuda_kernels=self.machine.cuda_kernels and entry.kernels == "auto")
        is_possible = not broken_rule(setting, self.problem, self.machine)
        return is_possible and cuda_layers(self.problem, machine) == cuda_layers(self.problem, self.machine)


def regrets(points: Sequence[Explained], store: ProfileStore) -> dict[str, dict[str, float | int | None]]:
    """Mean and worst regret over all points, for each way to choose without having measured the point itself.

    Returns:
        ``{"default": ..., "model": ..., "nearest": {"mean": 1.01, "worst": 1.04, "points": 19}}``: ``points`` are those
        at which the choice was among what was measured, the others do not count; for ``nearest`` a point's own entry of
        the store is left out.
    """
    ways = {
        "default": [regret_of(default_setting(point.problem), point.entry, point.taken) for point in points],
        "model": [model_regret(point.predictions, point.entry) for point in points],
        "nearest": [_nearest_regret(point, store) for point in points],
    }
    known = {name: [value for value in found if value is not None] for name, found in ways.items()}
    return {
        name: {"mean": mean(found) if found else None, "worst": max(found, default=None), "points": len(found)}
        for name, found in known.items()
    }


def regret_text(found: dict[str, dict[str, float | int | None]]) -> str:
    """One line for each way to choose that there is a figure for."""
    lines = [
        f"{name:<7}  mean {values['mean']:.3f}, worst {values['worst']:.3f}, {values['points']} points"
        for name, values in found.items()
        if values["points"]
    ]
    return "\n".join(["regret: time of the choice over the best measured", *lines])


def _nearest_regret(point: Explained, store: ProfileStore) -> float | None:
    own = ProfileKey.create(point.problem, store.device)
    others = {key: entry for key, entry in store.entries.items() if key != own}
    found = ProfileStore(store.path, store.device, others).lookup(point.problem)
    return regret_of(found[0].winner.setting, point.entry, point.taken) if found else None


def explain_text(explained: Explained) -> str:
    """The shape, an aligned table ``candidate, predicted ms, measured ms, why``, and the choice with its source.

    What was measured stands first, the fastest at the top; the heading says at how many tokens that was.
    """
    entry, comparable, resolved = explained.entry, explained.comparable(), explained.resolved
    measured = measured_ms(comparable)
    failures = {item.setting: item.failure for item in comparable.measured if item.ms is None} if comparable else {}
    at = f" at {comparable.key.tokens} tokens" if comparable else ""
    rows = [("candidate", "predicted ms", "measured ms" + at, "why")]
    for item in _ordered(explained.candidates(), measured):
        name = explained.name(item.setting) + (" <- chosen" if explained.is_chosen(item.setting) else "")
        time = f"{measured[item.setting]:.3f}" if item.setting in measured else "-"
        failure = failures.get(item.setting)
        rows.append((name, f"{item.ms:.3f}", time, f"failed: {failure}" if failure else item.why))
    title = ", ".join(f"{name}={value}" for name, value in _shape(explained.problem).items())
    chosen = f"chosen: {explained.name(resolved.setting)} (source: {resolved.source})"
    if entry is not None:
        kernels = ", in Triton alone" if entry.kernels == "triton" else ""
        chosen += f"; measured at {entry.key.tokens} tokens{kernels}, {entry.date}, version {entry.commit}"
        chosen += f", in {explained.profile}" if explained.profile else ""
    if resolved.passed_over:
        chosen += f"; its best setting is passed over: {resolved.passed_over}"
    return "\n".join([title, *aligned(rows, left=(0, 3)), chosen])


def explain_facts(explained: Explained) -> dict[str, Any]:
    """What ``explain_text`` says, for JSON; ``regret`` is that of the choice among what is comparable."""
    candidates, comparable = explained.candidates(), explained.comparable()
    measured = measured_ms(comparable)
    return {
        "shape": _shape(explained.problem),
        "chosen": _setting(explained.resolved.setting),
        "source": explained.resolved.source,
        "passed_over": explained.resolved.passed_over,
        "profile": str(explained.profile) if explained.profile else None,
        "regret": regret_of(explained.taken(explained.resolved.setting), comparable),
        "model_regret": model_regret(candidates, comparable),
        "candidates": [
            {
                "name": explained.name(item.setting),
                "setting": _setting(item.setting),
                "predicted_ms": item.ms,
                "measured_ms": measured.get(item.setting),
                "measured_tokens": comparable.key.tokens if comparable and item.setting in measured else None,
            }
            for item in _ordered(candidates, measured)
        ],
    }


def _ordered(predictions: Sequence[Prediction], measured: Mapping[OverlapConfig | None, float]) -> list[Prediction]:
    return sorted(predictions, key=lambda item: (measured.get(item.setting, math.inf), item.ms))


def _shape(problem: Problem) -> dict[str, int | float | str]:
    moe, parallel = problem.moe, problem.parallel
    return {
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "hidden_size": moe.hidden_size,
        "ffn_size": moe.ffn_size,
        "ep": parallel.ep,
        "tp": parallel.tp,
        "tokens": problem.num_tokens,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "reach": round(problem.reach, 4),
    }


def _setting(setting: OverlapConfig | None) -> dict[str, int | bool | str] | str:
    return "plain" if setting is None else asdict(setting)
