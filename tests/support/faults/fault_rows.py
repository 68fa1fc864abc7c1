"""The fault matrix as data: which faults meet which phases on which paths, and what a row has to show."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
FILE_FAULTS = ("truncated file", "flipped byte")
FULL_DISK = "full disk"
FAULTS = ("exception", "out of memory", *SIGNALS, FULL_DISK, *FILE_FAULTS)
PATHS = ("reference", "plain", "twin", "fused")
PASSES = ("plan", "layer 0", "layer 1", "backward")
CHECKPOINT = ("checkpoint write", "checkpoint load")
PHASES = (*PASSES, "decode", *CHECKPOINT, "tune")

INJECTED = "injected by the fault matrix"

# What has to be said of a fault besides the rank. A rank that died or froze cannot say why: its launcher can.
REASONS = {
    "exception": re.escape(INJECTED),
    "out of memory": r"out of memory|allocate|OutOfMemory",
    "SIGKILL": "killed by SIGKILL",
    "SIGSTOP": "frozen|SIGSTOP",
    "SIGTERM": "SIGTERM",
    "full disk": r"\d[\d,]* bytes.*free|free.*bytes",
    "truncated file": r"truncated|has \d+ bytes",
    "flipped byte": r"checksum|damaged|digest",
}


@dataclass(frozen=True)
class Row:
    """One line of the matrix; a ``job`` of the command line meets it, or else a program that catches what is raised."""

    phase: str
    fault: str
    path: str
    job: bool = False

    @property
    def name(self) -> str:
        """``SIGKILL, layer 0, twin``."""
        return f"{self.fault}, {self.phase}, {self.path}{' (job)' if self.job else ''}"


def why_left_out(phase: str, fault: str, path: str, device: str) -> str:
    """Why a combination is no row; empty if it is one. This is the one place that says so."""
    saves, on_disk, is_told = phase in CHECKPOINT, fault in (FULL_DISK, *FILE_FAULTS), fault == "SIGTERM"
    rules = {
        "the step under way ends, whenever SIGTERM comes: early in its forward pass and in its backward pass": is_told
        and phase in ("plan", "layer 1"),
        "only checkpoints are kept on disk": on_disk and not saves,
        "a write reads nothing, a load writes nothing": (phase, fault) == ("checkpoint load", FULL_DISK)
        or (phase == "checkpoint write" and fault in FILE_FAULTS),
        "warp decode is twin or kernels": phase == "decode" and path in ("reference", "plain"),
        "tune does not try the reference": phase == "tune" and path == "reference",
        "on CPUs tune tries twins": phase == "tune" and path == "fused" and device == "cpu",
        "SIGTERM is seen between steps, and one takes the interpreter longer than a deadline": is_told
        and path == "fused",
        "what SIGTERM does to a tuning job is not the path's doing": is_told and (phase, path) == ("tune", "plain"),
        "no code of a path runs in a checkpoint; who watches the ranks differs between twin and plain": saves
        and (path in ("reference", "fused") or (on_disk and path == "plain")),
        "the twin signals in CPU memory": device != "cpu" and path == "twin",
        "a job, which gives each rank a GPU of its own: it runs on CPU ranks": device != "cpu" and is_job(phase, fault),
    }
    return next((why for why, holds in rules.items() if holds), "")


def is_job(phase: str, fault: str) -> bool:
    """Whether it befalls a job of the command: all of checkpoints, SIGTERM, and what ends a rank that tunes."""
    return phase in CHECKPOINT or fault == "SIGTERM" or (phase == "tune" and fault in SIGNALS)


def all_rows(device: str) -> list[Row]:
    """The matrix of a device, ``cpu`` or ``cuda``; of faults in the middle of a step, jobs have a share, too."""
    combinations = [each for each in product(PHASES, FAULTS, PATHS) if not why_left_out(*each, device)]
    rows = [Row(*each, job=is_job(*each[:2])) for each in combinations]
    return rows + [
        Row(*each, job=True)
        for each in combinations
        if each[0] == "layer 1" and each[2] in ("plain", "twin") and device == "cpu" and not is_job(*each[:2])
    ]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a row asks of its ranks, which leave notes for each other in ``folder``; survivors end by ``limit_s``."""

    row: Row
    device: str
    world_size: int = 2
    culprit: int = 1
    deadline_s: float
    slack_s: float
    folder: Path

    @property
    def limit_s(self) -> float:
        return self.deadline_s + self.slack_s

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.culprit]


@dataclass
class Finding:
    """What a row has shown; ``seconds`` count from the fault to the last survivor's end."""

    row: Row
    said: str = ""
    seconds: float = float("nan")
    outcome: str = ""
    wrong: list[str] = field(default_factory=list)

    def named(self) -> str:
        """Who was named, and the reason where it was: ``rank 1, injected by the fault matrix``."""
        reason = re.search(REASONS[self.row.fault], self.said)
        found = [f"rank {rank}" for rank in sorted(ranks_named(self.said))] + ([reason[0][:40]] if reason else [])
        return ", ".join(found) or "nobody"


def ranks_named(text: str) -> set[int]:
    """The ranks a text speaks of, but for the one that speaks: {1} of "rank 0 waited 5.0 s for rank 1"."""
    waiting = re.sub(r"rank \d+ (?=waited|lost)", "", text)
    return {int(rank) for rank in re.findall(r"\branks? (\d+)", waiting)}


def unnamed(order: Order, said: str, *, reason: bool) -> list[str]:
    """What is missing in what was said of the fault: the culprit or, if ``reason`` is known, the reason."""
    missing = [] if order.culprit in ranks_named(said) else [f"rank {order.culprit} is not named"]
    if reason and not re.search(REASONS[order.row.fault], said):
        missing.append(f"no word of {order.row.fault}")
    return [f"{what}: {said[:400]!r}" for what in missing]
