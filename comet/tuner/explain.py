"""A choice in words: predicted and measured time of each candidate, why, and the same as one line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from comet.config import OverlapConfig
from comet.tuner.choice import Resolved
from comet.tuner.model import Prediction, candidate_name
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileEntry


def explain(
    problem: Problem, predictions: Sequence[Prediction], resolved: Resolved, entry: ProfileEntry | None = None
) -> str:
    """Tell how a setting was chosen.

    Args:
        problem: The layer call.
        predictions: Candidates with their predicted times.
        resolved: The choice; marked in the table where it is one of the candidates.
        entry: Measurements of these candidates, if any.

    Returns:
        ``explain_text``, and ``explain_facts`` as JSON in the last line.
    """
    facts = explain_facts(problem, predictions, resolved, entry)
    return explain_text(problem, predictions, resolved, entry) + "\n" + json.dumps(facts)


def explain_text(
    problem: Problem, predictions: Sequence[Prediction], resolved: Resolved, entry: ProfileEntry | None
) -> str:
    """The shape, an aligned table ``candidate, predicted ms, measured ms, why``, and the choice with its source.

    The fastest stands first, by measurement where there is one; a measurement made at other tokens says so.
    """
    measured = measured_ms(entry)
    failures = {item.setting: item.failure for item in entry.measured if item.ms is None} if entry else {}
    rows = [("candidate", "predicted ms", "measured ms", "why")]
    for item in _ordered(predictions, measured):
        name = candidate_name(item.setting) + (" <- chosen" if item.setting == resolved.setting else "")
        time = f"{measured[item.setting]:.3f}" if item.setting in measured else "-"
        failure = failures.get(item.setting)
        rows.append((name, f"{item.ms:.3f}", time, f"failed: {failure}" if failure else item.why))
    title = ", ".join(f"{name}={value}" for name, value in _shape(problem).items())
    chosen = f"chosen: {candidate_name(resolved.setting)} (source: {resolved.source})"
    if entry is not None:
        chosen += f"; measured at {entry.key.tokens} tokens, {entry.date}, version {entry.commit}"
    return "\n".join([title, _table(rows), chosen])


def explain_facts(
    problem: Problem, predictions: Sequence[Prediction], resolved: Resolved, entry: ProfileEntry | None
) -> dict[str, Any]:
    """What ``explain_text`` says, for JSON; ``regret`` is ``model_regret``."""
    measured = measured_ms(entry)
    return {
        "shape": _shape(problem),
        "chosen": _setting(resolved.setting),
        "source": resolved.source,
        "regret": model_regret(predictions, entry),
        "candidates": [
            {"setting": _setting(item.setting), "predicted_ms": item.ms, "measured_ms": measured.get(item.setting)}
            for item in _ordered(predictions, measured)
        ],
    }


def measured_ms(entry: ProfileEntry | None) -> dict[OverlapConfig | None, float]:
    """Candidate to ms, for those that ran."""
    return {item.setting: item.ms for item in entry.measured if item.ms is not None} if entry else {}


def model_regret(predictions: Sequence[Prediction], entry: ProfileEntry | None) -> float | None:
    """Measured time of the candidate the model likes best over the fastest measured; ``None`` if it did not run.

    Example: predicted 1.0 and 1.1 ms, measured 1.05 and 1.0 ms: 1.05.
    """
    measured = measured_ms(entry)
    favourite = min(predictions, key=lambda item: item.ms).setting
    return measured[favourite] / min(measured.values()) if favourite in measured else None


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
