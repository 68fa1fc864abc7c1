"""Messages between ranks over the process group: to share memory, after a measurement, and on the plain path per pass.

Its collectives have deadlines: the group's own, and a longer one for work that takes ranks unequally long.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.config import require
from comet.errors import UnavailableError

Made = TypeVar("Made")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Host:
    """A running operating system: two containers of one machine are one host, whatever they call themselves."""

    name: str
    boot_id: str


def this_host() -> Host:
    name = socket.gethostname()
    return Host(name, BOOT_ID.read_text().strip() if BOOT_ID.exists() else name)


def this_rank() -> tuple[int, int]:
    """Rank of this process, and ranks in all; ``(0, 1)`` without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gather(group: ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order (collective; also a host-side barrier); ``None`` is a rank alone."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def together(group: ProcessGroup | None, attempt: Callable[[], Made]) -> Made:
    """Return ``attempt()``, or raise the first refusal of any rank on all of them (collective)."""
    made, refused = [], None
    try:
        made.append(attempt())
    except (ValueError, OSError, UnavailableError) as error:
        refused = error
    for rank, other in enumerate(gather(group, refused)):
        if other is not None:
            raise refused or type(other)(f"rank {rank}: {other}")
    return made[0]


def largest(values: Sequence[float], device: torch.device, group: ProcessGroup | None) -> list[float]:
    """Each value's maximum over the ranks (collective); ``None`` is a rank alone. Waits for the device."""
    if group is None:
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return [float(value) for value in found.tolist()]


def check_size(group: ProcessGroup, num_bytes: int) -> None:
    """Raise the same ``ValueError`` on every rank unless all ask for the same size (collective)."""
    sizes = gather(group, num_bytes)
    require(len(set(sizes)) == 1, f"num_bytes={sizes} of ranks 0 to {len(sizes) - 1} must be equal")


def check_equal(group: ProcessGroup | None, fields: Mapping[str, Any]) -> None:
    """Raise the same ``ValueError`` on every rank, naming the field, unless all pass the same fields (collective).

    Example: ``{"max_tokens": 40}`` on rank 0 and ``{"max_tokens": 128}`` on rank 1: "max_tokens=128 of rank 1 must
    equal the 40 of rank 0".
    """
    first, *others = gather(group, dict(fields))
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            require(other[name] == value, f"{name}={other[name]} of rank {rank} must equal the {value} of rank 0")


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
    return f"device={device}: backend={backend!r} needs one GPU per rank, but {shared}"


PATIENCE = timedelta(minutes=30)
NCCL_MARGIN_S = 5.0  # NCCL's watchdog aborts the process, so a rank that can name the reason comes first


def set_deadline(group: ProcessGroup | None, timeout_s: float) -> None:
    """Let the next collectives of a gloo or NCCL group wait ``timeout_s`` seconds for a rank; NCCL takes five more."""
    for backend in _backends(group):
        margin_s = NCCL_MARGIN_S if backend.name() == "nccl" else 0.0
        backend._set_default_timeout(timedelta(seconds=timeout_s + margin_s))


def await_device(timeout_s: float, is_lost: Callable[[], bool] = lambda: False) -> None:
    """Wait for the current stream, at most ``timeout_s`` seconds: NCCL's own deadline ends the process.

    Args:
        is_lost: Whether there is no more to wait for.

    Raises:
        DistBackendError: If it is not done by then.
    """
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + timeout_s
    while not done.query() and time.monotonic() < deadline and not is_lost():
        time.sleep(0)  # not longer: a step waits here for its counts
    if not done.query():
        waited_s = time.monotonic() - deadline + timeout_s
        raise dist.DistBackendError(f"the device was not done after {waited_s:.1f} s")


def await_collectives(group: ProcessGroup | None, device: torch.device) -> None:
    """Wait for what a collective has made before anything waits for it without a deadline.

    Raises:
        DistBackendError: If a collective of NCCL is not done by the group's deadline.
    """
    for backend in _backends(group):
        if backend.name() == "nccl" and device.type == "cuda":
            await_device(backend.options._timeout.total_seconds() - NCCL_MARGIN_S)


def to_host(numbers: Tensor, group: ProcessGroup | None) -> list[Any]:
    """``numbers.tolist()`` of what a collective has made, which it awaits."""
    await_collectives(group, numbers.device)
    found: list[Any] = numbers.tolist()
    return found


def exchange(group: ProcessGroup, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return every rank's numbers, in rank order (collective), through the hosts if the group has a backend there."""
    device = torch.device("cpu") if torch.device("cpu") in group._device_types else device
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = mine.new_empty(group.size(), len(numbers))
    dist.all_gather(list(found.unbind()), mine, group=group)
    return to_host(found, group)


def abort_nccl(group: ProcessGroup | None) -> None:
    """End what NCCL has on the GPU: it waits for a rank that does not come, and would end the process for it."""
    for backend in _backends(group):
        if backend.name() == "nccl":
            backend.abort()


@contextmanager
def patience() -> Iterator[None]:
    """While the body runs, collectives of the default group may wait half an hour, as for a rank that writes more."""
    backends = _backends(dist.group.WORLD)
    before = [backend.options._timeout for backend in backends]
    for backend in backends:
        backend._set_default_timeout(PATIENCE)
    try:
        yield
    finally:
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def meet(device: torch.device) -> None:
    """Wait with patience for all ranks of the default group and this rank's device: work may have kept some longer."""
    if this_rank()[1] == 1:
        return
    with patience():
        # An all-reduce rather than dist.barrier(): it works on whatever backend the device has.
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _backends(group: ProcessGroup | None) -> list[Any]:
    if group is None:
        return []
    found = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    return [backend for backend in found.values() if backend.name() in ("gloo", "nccl")]
