"""The nodes of a job: ranks that reach each other's memory, on one host or on hosts that NVLink joins."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.comm.handshake import gather, this_host

LEAST_BYTES = 2 * 2**20  # The driver shares whole pages of so many bytes.


@dataclass(frozen=True, slots=True)
class Node:
    """Ranks of the job that reach each other's memory."""

    host: str  # name of its host, or names of the hosts of an NVLink domain
    number: int | None  # of a declared node
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{ranks_in_words(self.ranks)} on {self.host}" + (
            "" if self.number is None else f" (node {self.number})"
        )


def nodes_of(group: ProcessGroup, node_size: int | None, device: torch.device) -> list[Node]:
    """The nodes that the ranks of a group run on, in the order of their first ranks (collective).

    Args:
        node_size: Consecutive ranks of the job that are a node; ``None``: the ranks of a host, or of hosts that NVLink
            joins.

    Example: of four ranks on one host with ``node_size=2``: "ranks 0 to 1 on host-a (node 0)" and "ranks 2 to 3 on
    host-a (node 1)". Two hosts that NVLink joins are one node: "ranks 0 to 3 on host-a, host-b".
    """
    names: dict[tuple[int, int | None], list[str]] = {}
    ranks_of: dict[tuple[int, int | None], list[int]] = {}
    hosts = gather(group, this_host())
    boot_ids = [host.boot_id for host in hosts]
    domains = [boot_ids.index(boot_id) for boot_id in boot_ids]
    if len(set(domains)) > 1 and device.type == "cuda":
        of_ranks = domains_of(group, device)
        of_host = {
            first: {each for each, host in zip(of_ranks, domains, strict=True) if host == first} for first in domains
        }
        domains = [min(of_host[first]) if len(of_host[first]) == 1 else first for first in domains]
    for rank, host, domain in zip(dist.get_process_group_ranks(group), hosts, domains, strict=True):
        key = (domain, None if node_size is None else rank // node_size)
        ranks_of.setdefault(key, []).append(rank)
        of_node = names.setdefault(key, [])
        of_node += [host.name] if host.name not in of_node else []
    return [Node(", ".join(names[key]), key[1], tuple(ranks)) for key, ranks in ranks_of.items()]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 7``, or ``ranks 0, 2`` where they do not follow each other."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def domains_of(group: ProcessGroup, device: torch.device) -> list[int]:
    """The number of each rank's NVLink domain, which is its first rank (collective); a rank alone is one, too.

    GPUs are in one domain where each can map the memory of the other. The driver makes *fabric handles* of memory. A
    GPU outside of the domain, or of another partition, cannot import one.

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
