"""Where all experts of a layer are: in host memory that the device reads, or in files.

A host store is filled expert by expert, each read straight into its place, so no expert is ever held twice. Memory is
page-locked ("pinned") exactly as large as it is: torch's own pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class ExpertReader(Protocol):
    """The experts of one layer, wherever they are kept; ``shapes`` are w1's ``(E, 2F, D)`` and w2's ``(E, D, F)``."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of all experts together."""
        ...

    def read(self, expert: int, w1: Tensor, w2: Tensor) -> None:
        """Read one expert into host memory.

        Args:
            expert: In ``[0, E)``.
            w1: ``(2F, D)``, gate rows first, then up rows; converted to its dtype.
            w2: ``(D, F)``, likewise.

        Raises:
            ValueError: If what is read is damaged or has changed; then neither ``w1`` nor ``w2`` means anything.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """All experts of one layer in host memory, which is itself a reader of them.

    Args:
        w1: ``(E, 2F, D)``.
        w2: ``(E, D, F)``.
        readable: Whether the device reads this memory: it is pinned, or the device is the CPU.
    """

    w1: Tensor
    w2: Tensor
    readable: bool

    @classmethod
    def fill(cls, reader: ExpertReader, dtype: torch.dtype, device: torch.device) -> HeldExperts:
        """Read all experts of a layer, one after the other, into memory made for them.

        Args:
            reader: Of the layer.
            dtype: Of the memory.
            device: That is to read it.

        Returns:
            Pinned memory; pageable where the machine pins no more, which is said once.
        """
        shape1, shape2 = reader.shapes
        (w1, pinned1), (w2, pinned2) = (host_memory(shape, dtype, device) for shape in (shape1, shape2))
        for expert in range(shape1[0]):
            reader.read(expert, w1[expert], w2[expert])
        return cls(w1, w2, pinned1 and pinned2)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``ExpertReader``."""
        return tuple(self.w1.shape), tuple(self.w2.shape)

    def read(self, expert: int, w1: Tensor, w2: Tensor) -> None:
        """See ``ExpertReader``."""
        w1.copy_(self.w1[expert])
        w2.copy_(self.w2[expert])


class PinnedMapping(mmap.mmap):
    """Anonymous memory that a GPU reads, until nobody refers to it any more."""

    registered: tuple[Any, int] | None = None

    def register(self, address: int, num_bytes: int) -> int:
        """Let the GPU read it; returns 0, or CUDA's error number."""
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if status == 0:
            self.registered = runtime, address
            self.madvise(mmap.MADV_DONTFORK)  # a page that is copied on a write after a fork is not the GPU's page
        return status

    def __del__(self) -> None:
        if self.registered is not None:  # before the pages go
            runtime, address = self.registered
            runtime.cudaHostUnregister(address)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, bool]:
    """Memory of the host, zeros until it is written to.

    Args:
        shape: Of the tensor; not empty.
        dtype: Of its elements.
        device: That is to read it.

    Returns:
        The tensor, and whether ``device`` reads it: always where it is the CPU, on a GPU where it could be pinned.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    mapping = PinnedMapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=dtype).view(*shape)
    if device.type == "cpu" or mapping.register(memory.data_ptr(), num_bytes) == 0:
        return memory, True
    with suppress(RuntimeError):  # CUDA reports an error that is not picked up at the next launch
        torch.ones(1, device=device)
    return memory, False


def warn_pageable(num_bytes: int) -> None:
    """Say once per model what it costs that memory of so many bytes could not be pinned."""
    logger.warning(
        "%.3f GB of host memory for experts cannot be pinned (ulimit -l, a container's limit, or too little of it): "
        "the GPU cannot read experts there itself, so the host copies every missing one, first to pinned memory and "
        "then to the GPU, and waits for the GPU in every layer; decode steps are not replayed from a CUDA graph",
        num_bytes / 1e9,
    )
