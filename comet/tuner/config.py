"""Settings of the ``tune``, ``explain`` and ``sweep`` tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from comet.config import Transport, require

TunedMachine = Literal["this", "h200"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """What is tuned or explained, and where measurements are kept.

    Args:
        models: Names of models; none takes the job's.
        tokens: Tokens per rank of each point, ascending or not; none takes those of a training step.
        rounds: Counted calls of every candidate.
        profiles: Folder of the profile store; one file per machine.
        machine: Whose times ``explain`` tells: of the machine it runs on (``this``), or of an H200 in bfloat16
            (``h200``), with what was measured there.
    """

    models: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    rounds: int = 20
    profiles: str = "outputs/profiles"
    machine: TunedMachine = "this"

    def __post_init__(self) -> None:
        require(all(num >= 1 for num in self.tokens), f"tokens={self.tokens} must each be at least 1")
        require(self.rounds >= 1, f"rounds={self.rounds} must be at least 1")
        require(bool(self.profiles), f"profiles={self.profiles!r} must name a folder")
        known = get_args(TunedMachine)
        require(self.machine in known, f"machine={self.machine!r} must be one of {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """What is swept: every combination of the lists; an empty list takes the value the job has elsewhere.

    A point that already has a time in the folder is not measured again. One that failed is: its row keeps the reason
    until then. A combination that breaks a rule is a row with that rule.

    All settings of a shape (model, layout and tokens) are timed interleaved, in one loop, so that they can be compared:
    their rows are written together, and a sweep that is stopped keeps those of the shapes before.

    Args:
        models: Names of models; none takes the job's.
        layouts: Pairs (EP, TP); none takes the job's.
        tokens: Tokens per rank; none takes those of a training step.
        comm_blocks: See ``OverlapConfig``; 0 needs transport ``copy``.
        num_panels: See ``OverlapConfig``.
        num_phases: See ``OverlapConfig``.
        transport: See ``OverlapConfig``.
        rounds: Counted calls of every setting.
    """

    models: tuple[str, ...] = ()
    layouts: tuple[tuple[int, ...], ...] = ()
    tokens: tuple[int, ...] = ()
    comm_blocks: tuple[int, ...] = (4, 8, 16, 32, 64)
    num_panels: tuple[int, ...] = ()
    num_phases: tuple[int, ...] = ()
    transport: tuple[Transport, ...] = ()
    rounds: int = 20

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("comm_blocks", 0), ("num_panels", 1), ("num_phases", 1)):
            values = getattr(self, name)
            require(all(value >= least for value in values), f"{name}={values} must each be at least {least}")
        known = get_args(Transport)
        require(set(self.transport) <= set(known), f"transport={self.transport} must each be one of {known}")
        pairs = all(len(layout) == 2 and min(layout) >= 1 for layout in self.layouts)
        require(pairs, f"layouts={self.layouts} must each be a pair [ep, tp] of numbers that are at least 1")
        require(self.rounds >= 1, f"rounds={self.rounds} must be at least 1")
