"""One process that plays all ranks of a group over plain local memory."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.base import Communicator, SymmTensor, pointer_table
from comet.config import require


class EmulatedCommunicator(Communicator):
    """One of W ranks that live in this process and share one device; made by ``emulated_group``.

    The first rank to make its n-th allocation makes it for all; the others receive the same buffers.

    ``barrier`` does nothing, on purpose: the ranks run one after the other in one thread, or as kernels of one stream,
    and waiting for a rank that runs later would never end. Whoever emulates a group runs it phase by phase.

    Args:
        rank: The rank to play.
        world_size: W.
        device: Where all W buffers live.
        timeout_s: Deadline handed to kernels, in seconds.
        shared: The allocations of the group, in order, W buffers each; the same list for all ranks of the group.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout_s: float, shared: list[tuple[Tensor, ...]]
    ) -> None:
        super().__init__(rank, world_size, device, timeout_s)
        self._shared = shared
        self._num_allocs = 0

    def _alloc(self, num_bytes: int) -> SymmTensor:
        if self._num_allocs == len(self._shared):
            self._shared.append(self._make_buffers(num_bytes))
        peers = self._shared[self._num_allocs]
        require(
            peers[0].numel() == num_bytes,
            f"num_bytes={num_bytes} of rank {self.rank} must equal the {peers[0].numel()} bytes of the other ranks "
            f"(allocation {self._num_allocs})",
        )
        self._num_allocs += 1
        return SymmTensor(peers, pointer_table(peers), self.rank)

    def _make_buffers(self, num_bytes: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.world_size))

    def _barrier(self) -> None:
        """Nothing; see the class."""

    def _renew(self) -> None:
        """Nothing; see ``_barrier``."""

    def _close(self, in_step: bool) -> bool:
        self._shared = []
        return True


def emulated_group(world_size: int, device: torch.device | str, timeout_s: float = 30.0) -> list[EmulatedCommunicator]:
    """W communicators in one process, so that one device can play all ranks.

    Args:
        world_size: W.
        device: Where all buffers live.
        timeout_s: Deadline handed to kernels, in seconds.

    Returns:
        The communicators of rank 0 to W - 1. Call ``alloc`` on each of them, in any order of ranks.
    """
    require(world_size >= 1, f"world_size={world_size} must be at least 1")
    shared: list[tuple[Tensor, ...]] = []
    return [
        EmulatedCommunicator(rank, world_size, torch.device(device), timeout_s, shared) for rank in range(world_size)
    ]
