"""Faults in the process of a rank: a function of the product is wrapped where a phase begins, and strikes when called.

Signals are sent by the parent: the rank says where it is and waits until it was hit, so that they hit in the phase.
SIGTERM comes through the launcher, in its own time: the rank waits until it has heard of it, or is ended by it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_rows import INJECTED, SIGNALS, Order

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
    """Write a file at once: whoever finds it finds all of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.rename(path)


def await_file(path: Path, until: Callable[[], bool] = lambda: False) -> str:
    """What is in a file once it is there; empty if it has not come when ``until()`` is true."""
    while not path.exists():
        if until():
            return ""
        time.sleep(POLL_S)
    return path.read_text()
