"""What Comet asks of a network: memory that every rank of a group can address, and a barrier.

Kernels never see a communicator. They see a ``SymmTensor``'s pointer table, ``(W,)`` int64 addresses, one per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from comet.errors import UnavailableError

if TYPE_CHECKING:
    from comet.comm.failures import Board, Step
    from comet.comm.lifecycle import StreamOrder

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class SymmTensor:
    """The same tensor on every rank of a group, each rank's copy addressable by all.

    Args:
        peers: W tensors of equal shape and dtype; ``peers[r]`` is rank r's copy, mapped into this process.
        pointers: ``(W,)`` int64 on the communicator's device: the address of each ``peers[r]`` as seen from here.
        rank: Which of them is this rank's own.
    """

    peers: tuple[Tensor, ...]
    pointers: Tensor
    rank: int

    @property
    def local(self) -> Tensor:
        """This rank's own copy."""
        return self.peers[self.rank]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """A typed window of a byte pool, at the same place on every rank.

        Args:
            offset: Bytes from the start of the pool, a multiple of 256.
            shape: Shape of the window.
            dtype: Its element type.

        Returns:
            A ``SymmTensor`` over the same memory.

        Raises:
            ValueError: If the pool is not bytes, the offset is misaligned, or the window does not fit.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.local.dtype != torch.uint8:
            raise ValueError(f"dtype={self.local.dtype} of the pool must be torch.uint8 to take a typed view")
        if offset % ALIGNMENT or offset < 0:
            raise ValueError(f"offset={offset} must be a non-negative multiple of {ALIGNMENT}")
        if offset + num_bytes > self.local.numel():
            raise ValueError(f"offset={offset} + {num_bytes} bytes must fit the pool of {self.local.numel()} bytes")
        windows = tuple(peer[offset : offset + num_bytes].view(dtype).view(shape) for peer in self.peers)
        return SymmTensor(windows, self.pointers + offset, self.rank)

    def with_columns(self, columns: int) -> SymmTensor:
        """The same memory as a matrix of as many rows ``(R, columns)``, one after the other from its start.

        Raises:
            ValueError: If that many columns do not fit.
        """
        rows, most = self.local.shape
        if not 1 <= columns <= most:
            raise ValueError(f"columns={columns} must be between 1 and the {most} there is memory for")
        if columns == most:
            return self
        narrow = tuple(peer.view(-1)[: rows * columns].view(rows, columns) for peer in self.peers)
        return SymmTensor(narrow, self.pointers, self.rank)


def pointer_table(peers: Sequence[Tensor]) -> Tensor:
    """The addresses of W tensors, ``(W,)`` int64, on their device."""
    return torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device=peers[0].device)


def require_memory(comm: Communicator, what: str, instead: str) -> None:
    """Raise ``UnavailableError`` unless a group has symmetric memory.

    Args:
        comm: The group.
        what: What needs it: ``path='fused'``.
        instead: What to use instead.
    """
    if comm.memory_obstacle:
        raise UnavailableError(f"{what} needs one node, but {comm.memory_obstacle}; {instead}")


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks that can mostly allocate symmetric memory; as a context manager it closes itself.

    Attributes:
        rank: This rank in the group.
        world_size: W.
        device: Where symmetric memory lives.
        timeout_s: Deadline of every wait, in seconds.
        memory_obstacle: Why there is no symmetric memory, in words; empty where there is.
        all_left: Once closed, whether all ranks have closed it, or none waits for them.
        in_flight: Whether the present step has begun to send and not yet got all; set by what sends first.
        board: Where ranks leave notes of steps that failed.
        stream_order: Lets steps on different streams wait for each other.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float
    memory_obstacle: str
    all_left: bool
    in_flight: bool
    board: Board
    stream_order: StreamOrder

    def alloc(self, num_bytes: int) -> SymmTensor:
        """Allocate ``num_bytes`` zeroed bytes on every rank (collective, same size everywhere)."""
        ...

    def step(self, what: str, *, collectives: bool = False, refuses: bool | None = None) -> Step:
        """A context manager for one use of the group by all its ranks, refused after one that failed on any rank."""
        ...

    def restart(self) -> None:
        """Bring all ranks back into step after a failure (collective, between two steps)."""
        ...

    def renew_at_restart(self, epoch: Tensor, fault: Tensor, signals: Sequence[Tensor]) -> None:
        """Name an epoch, a fault record and signals that ``restart`` zeroes."""
        ...

    def barrier(self) -> None:
        """Return (CPU) or order the current stream (GPU) after every rank arrived; late ranks are named."""
        ...

    def require_open(self) -> None:
        """Raise ``RuntimeError`` after ``close``, ``StepFailedError`` after a step that failed on any rank."""
        ...

    def close(self) -> None:
        """Release everything (collective); idempotent. Any later use raises ``RuntimeError``."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``close()``, without waiting for the other ranks if an exception is on its way."""
        ...
