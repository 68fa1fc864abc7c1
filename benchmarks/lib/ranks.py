"""The ranks that measure, and what becomes of a failure on one of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from triton import TritonError

from comet.comm.handshake import largest
from comet.layer.workspace import Workspace
from comet.measure import layers

# What a variant may die of without ending the run; anything else is a mistake of the benchmark itself.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, LookupError, TritonError)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank, its device and the group; the group is ``None`` for a rank alone."""

    rank: int
    device: torch.device
    process_group: ProcessGroup | None

    @property
    def dtype(self) -> torch.dtype:
        """What is measured: bf16 on GPUs; float32 on CPUs, which are there to try the benchmark."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def worst(self, value: float) -> float:
        """Maximum over the ranks."""
        return largest([value], self.device, self.process_group)[0]


def tell(ranks: Ranks, line: str) -> None:
    """One line of progress, by rank 0."""
    if ranks.rank == 0:
        print(line, file=sys.stderr, flush=True)


def release(ranks: Ranks) -> None:
    """Give back the memory of what is gone; graphs are gone before the communicators they recorded."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """``NVIDIA H200``, say, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def differs_over_ranks(output: Tensor, ranks: Ranks) -> bool:
    """Whether a rank has other bits than rank 0 (collective)."""
    first = output.clone()
    if ranks.process_group is not None:
        dist.broadcast(first, src=0, group=ranks.process_group)
    return bool(ranks.worst(float(not torch.equal(first, output))))


def attempt(action: Callable[[], T], ranks: Ranks, pool: Workspace | None = None) -> tuple[T | None, str]:
    """``comet.measure.layers.attempt`` of what a variant may die of."""
    return layers.attempt(action, ranks.device, ranks.process_group, pool, FAILURES)
