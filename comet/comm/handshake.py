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
from comet.errors import UnavailableError

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


def check_one_host(group: ProcessGroup, backend: str, instead: str) -> None:
    """Raise the same ``UnavailableError`` on every rank, naming the hosts, unless all run on one host (collective).

    Args:
        group: The ranks.
        backend: Name for the message.
        instead: What to use instead, for the message.
    """
    hosts: list[Host] = gather(group, this_host())
    if len({host.boot_id for host in hosts}) > 1:
        places = ", ".join(f"rank {rank} on {host.name}" for rank, host in enumerate(hosts))
        raise UnavailableError(f"backend={backend!r} needs all ranks on one host, but {places}; {instead}")


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
