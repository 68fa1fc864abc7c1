"""Deadlines of torch's collectives: the group's own, and a longer one for work that takes ranks unequally long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

PATIENCE = timedelta(minutes=30)
NCCL_MARGIN_S = 5.0  # NCCL's watchdog aborts the process, so whoever can name the reason comes first


def set_deadline(group: ProcessGroup | None, timeout_s: float) -> None:
    """Let the collectives of a group, from the next one on, wait no longer for a rank.

    Args:
        group: Of gloo or NCCL; another backend keeps its own deadline. ``None`` is no group.
        timeout_s: In seconds; NCCL takes five more.
    """
    for backend in _backends(group):
        margin_s = NCCL_MARGIN_S if backend.name() == "nccl" else 0.0
        backend._set_default_timeout(timedelta(seconds=timeout_s + margin_s))


@contextmanager
def patience() -> Iterator[None]:
    """While the body runs, collectives of the default group may wait half an hour, as for a rank that writes more."""
    backends = _backends(dist.group.WORLD)
    before = [backend.options._timeout for backend in backends]
    for backend in backends:
        backend._set_default_timeout(PATIENCE)
    try:
        yield
    finally:
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def meet(device: torch.device) -> None:
    """Wait for all ranks of the default group with patience (collective): after work that may have kept some longer.

    Args:
        device: Of this rank; a GPU is waited for.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with patience():
        # An all-reduce rather than dist.barrier(): it works on whatever backend the device has.
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _backends(group: ProcessGroup | None) -> list[Any]:
    if group is None:
        return []
    found = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    return [backend for backend in found.values() if backend.name() in ("gloo", "nccl")]
