"""Who a process is in a job, and what rank 0 decides for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from comet.comm import handshake
from comet.comm.handshake import this_rank

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """Who a process is; the process group is initialised when there are several ranks."""

    rank: int
    world_size: int
    device: torch.device
    attempt: int = 0  # how often the ranks have been started anew; 0 the first time


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order, on all ranks (collective)."""
    if this_rank()[1] == 1:
        return [value]
    assert dist.group.WORLD is not None, "several ranks have a process group"
    return handshake.gather(dist.group.WORLD, value)


def from_first_rank(make: Callable[[], Made]) -> Made:
    """What ``make`` returns or raises on rank 0, on all ranks (collective); an ``OSError`` without a file is a
    ``ValueError``.
    """
    made: list[Any] = [None, None]
    rank, world_size = this_rank()
    if rank == 0:
        try:
            made[0] = make()
        except ValueError as error:
            made[1] = error
        except OSError as error:
            made[1] = error if error.filename else ValueError(str(error) or type(error).__name__)
    if world_size > 1:
        dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    value: Made = made[0]
    return value
