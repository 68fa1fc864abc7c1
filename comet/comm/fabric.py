"""NVLink domains that span hosts: GPUs are in one domain where each can map the memory of the other.

The driver makes *fabric handles* of memory. A GPU outside of the domain, or of another partition, cannot import one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comet.comm.handshake import gather


def domains_of(group: ProcessGroup, device: torch.device) -> list[int]:
    """The number of each rank's NVLink domain, which is its first rank (collective); a rank alone is one, too."""
    with ExitStack() as until:
        handles = gather(group, exported(device, until))
        reached = gather(group, [bool(handle) and can_import(handle) for handle in handles])
    return joined(reached)


def joined(reached: Sequence[Sequence[bool]]) -> list[int]:
    """The first rank that each rank reaches and that reaches it.

    Example: ranks 0 and 1 reach each other, and rank 2 none of them: ``[0, 0, 2]``.
    """
    ranks = range(len(reached))
    return [next(n for n in ranks if n == rank or (reached[n][rank] and reached[rank][n])) for rank in ranks]


def driver() -> ModuleType | None:
    """``cuda.bindings.driver``, or ``None`` where that package is missing."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def exported(device: torch.device, until: ExitStack) -> bytes:
    """A fabric handle of memory that lives as long as ``until``; empty where the driver makes none."""
    cuda = driver()
    if cuda is None:
        return b""
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id, wanted.requestedHandleTypes = device.index, kind
    least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    status, size = cuda.cuMemGetAllocationGranularity(wanted, least)
    memory: Any = None
    if not int(status):
        status, memory = cuda.cuMemCreate(size, wanted, 0)
    if int(status):
        return b""
    until.callback(cuda.cuMemRelease, memory)
    status, handle = cuda.cuMemExportToShareableHandle(memory, kind, 0)
    return b"" if int(status) else bytes(handle.data)


def can_import(handle: bytes) -> bool:
    """Whether this process can import the memory of a fabric handle."""
    cuda = driver()
    if cuda is None:
        return False
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    given = cuda.CUmemFabricHandle()
    given.data = handle
    status, memory = cuda.cuMemImportFromShareableHandle(given.getPtr(), kind)
    if not int(status):
        cuda.cuMemRelease(memory)
    return not int(status)
