"""NVLink domains that span hosts: GPUs are in one domain where each can map the memory of the other.

The driver makes *fabric handles* of memory. A GPU outside of the domain, or of another partition, cannot import one.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from types import ModuleType

import torch
from torch.distributed import ProcessGroup

from comet.comm.handshake import gather

LEAST_BYTES = 2 * 2**20  # that the driver shares


def domains_of(group: ProcessGroup, device: torch.device) -> list[int]:
    """The number of each rank's NVLink domain, which is its first rank (collective); a rank alone is one, too.

    Example: ranks 0 and 1 import handles of each other, and rank 2 none: ``[0, 0, 2]``.
    """
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        cuda = None
    with ExitStack() as until:
        handles = gather(group, cuda and exported(cuda, device, until))
        reached = gather(group, [bool(cuda and handle and can_import(cuda, handle)) for handle in handles])
    ranks = range(len(reached))
    return [next(n for n in ranks if n == rank or (reached[n][rank] and reached[rank][n])) for rank in ranks]


def exported(cuda: ModuleType, device: torch.device, until: ExitStack) -> bytes:
    """A fabric handle of memory that lives as long as ``until``; empty where the driver makes none."""
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id, wanted.requestedHandleTypes = device.index, kind
    status, memory = cuda.cuMemCreate(LEAST_BYTES, wanted, 0)
    if int(status):
        return b""
    until.callback(cuda.cuMemRelease, memory)
    status, handle = cuda.cuMemExportToShareableHandle(memory, kind, 0)
    return b"" if int(status) else bytes(handle.data)


def can_import(cuda: ModuleType, handle: bytes) -> bool:
    """Whether this process can import the memory of a fabric handle."""
    given = cuda.CUmemFabricHandle()
    given.data = handle
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    status, memory = cuda.cuMemImportFromShareableHandle(given.getPtr(), kind)
    if not int(status):
        cuda.cuMemRelease(memory)
    return not int(status)
