"""The link of a rank to its rail peers on other nodes, as kernels see it: memory that they put rows into.

Where peers' memory is mapped (CPU ranks of one host, GPUs that NVLink joins), kernels store into it and raise flags
there. Elsewhere they copy rows into staging memory of their own, and NVSHMEM's device library puts them from there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.comm import make_communicator
from comet.comm.base import ALIGNMENT, Regions, regions_bytes, settle
from comet.comm.nvshmem import NvshmemHeap
from comet.layout import round_up
from comet.utils.choices import CommBackend


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one shape on this rank and its rail peers."""

    local: Tensor  # this rank's copy, in which rows arrive
    targets: Tensor  # (N,) int64: the address that kernels write to for each node


class Link(ABC):
    """Memory of this rank and its rail peers."""

    ranks: Tensor | None = None  # (N,) int32: the rail peers' numbers in NVSHMEM; None where their memory is mapped

    _pool: Region | None = None

    def alloc(self, regions: Regions) -> dict[str, Region]:
        """Return zeroed regions on all ranks of all nodes (collective), which have met and meet again afterwards.

        The memory of the regions before is used again where it is large enough.
        """
        num_bytes, pool = regions_bytes(regions), self._pool
        if pool is None or pool.local.numel() < num_bytes:
            pool = self._pool = self._alloc(num_bytes)
        else:
            pool.local.zero_()
            settle(pool.local.device)
        made, offset = {}, 0
        for name, (shape, dtype) in regions.items():
            size = math.prod(shape) * dtype.itemsize
            made[name] = Region(pool.local[offset : offset + size].view(dtype).view(shape), pool.targets + offset)
            offset += round_up(size, ALIGNMENT)
        return made

    @abstractmethod
    def _alloc(self, num_bytes: int) -> Region:
        """A region of uint8."""

    @abstractmethod
    def close(self, *, all_left: bool) -> None:
        """Release the memory (collective); ``all_left``: no rank uses it any more."""


class MappedLink(Link):
    """Memory of all rail peers is mapped into this process."""

    def __init__(self, backend: CommBackend, rails: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._comm = make_communicator(backend, rails, device, timeout_s=timeout_s)

    def _alloc(self, num_bytes: int) -> Region:
        pool = self._comm.alloc(num_bytes)
        return Region(pool.local, pool.pointers)

    def close(self, *, all_left: bool) -> None:
        self._comm.close()


class NvshmemLink(Link):
    """Memory of NVSHMEM's heap; half of it is for staging.

    Args:
        group: The ranks of all nodes, which are NVSHMEM's.
        peers: The rail peers among them, in the order of the nodes.
    """

    def __init__(self, group: ProcessGroup, peers: Sequence[int], device: torch.device) -> None:
        self._heap = NvshmemHeap(group, device)
        self.ranks = torch.tensor(peers, dtype=torch.int32, device=device)

    def _alloc(self, num_bytes: int) -> Region:
        assert self.ranks is not None
        whole = self._heap.alloc(2 * num_bytes)
        staging = torch.full(self.ranks.shape, whole[num_bytes:].data_ptr(), device=whole.device)
        return Region(whole[:num_bytes], staging)

    def close(self, *, all_left: bool) -> None:
        self._heap.close(all_left=all_left)
