"""Symmetric memory, where there is any: ``make_communicator`` alone knows the names of the backends."""

from __future__ import annotations

from typing import get_args

import torch
from torch.distributed import ProcessGroup

from comet.comm.base import Communicator, LocalCommunicator, SymmTensor
from comet.comm.handshake import gather
from comet.comm.nodes import nodes_of
from comet.config import require
from comet.errors import UnavailableError
from comet.utils.choices import CommBackend


def make_communicator(
    backend: CommBackend,
    group: ProcessGroup | None,
    device: torch.device | str,
    *,
    timeout_s: float = 30.0,
    node_size: int | None = None,
) -> Communicator:
    """Make this rank's communicator of a group (collective over the group).

    Args:
        backend: ``cpu_shm`` (processes of one host), ``symm_mem`` (GPUs of one host or NVLink domain), ``nvshmem``
            (needs nvshmem4py), or ``auto``: ``cpu_shm`` on the CPU, ``symm_mem`` on GPUs, and no symmetric memory for
            ranks of several nodes, nor where a rank's GPU runs no kernel of ours (``comet.kernels.runtime.arch``).
        group: The ranks; ``None`` means this process alone, not all ranks (that is ``torch.distributed.group.WORLD``).
        device: Where symmetric memory lives; ``"cuda"`` without an index is the current GPU.
        timeout_s: Deadline of every wait, in seconds.
        node_size: Consecutive ranks of the job that are a node; ``None``: the ranks of a host.

    Raises:
        ValueError: If the backend does not exist or does not fit the device, or the group has another size.
        UnavailableError: If the backend cannot work here; the message says what to use instead.
    """
    require(backend in get_args(CommBackend), f"backend={backend!r} must be one of {', '.join(get_args(CommBackend))}")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    kind = "cpu" if backend == "cpu_shm" else "cuda"
    require(backend == "auto" or device.type == kind, f"device={device} must be {kind!r} for backend={backend!r}")
    require(
        group is None or isinstance(group, ProcessGroup),
        f"group={group!r} must be a process group this rank belongs to, or None for a rank alone",
    )
    size = 1 if group is None else group.size()
    if group is None or size == 1:
        return LocalCommunicator(device, timeout_s, kernel_obstacle(device))
    found_nodes = nodes_of(group, node_size, device)
    nodes = ", ".join(map(str, found_nodes)) if len(found_nodes) > 1 else ""
    found = gather(group, kernel_obstacle(device)) if device.type == "cuda" else []
    lacking = next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), "")
    obstacle = f"a group of {size} ranks spans several: {nodes}" if nodes else lacking
    if obstacle and backend == "auto":
        from comet.comm.collective import CollectiveCommunicator

        return CollectiveCommunicator(group, device, timeout_s, obstacle)
    if nodes and (backend != "nvshmem" or (node_size or size) < size):
        raise UnavailableError(
            f"backend={backend!r} needs all ranks of a group on one node, but there are {nodes}; use backend='auto', "
            "or backend='nvshmem' for GPUs that NVLink joins over hosts"
        )
    if lacking:
        raise UnavailableError(f"backend={backend!r} cannot be used: {lacking}; use backend='auto' and path 'plain'")
    backend = resolve_backend(backend, device)
    if backend == "nvshmem":
        from comet.comm.nvshmem import NvshmemCommunicator

        return NvshmemCommunicator(group, device, timeout_s)
    if backend == "symm_mem":
        from comet.comm.symm_mem import SymmMemCommunicator

        return SymmMemCommunicator(group, device, timeout_s)
    from comet.comm.cpu_shm import CpuShmCommunicator

    return CpuShmCommunicator(group, device, timeout_s)


def resolve_backend(backend: CommBackend, device: torch.device) -> CommBackend:
    """The backend that ``auto`` is for ranks that reach each other's memory; any other as it is."""
    if backend == "auto":
        return "symm_mem" if device.type == "cuda" else "cpu_shm"
    return backend


def kernel_obstacle(device: torch.device) -> str:
    """Return why a GPU runs none of Comet's kernels, in words; empty where it does, on a CPU, and without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    from comet.kernels.runtime.arch import obstacle  # needs Triton, as GPUs do

    return obstacle(device)
