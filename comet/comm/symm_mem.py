"""Symmetric memory of ``torch.distributed``: GPUs that NVLink joins, of one host or of several, nothing to install.

NVLink multicast is never used.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as torch_symm_mem

from comet.comm.base import SymmTensor, settle
from comet.comm.collective import board_of
from comet.comm.device_barrier import GpuCommunicator
from comet.comm.handshake import check_size, gather, refusal, who_shares
from comet.config import require
from comet.errors import CommTimeoutError, UnavailableError

logger = logging.getLogger(__name__)

INSTEAD = "use backend='nvshmem', or backend='cpu_shm' with device='cpu'"


class SymmMemCommunicator(GpuCommunicator):
    """Ranks are GPUs that NVLink joins; every rank maps every rank's memory.

    Tests may set torch to let several ranks share a GPU; these ranks take turns.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        if not torch.cuda.is_available():
            raise UnavailableError(f"backend='symm_mem' needs a CUDA GPU; {INSTEAD}")
        super().__init__(group, device, timeout_s)
        self._pools: list[SymmTensor] = []
        with torch.cuda.device(device):
            self.board = board_of(group)
            self._shared = who_shares(group, device)
        self._device_barrier = self._make_barrier()
        if self._shared and self.rank == 0:
            logger.warning("%s and take turns, which is slow", self._shared)

    def _alloc(self, num_bytes: int) -> SymmTensor:
        with torch.cuda.device(self.device):
            check_size(self._group, num_bytes)
            local, error = self._reserve(num_bytes)
            errors = [text for text in gather(self._group, error) if text]
            require(not errors, "; ".join(errors))
            pool = self._zeroed(self._exchange(local))
        self._pools.append(pool)
        return pool

    def _reserve(self, num_bytes: int) -> tuple[Tensor, str]:
        free, _ = torch.cuda.mem_get_info(self.device)
        if num_bytes > free:
            return torch.empty(0), (
                f"num_bytes={num_bytes} must fit {self.device} of rank {self.rank}: {num_bytes} bytes needed, "
                f"{free} bytes free; lower max_tokens"
            )
        try:
            # torch_symm_mem.empty() may cut several allocations out of one block; peers need a whole block each.
            allocate = torch_symm_mem._SymmetricMemory.empty_strided_p2p
            return allocate((num_bytes,), (1,), torch.uint8, self.device), ""
        except RuntimeError as failure:  # fragmentation, or a limit below the free memory
            return torch.empty(0), f"num_bytes={num_bytes} on rank {self.rank}: {failure}; lower max_tokens"

    def _exchange(self, local: Tensor) -> tuple[Tensor, ...]:
        try:
            handle = torch_symm_mem.rendezvous(local, self._group.group_name)
        except RuntimeError as failure:
            require(not self._shared, f"{refusal(self.device, 'symm_mem', self._shared)} ({failure})")
            raise UnavailableError(
                f"{self.device} cannot map the memory of its peers ({failure}); {INSTEAD}, or over several hosts set "
                "parallel.node_size to the ranks of one host"
            ) from failure
        mapped = [handle.get_buffer(rank, (local.numel(),), torch.uint8) for rank in range(self.world_size)]
        assert mapped[self.rank].data_ptr() == local.data_ptr(), "the allocation must start at its handle's base"
        mapped[self.rank] = local  # keeps the allocation, and with it the handle, alive
        return tuple(mapped)

    def _close(self, in_step: bool) -> bool:
        settle(self.device)  # work of other streams may still read and write what peers can see
        try:
            if in_step and not self._device_barrier.failed:
                self._barrier()  # peers may still be writing into this rank's memory
                self._device_barrier.check()
                return True
        except CommTimeoutError as late:
            logger.warning("symmetric memory is released although a rank did not close: %s", late)
        finally:
            torch.cuda.synchronize(self.device)
            self._pools.clear()
            del self._device_barrier
        return False
