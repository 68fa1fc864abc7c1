"""What all communicators share: identity, validation, open and closed, use as a context manager."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import torch

from comet.comm.base import SymmTensor
from comet.config import require


class CommunicatorBase(ABC):
    """A communicator that knows who it is and whether it is still open; backends add memory and the barrier.

    Args:
        rank: This rank in the group, ``0 <= rank < world_size``.
        world_size: W, at least 1.
        device: Where symmetric memory lives.
        timeout_s: Deadline of every wait in seconds, positive and finite.

    Raises:
        ValueError: If a value breaks its rule.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        require(world_size >= 1, f"world_size={world_size} must be at least 1")
        require(0 <= rank < world_size, f"rank={rank} must be in [0, {world_size})")
        require(
            timeout_s > 0 and math.isfinite(timeout_s), f"timeout_s={timeout_s} must be a positive number of seconds"
        )
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.closed = False
        self.all_left = False

    def alloc(self, num_bytes: int) -> SymmTensor:
        """Allocate ``num_bytes`` zeroed bytes on every rank; collective, the same size everywhere.

        Raises:
            RuntimeError: After ``close``.
            ValueError: If the size is not positive, differs between ranks or does not fit.
            UnavailableError: If the ranks cannot map each other's memory.
        """
        self.require_open()
        require(num_bytes >= 1, f"num_bytes={num_bytes} must be at least 1")
        return self._alloc(num_bytes)

    def barrier(self) -> None:
        """Return (CPU) or order the current stream (GPU) after every rank arrived.

        Raises:
            RuntimeError: After ``close``.
            CommTimeoutError: When ranks are late; on a GPU the call after the late barrier raises.
        """
        self.require_open()
        self._barrier()

    def close(self) -> None:
        """Release everything (collective); idempotent. Tensors of this communicator must not be used afterwards."""
        if not self.closed:
            self.closed = True
            self.all_left = self._close(in_step=True)

    def require_open(self) -> None:
        """Raise ``RuntimeError`` after ``close``."""
        if self.closed:
            raise RuntimeError(f"{type(self).__name__} of rank {self.rank} was used after close()")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.closed:
            self.closed = True
            self._close(in_step=error is None)

    @abstractmethod
    def _alloc(self, num_bytes: int) -> SymmTensor: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _close(self, in_step: bool) -> bool:
        """Release everything; wait for the others only when ``in_step``, that is when they close too.

        Returns:
            Whether what waits for all ranks without a deadline may follow: they have all come here, or nothing waits.
        """
