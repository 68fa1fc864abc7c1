"""Symmetric memory of NVSHMEM, through nvshmem4py: GPUs of one host or of one NVLink domain.

NVSHMEM is one world per process. The first communicator starts it for its group; later ones must have the same ranks.
It stays up until the process ends, because it cannot be started a second time reliably; ``close`` frees memory only.
Start jobs with ``NVSHMEM_DISABLE_NVLS=1``: Comet never uses NVLink multicast, and not every machine may switch it on.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.comm.base import SymmTensor
from comet.comm.collective import board_of
from comet.comm.device_barrier import GpuCommunicator
from comet.comm.handshake import check_size, gather, refusal, who_shares
from comet.config import require
from comet.errors import CommTimeoutError, UnavailableError

logger = logging.getLogger(__name__)

INSTEAD = "use backend='symm_mem' on GPUs of one host, or backend='cpu_shm' with device='cpu'"
STATUS_NOT_STARTED = 0


class NvshmemCommunicator(GpuCommunicator):
    """Ranks are GPUs; memory comes from NVSHMEM's symmetric heap and peers are addressed by load and store."""

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._nvshmem = import_nvshmem()
        if not torch.cuda.is_available():
            raise UnavailableError(f"backend='nvshmem' needs a CUDA GPU; {INSTEAD}")
        super().__init__(group, device, timeout_s)
        self._pools: list[Tensor] = []
        with torch.cuda.device(device):
            shared = who_shares(group, device)
            require(not shared, refusal(device, "nvshmem", shared))
            start_nvshmem(group, device)
            self.board = board_of(group)
        self._device_barrier = self._make_barrier()
        self._leaving = self._make_barrier()

    def _alloc(self, num_bytes: int) -> SymmTensor:
        local = allocate(self._group, self.device, num_bytes)
        self._pools.append(local)
        with torch.cuda.device(self.device):
            return self._zeroed(tuple(self._peer(local, rank) for rank in range(self.world_size)))

    def _peer(self, local: Tensor, rank: int) -> Tensor:
        if rank == self.rank:
            return local
        try:
            return self._nvshmem.get_peer_tensor(local, rank)
        except self._nvshmem.NvshmemError as failure:
            raise UnavailableError(
                f"{self.device} of rank {self.rank} cannot address the GPU of rank {rank} by load and store; "
                "the MoE group must lie inside one NVLink domain: lower parallel.ep or parallel.tp until it does; the "
                "other ranks are data-parallel then"
            ) from failure

    def _close(self, in_step: bool) -> bool:
        all_left = in_step and self._all_leave()
        if all_left:
            for pool in reversed(self._pools):
                self._nvshmem.free_tensor(pool)
        torch.cuda.synchronize(self.device)
        self._pools.clear()
        del self._device_barrier, self._leaving
        return all_left

    def _all_leave(self) -> bool:
        """Whether every rank is about to free its memory, which NVSHMEM does collectively and without a deadline.

        A barrier of its own: a rank that met a deadline before may have arrived at the other one often enough to let
        its late peers through, but it never arrives here.
        """
        try:
            with torch.cuda.device(self.device):
                self._device_barrier.check()
                self._leaving.arrive()  # peers may still be writing into this rank's memory
                self._leaving.check()
        except CommTimeoutError as late:
            logger.warning("rank %d frees no symmetric memory, because freeing needs all ranks: %s", self.rank, late)
            return False
        return True


def import_nvshmem() -> ModuleType:
    """``nvshmem.core``; raises ``UnavailableError`` with the install command where it is missing."""
    try:
        return importlib.import_module("nvshmem.core")
    except ImportError as failure:
        raise UnavailableError(
            f"backend='nvshmem' needs nvshmem4py ({failure}): pip install 'comet-moe[nvshmem]'; or {INSTEAD}"
        ) from failure


class NvshmemHeap:
    """Memory of NVSHMEM's heap for ranks that need not be mapped."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._nvshmem, self._group, self._device = import_nvshmem(), group, device
        self._pools: list[Tensor] = []
        with torch.cuda.device(device):
            start_nvshmem(group, device)

    def alloc(self, num_bytes: int) -> Tensor:
        """``(num_bytes,)`` uint8 zeroes on all ranks (collective)."""
        pool = allocate(self._group, self._device, num_bytes)
        pool.zero_()
        torch.cuda.synchronize(self._device)
        gather(self._group, None)  # a peer's first put comes after its zeroes
        self._pools.append(pool)
        return pool

    def close(self, *, all_left: bool) -> None:
        """Free the memory if all ranks do, as NVSHMEM waits for them without a deadline; else the process keeps it."""
        torch.cuda.synchronize(self._device)
        for pool in self._pools if all_left else ():
            self._nvshmem.free_tensor(pool)
        self._pools.clear()


def start_nvshmem(group: ProcessGroup, device: torch.device) -> None:
    """Start NVSHMEM with the ranks of a group, or make sure that it runs with exactly these (collective)."""
    core, rank, world_size = import_nvshmem(), group.rank(), group.size()
    logger.debug("%r", core.get_version())  # also loads the library, which init_status() does not
    started = gather(group, core.init_status() != STATUS_NOT_STARTED)
    require(len(set(started)) == 1, f"NVSHMEM must run on all ranks of the group or on none, but {started=}")
    if not started[0]:
        cuda_device = importlib.import_module("cuda.core").Device(device.index)
        cuda_device.set_current()
        unique_id = core.get_unique_id(empty=rank != 0)
        content = unique_id._data.view(np.int8)  # the only access to the bytes; the library's own examples use it
        content[:] = gather(group, content.copy())[0]
        core.init(device=cuda_device, uid=unique_id, rank=rank, nranks=world_size, initializer_method="uid")
    pe, num_pes = core.my_pe(), core.n_pes()
    require(
        (pe, num_pes) == (rank, world_size),
        f"rank {rank} of {world_size} must be the same in NVSHMEM, which runs it as {pe} of {num_pes}",
    )


def allocate(group: ProcessGroup, device: torch.device, num_bytes: int) -> Tensor:
    """``(num_bytes,)`` uint8 of NVSHMEM's heap, on each rank of a group (collective)."""
    core = import_nvshmem()
    with torch.cuda.device(device):
        check_size(group, num_bytes)
        free = min(gather(group, torch.cuda.mem_get_info(device)[0]))
        require(
            num_bytes <= free,
            f"num_bytes={num_bytes} must fit every GPU of the group: {num_bytes} bytes needed, {free} bytes free "
            "on the fullest; lower max_tokens",
        )
        try:
            local: Tensor = core.tensor((num_bytes,), dtype=torch.uint8, except_on_del=False)
        except core.NvshmemError as failure:
            raise ValueError(
                f"num_bytes={num_bytes} must fit NVSHMEM's symmetric heap ({failure!r}); raise "
                "NVSHMEM_SYMMETRIC_SIZE before the job starts, or lower max_tokens"
            ) from failure
    return local
