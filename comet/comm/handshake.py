"""What ranks tell each other over the process group: to share memory, and after a measurement; never per step."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.config import require

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Host:
    """A running operating system: two containers of one machine are one host, whatever they call themselves."""

    name: str
    boot_id: str


def this_host() -> Host:
    """The host of this process."""
    name = socket.gethostname()
    return Host(name, BOOT_ID.read_text().strip() if BOOT_ID.exists() else name)


def gather(group: ProcessGroup, value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order (collective; also a host-side barrier)."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def check_size(group: ProcessGroup, num_bytes: int) -> None:
    """Raise the same ``ValueError`` on every rank unless all ask for the same size (collective)."""
    sizes = gather(group, num_bytes)
    require(len(set(sizes)) == 1, f"num_bytes={sizes} of ranks 0 to {len(sizes) - 1} must be equal")


def check_equal(group: ProcessGroup, fields: Mapping[str, Any]) -> None:
    """Raise the same ``ValueError`` on every rank, naming the field, unless all pass the same fields (collective).

    Args:
        group: The ranks.
        fields: Values by name, the same names on all ranks.

    Example:
        ``{"max_tokens": 40}`` on rank 0 and ``{"max_tokens": 128}`` on rank 1: "max_tokens=128 of rank 1 must equal the
        40 of rank 0".
    """
    first, *others = gather(group, dict(fields))
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            require(other[name] == value, f"{name}={other[name]} of rank {rank} must equal the {value} of rank 0")


def separate_nodes(group: ProcessGroup, node_size: int | None) -> str:
    """Which ranks of the job run on which nodes, in words; empty where all run on one (collective).

    Args:
        group: The ranks.
        node_size: Consecutive ranks of the job that are a node; ``None``: the ranks of a host.

    Example:
        ``"ranks 0 to 7 on host-a, ranks 8 to 15 on host-b"``; of declared nodes
        ``"ranks 0 to 1 on host-a (node 0), ranks 2 to 3 on host-a (node 1)"``.
    """
    names: dict[tuple[str, int | None], str] = {}
    nodes: dict[tuple[str, int | None], list[int]] = {}
    for rank, host in zip(dist.get_process_group_ranks(group), gather(group, this_host()), strict=True):
        node = (host.boot_id, None if node_size is None else rank // node_size)
        names.setdefault(node, host.name)
        nodes.setdefault(node, []).append(rank)
    if len(nodes) == 1:
        return ""
    return ", ".join(
        f"{_counted_ranks(ranks)} on {names[node]}" + ("" if node[1] is None else f" (node {node[1]})")
        for node, ranks in nodes.items()
    )


def _counted_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 7``, or ``ranks 0, 2`` where they do not follow each other."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def who_shares(group: ProcessGroup, device: torch.device) -> str:
    """The first two ranks that use the same GPU, in words, the same on all ranks; empty if none do (collective)."""
    mine = (this_host().boot_id, str(torch.cuda.get_device_properties(device).uuid))
    devices: Sequence[tuple[str, str]] = gather(group, mine)
    for rank, other in enumerate(devices):
        first = devices.index(other)
        if first != rank:
            return f"ranks {first} and {rank} share one GPU"
    return ""


def refusal(device: torch.device, backend: str, shared: str) -> str:
    """What to say where a backend cannot serve ranks that share a GPU, as ``who_shares`` found."""
    return f"device={device}: backend={backend!r} needs one GPU per rank, but {shared}"
