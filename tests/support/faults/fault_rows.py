"""The fault matrix as data, which faults meet which phases on which paths and what a row has to show; and its faults.

A function of the product is wrapped where a phase begins, in a rank's process, and strikes when called. Signals come
from the parent: the rank says where it is and waits until it was hit, so that they hit in the phase. SIGTERM comes
through the launcher, in its own time: the rank waits until it has heard of it, or is ended by it.
"""

import importlib
import inspect
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
FAULTS = ("exception", "out of memory", *SIGNALS)
PATHS = ("reference", "plain", "twin", "fused")
PASSES = ("plan", "layer 0", "layer 1", "backward")
CHECKPOINT = ("checkpoint write", "checkpoint load")
PHASES = (*PASSES, "decode", *CHECKPOINT, "tune")

INJECTED = "injected by the fault matrix"

# A message about a fault must match this, besides naming the rank. The launcher speaks for ranks that died or froze.
REASONS = {
    "exception": re.escape(INJECTED),
    "out of memory": r"out of memory|allocate|OutOfMemory",
    "SIGKILL": "killed by SIGKILL",
    "SIGSTOP": "frozen|SIGSTOP",
    "SIGTERM": "SIGTERM",
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
    """Return the reason why a combination is no row, or an empty string. All reasons stand here."""
    saves, is_told = phase in CHECKPOINT, fault == "SIGTERM"
    rules = {
        "the step under way ends, whenever SIGTERM comes: early in its forward pass and in its backward pass": is_told
        and phase in ("plan", "layer 1"),
        "warp decode is twin or kernels": phase == "decode" and path in ("reference", "plain"),
        "tune does not try the reference": phase == "tune" and path == "reference",
        "on CPUs tune tries twins": phase == "tune" and path == "fused" and device == "cpu",
        "SIGTERM is seen between steps, and one takes the interpreter longer than a deadline": is_told
        and path == "fused",
        "what SIGTERM does to a tuning job is not the path's doing": is_told and (phase, path) == ("tune", "plain"),
        "no code of a path runs in a checkpoint; who watches the ranks differs between twin and plain": saves
        and path in ("reference", "fused"),
        "an allocation that fails on a CPU is an exception like another": fault == "out of memory"
        and phase in ("layer 0", "backward", "decode", *CHECKPOINT)
        and device == "cpu",
        "the twin signals in CPU memory": device != "cpu" and path == "twin",
        "a job, which gives each rank a GPU of its own: it runs on CPU ranks": device != "cpu" and is_job(phase, fault),
    }
    return next((why for why, holds in rules.items() if holds), "")


def is_job(phase: str, fault: str) -> bool:
    """Whether the fault needs a job of the command: faults of checkpoints, SIGTERM, and signals to a tuning rank."""
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
    """Instructions to the ranks of a row. Ranks leave notes in ``folder``, and survivors end by ``limit_s``."""

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
    """The result of a row; ``seconds`` count from the fault to the last survivor's end."""

    row: Row
    said: str = ""
    seconds: float = float("nan")
    wrong: list[str] = field(default_factory=list)

    def named(self) -> str:
        """Return the ranks and, if given, the reason of the message: ``rank 1, injected by the fault matrix``."""
        reason = re.search(REASONS[self.row.fault], self.said)
        found = [f"rank {rank}" for rank in sorted(ranks_named(self.said))] + ([reason[0][:40]] if reason else [])
        return ", ".join(found) or "nobody"


def ranks_named(text: str) -> set[int]:
    """The ranks a text speaks of, but for the one that speaks: {1} of "rank 0 waited 5.0 s for rank 1"."""
    waiting = re.sub(r"rank \d+ (?=waited|lost)", "", text)
    return {int(rank) for rank in re.findall(r"\branks? (\d+)", waiting)}


def unnamed(order: Order, said: str, *, reason: bool) -> list[str]:
    """Return the parts that a message lacks: the culprit and, with ``reason``, the reason."""
    missing = [] if order.culprit in ranks_named(said) else [f"rank {order.culprit} is not named"]
    if reason and not re.search(REASONS[order.row.fault], said):
        missing.append(f"no word of {order.row.fault}")
    return [f"{what}: {said[:400]!r}" for what in missing]


POLL_S = 0.005
TOO_MANY_BYTES = 1 << 50
STRUCK, SENT, TOLD = "struck", "sent", "told"

PLACES = {
    **{(phase, path): "comet.layer.backend:Backend.plan" for phase in ("plan",) for path in ("twin", "fused")},
    ("layer 0", "twin"): "comet.layer.twin.layer:Twin.dispatch_gemm",
    ("layer 1", "twin"): "comet.layer.twin.layer:Twin.gemm_combine",
    ("backward", "twin"): "comet.layer.twin.layer:Twin.dispatch_dgrad",
    ("layer 0", "fused"): "comet.layer.fused:Fused.dispatch_gemm",
    ("layer 1", "fused"): "comet.layer.fused:Fused.gemm_combine",
    ("backward", "fused"): "comet.layer.fused:Fused.dispatch_dgrad",
    ("plan", "plain"): "comet.reference.plain:make_exchange",
    ("layer 0", "plain"): "comet.reference.plain:dispatch_rows",
    ("layer 1", "plain"): "comet.reference.plain:return_rows",
    ("backward", "plain"): "comet.comm.collectives:_AllToAllRows.backward",
    ("plan", "reference"): "comet.reference.plain:check_group",
    ("layer 0", "reference"): "comet.reference.plain:gather_weights",
    ("layer 1", "reference"): "comet.reference.plain:reference_experts",
    ("backward", "reference"): "comet.comm.collectives:_AllGatherStacked.backward",
    ("decode", "twin"): "comet.decode.ranks:RankDecode._twin",
    ("decode", "fused"): "comet.decode.ranks:RankDecode._buffer",
    ("checkpoint write", ""): "torch.distributed.checkpoint:FileSystemWriter.write_data",
    ("checkpoint load", ""): "torch.distributed.checkpoint:load",
    ("tune", "plain"): "comet.reference.plain:dispatch_rows",
    ("tune", "twin"): "comet.layer.twin.layer:Twin.dispatch_gemm",
    ("tune", "fused"): "comet.layer.fused:Fused.dispatch_gemm",
}


def set_trap(place: str, strike: Callable[[], None], *, nth: int = 1) -> None:
    """Let ``strike()`` come before the ``nth`` call of ``module:function`` or ``module:Class.method`` from now on."""
    module, _, names = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = names.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function, left = getattr(owner, name), nth

    def trapped(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            strike()
        return function(*args, **options)

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(trapped) if is_static else trapped)


def strike(order: Order, device: torch.device | str = "cpu") -> None:
    note(order.folder / STRUCK, f"{os.getpid()} {time.monotonic()}")
    if order.row.fault == "exception":
        raise RuntimeError(INJECTED)
    if order.row.fault == "out of memory":
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=device)
    if order.row.fault in SIGNALS:
        await_file(order.folder / (TOLD if order.row.fault == "SIGTERM" else SENT))


def note(path: Path, text: str = "") -> None:
    """Write a file at once, so that a reader never finds a part of the text."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.rename(path)


def await_file(path: Path, until: Callable[[], bool] = lambda: False) -> str:
    """Wait for a file and return its text, or an empty string once ``until()`` is true."""
    while not path.exists():
        if until():
            return ""
        time.sleep(POLL_S)
    return path.read_text()
