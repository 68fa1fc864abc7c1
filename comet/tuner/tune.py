"""Measure candidates and keep the winner: the choice that needs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from comet.config import OverlapConfig, require
from comet.errors import NothingMeasuredError
from comet.tuner.problem import Problem
from comet.tuner.profile import Kernels, Measured, ProfileEntry, ProfileKey

Measure = Callable[[OverlapConfig | None], float]


def tune(
    problem: Problem,
    settings: Sequence[OverlapConfig | None],
    measure: Measure,
    *,
    device: str,
    commit: str,
    date: str,
    kernels: Kernels = "auto",
) -> ProfileEntry:
    """Measure every candidate once; the caller puts the entry into its store.

    Args:
        problem: What is measured.
        settings: Candidates, distinct; ``None`` is the plain path.
        measure: Median ms of a candidate, equal on all ranks (see ``comet.tuner.measure``). A ``RuntimeError`` or
            ``ValueError`` it raises is recorded as that candidate's failure.
        device: Device name for the key.
        commit: Version of the code.
        date: Day of the measurement.
        kernels: See ``ProfileEntry``.

    Returns:
        The entry, with all candidates.

    Raises:
        ValueError: If there is no candidate, or one appears twice.
        NothingMeasuredError: If none of them ran.
    """
    require(len(settings) > 0, "settings must hold at least one candidate")
    require(len(set(settings)) == len(settings), "settings must be distinct")
    measured = tuple(_try(setting, measure) for setting in settings)
    if all(item.ms is None for item in measured):
        raise NothingMeasuredError(f"none of {len(settings)} settings ran, the first: {measured[0].failure}")
    key = ProfileKey.create(problem, device)
    return ProfileEntry(key=key, measured=measured, commit=commit, date=date, kernels=kernels)


def _try(setting: OverlapConfig | None, measure: Measure) -> Measured:
    try:
        return Measured(setting=setting, ms=measure(setting))
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        return Measured(setting=setting, ms=None, failure=f"{type(error).__name__}: {lines[0] if lines else ''}")
