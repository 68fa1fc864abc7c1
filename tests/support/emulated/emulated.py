"""One process that plays all ranks of a group over plain local memory."""

import torch
from torch import Tensor

from comet.comm.base import LocalCommunicator, SymmTensor, pointer_table
from comet.config import require


class EmulatedCommunicator(LocalCommunicator):
    """One of W ranks that live in this process and share one device; made by ``emulated_group``.

    The first rank to make its n-th allocation makes it for all; the others receive the same buffers, from ``shared``,
    the allocations of the group in order, W buffers each.

    ``barrier`` does nothing, on purpose: the ranks run one after the other in one thread, or as kernels of one stream,
    and waiting for a rank that runs later would never end. Run an emulated group phase by phase.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout_s: float, shared: list[tuple[Tensor, ...]]
    ) -> None:
        super().__init__(device, timeout_s)
        self.rank, self.world_size, self._shared, self._num_allocs = rank, world_size, shared, 0

    def _alloc(self, num_bytes: int) -> SymmTensor:
        if self._num_allocs == len(self._shared):
            made = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.world_size))
            self._shared.append(tuple(made))
        peers = self._shared[self._num_allocs]
        require(
            peers[0].numel() == num_bytes,
            f"num_bytes={num_bytes} of rank {self.rank} must equal the {peers[0].numel()} bytes of the other ranks "
            f"(allocation {self._num_allocs})",
        )
        self._num_allocs += 1
        return SymmTensor(peers, pointer_table(peers), self.rank)


def emulated_group(world_size: int, device: torch.device | str, timeout_s: float = 30.0) -> list[EmulatedCommunicator]:
    """The communicators of ranks 0 to W - 1. Call ``alloc`` on each of them, in any order of ranks."""
    shared: list[tuple[Tensor, ...]] = []
    return [
        EmulatedCommunicator(rank, world_size, torch.device(device), timeout_s, shared) for rank in range(world_size)
    ]
