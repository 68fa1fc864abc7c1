"""A choice in words: predicted and measured time of each candidate, why, and the same as one line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comet.config import OverlapConfig
from comet.tuner.choice import Resolved
from comet.tuner.layers import candidate_name, effective
from comet.tuner.machine import Machine
from comet.tuner.model import Prediction
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileEntry
from comet.tuner.regret import measured_ms, model_regret


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A choice and what it was made from.

    Args:
        problem: The layer call.
        machine: Where it runs.
        predictions: Candidates with their predicted times.
        resolved: The choice; marked in the table where it is one of the candidates.
        entry: Measurements of these candidates, if any.
    """

    problem: Problem
    machine: Machine
    predictions: Sequence[Prediction]
    resolved: Resolved
    entry: ProfileEntry | None = None

    def name(self, setting: OverlapConfig | None) -> str:
        """Of a candidate."""
        return candidate_name(setting, self.problem, self.machine)

    def is_chosen(self, setting: OverlapConfig | None) -> bool:
        """Whether a candidate comes to the same launches as the choice."""
        pair = setting, self.resolved.setting
        first, second = (item and effective(item, self.problem, self.machine) for item in pair)
        return first == second


def explain(explained: Explained) -> str:
    """Tell how a setting was chosen: ``explain_text``, and ``explain_facts`` as JSON in the last line."""
    return explain_text(explained) + "\n" + json.dumps(explain_facts(explained))


def explain_text(explained: Explained) -> str:
    """The shape, an aligned table ``candidate, predicted ms, measured ms, why``, and the choice with its source.

    The fastest stands first, by measurement where there is one; a measurement made at other tokens says so.
    """
    entry, resolved = explained.entry, explained.resolved
    measured = measured_ms(entry)
    failures = {item.setting: item.failure for item in entry.measured if item.ms is None} if entry else {}
    rows = [("candidate", "predicted ms", "measured ms", "why")]
    for item in _ordered(explained.predictions, measured):
        name = explained.name(item.setting) + (" <- chosen" if explained.is_chosen(item.setting) else "")
        time = f"{measured[item.setting]:.3f}" if item.setting in measured else "-"
        failure = failures.get(item.setting)
        rows.append((name, f"{item.ms:.3f}", time, f"failed: {failure}" if failure else item.why))
    title = ", ".join(f"{name}={value}" for name, value in _shape(explained.problem).items())
    chosen = f"chosen: {explained.name(resolved.setting)} (source: {resolved.source})"
    if entry is not None:
        chosen += f"; measured at {entry.key.tokens} tokens, {entry.date}, version {entry.commit}"
    if resolved.passed_over:
        chosen += f"; its best setting is passed over: {resolved.passed_over}"
    return "\n".join([title, _table(rows), chosen])


def explain_facts(explained: Explained) -> dict[str, Any]:
    """What ``explain_text`` says, for JSON; ``regret`` is ``model_regret``."""
    measured = measured_ms(explained.entry)
    return {
        "shape": _shape(explained.problem),
        "chosen": _setting(explained.resolved.setting),
        "source": explained.resolved.source,
        "passed_over": explained.resolved.passed_over,
        "regret": model_regret(explained.predictions, explained.entry),
        "candidates": [
            {
                "name": explained.name(item.setting),
                "setting": _setting(item.setting),
                "predicted_ms": item.ms,
                "measured_ms": measured.get(item.setting),
            }
            for item in _ordered(explained.predictions, measured)
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
        "load": round(problem.load, 4),
    }


def _setting(setting: OverlapConfig | None) -> dict[str, int | bool | str] | str:
    return "plain" if setting is None else asdict(setting)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Left-aligned text, right-aligned numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"{name:<{widths[0]}}  {predicted:>{widths[1]}}  {time:>{widths[2]}}  {why}"
        for name, predicted, time, why in rows
    )
    return "\n".join(line.rstrip() for line in lines)
