"""Where all experts of a layer are: in host memory that the device reads, or in files.

A host store is filled expert by expert, each read straight into its place, or quantised into it, so no expert is ever
held twice, but for the one that is being quantised. Memory is
page-locked ("pinned") exactly as large as it is: torch's own pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from comet.config import require
from comet.kernels.expert_parts import ExpertParts
from comet.quantize import MX_BLOCK, MXType, quantize_mx

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


class ScaledReader(ExpertReader, Protocol):
    """An ``ExpertReader`` of experts in block FP8, which ``read`` gives as they are stored."""

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the scales of all w1, and of all w2; see ``DecodeWeights``."""
        ...

    def read_scales(self, expert: int, w1_scales: Tensor, w2_scales: Tensor) -> None:
        """Read one expert's scales, as float32; otherwise as ``read``."""
        ...


@dataclass(frozen=True, slots=True)
class HeldExperts(ExpertParts):
    """All experts of one layer in host memory, which is itself a reader of those that are not quantised.

    Args:
        w1: ``(E, 2F, D)``; quantised as in ``DecodeWeights``.
        w2: ``(E, D, F)``, likewise.
        readable: Whether the device reads this memory: it is pinned, or the device is the CPU.
        w1_scales: Of quantised experts.
        w2_scales: Likewise.
    """

    w1: Tensor
    w2: Tensor
    readable: bool
    w1_scales: Tensor | None = None
    w2_scales: Tensor | None = None

    @classmethod
    def hold(cls, parts: Mapping[str, Tensor], device: torch.device, file: MemoryFile | None = None) -> HeldExperts:
        """Whole tensors by their names: themselves where ``device`` reads them, else a copy in memory made for it.

        Args:
            parts: The tensors.
            device: That is to read them.
            file: That another process maps, too; they are copied there in any case.
        """
        held: dict[str, Any] = {name: part.contiguous() for name, part in parts.items()}
        if file is None and (device.type == "cpu" or all(part.is_pinned() for part in held.values())):
            return cls(**held, readable=True)
        made, readable = _memory([(part.shape, part.dtype) for part in held.values()], device, file)
        for name, memory in zip(parts, made, strict=True):
            held[name] = memory.copy_(held[name])
        return cls(**held, readable=readable)

    @classmethod
    def fill(
        cls, reader: ExpertReader, dtype: torch.dtype, device: torch.device, file: MemoryFile | None = None
    ) -> HeldExperts:
        """Read all experts of a layer, one after the other, into memory made for them.

        Args:
            reader: Of the layer.
            dtype: Of the memory.
            device: That is to read it.
            file: That another process maps, too.

        Returns:
            Pinned memory; pageable where the machine pins no more, which is said once.
        """
        (w1, w2), readable = _memory([(shape, dtype) for shape in reader.shapes], device, file)
        for expert in range(w1.shape[0]):
            reader.read(expert, w1[expert], w2[expert])
        return cls(w1, w2, readable)

    @classmethod
    def quantise(
        cls,
        reader: ExpertReader,
        dtype: torch.dtype,
        device: torch.device,
        to: MXType,
        file: MemoryFile | None = None,
    ) -> HeldExperts:
        """``fill``, where each expert is read in ``dtype`` and quantised by ``quantize_mx``.

        Raises:
            ValueError: If D or F is no multiple of 32, or a number is NaN or infinite.
        """
        for shape in reader.shapes:
            require(shape[-1] % MX_BLOCK == 0, f"contraction={shape[-1]} must be a multiple of {MX_BLOCK} for {to}")
        element, per_byte = (torch.uint8, 2) if to == "mxfp4" else (torch.float8_e4m3fn, 1)
        elements = [((*shape[:-1], shape[-1] // per_byte), element) for shape in reader.shapes]
        scales = [((*shape[:-1], shape[-1] // MX_BLOCK), torch.uint8) for shape in reader.shapes]
        (w1, w2, w1_scales, w2_scales), readable = _memory([*elements, *scales], device, file)
        one1, one2 = (torch.empty(shape[1:], dtype=dtype) for shape in reader.shapes)
        for expert in range(w1.shape[0]):
            reader.read(expert, one1, one2)
            for weight, into, its_scales in ((one1, w1, w1_scales), (one2, w2, w2_scales)):
                packed = quantize_mx(weight, to)
                into[expert], its_scales[expert] = packed.elements, packed.scales
        return cls(w1, w2, readable, w1_scales, w2_scales)

    @classmethod
    def keep_fp8(cls, reader: ScaledReader, device: torch.device, file: MemoryFile | None = None) -> HeldExperts:
        """``fill`` with block FP8 as it is stored."""
        elements = [(shape, torch.float8_e4m3fn) for shape in reader.shapes]
        scales = [(shape, torch.float32) for shape in reader.scale_shapes]
        (w1, w2, w1_scales, w2_scales), readable = _memory([*elements, *scales], device, file)
        for expert in range(w1.shape[0]):
            reader.read(expert, w1[expert], w2[expert])
            reader.read_scales(expert, w1_scales[expert], w2_scales[expert])
        return cls(w1, w2, readable, w1_scales, w2_scales)

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return sum(part.nbytes for part in self.parts)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``ExpertReader``."""
        return tuple(self.w1.shape), tuple(self.w2.shape)

    def read(self, expert: int, w1: Tensor, w2: Tensor) -> None:
        """See ``ExpertReader``."""
        w1.copy_(self.w1[expert])
        w2.copy_(self.w2[expert])


class PinnedMapping(mmap.mmap):
    """Memory that a GPU reads, until nobody refers to it any more."""

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


class MemoryFile:
    """A file in memory, without a name, that another process maps as well; it goes with the last one that does.

    Attributes:
        descriptor: Of the open file.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("comet-experts")
        self._num_bytes = 0
        self._offsets: dict[int, int] = {}

    def map(self, num_bytes: int) -> PinnedMapping:
        """Make the file so much longer, from a whole page on, and map that."""
        offset = -(-self._num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._num_bytes = offset + num_bytes
        os.ftruncate(self.descriptor, self._num_bytes)
        mapping = PinnedMapping(self.descriptor, num_bytes, flags=mmap.MAP_SHARED, offset=offset)
        self._offsets[torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()] = offset
        return mapping

    def offset_of(self, memory: Tensor) -> int:
        """Where a tensor of ``host_memory`` begins in the file."""
        return self._offsets[memory.data_ptr()]

    def close(self) -> None:
        """Map no more; what is mapped stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def host_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, file: MemoryFile | None = None
) -> tuple[Tensor, bool]:
    """Memory of the host, zeros until it is written to.

    Args:
        shape: Of the tensor; not empty.
        dtype: Of its elements.
        device: That is to read it.
        file: That it is to be in, where another process maps it, too.

    Returns:
        The tensor, and whether ``device`` reads it: always where it is the CPU, on a GPU where it could be pinned.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if file is None:
        mapping = PinnedMapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        mapping = file.map(num_bytes)
    memory = torch.frombuffer(mapping, dtype=dtype).view(*shape)
    if device.type == "cpu" or mapping.register(memory.data_ptr(), num_bytes) == 0:
        return memory, True
    with suppress(RuntimeError):  # CUDA reports an error that is not picked up at the next launch
        torch.ones(1, device=device)
    return memory, False


def _memory(
    parts: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device, file: MemoryFile | None = None
) -> tuple[list[Tensor], bool]:
    """``host_memory`` of each shape and dtype, and whether ``device`` reads all of it."""
    made = [host_memory(shape, dtype, device, file) for shape, dtype in parts]
    return [memory for memory, _ in made], all(readable for _, readable in made)


def warn_pageable(num_bytes: int, layer: HeldExperts, device: torch.device) -> None:
    """Say once per model what it costs that memory of so many bytes could not be pinned, by a copy that is measured.

    Args:
        num_bytes: That the GPU does not read.
        layer: One of those that hold them.
        device: The GPU.
    """
    seconds, expert = seconds_to_copy(layer.w1[0], layer.w2[0], device=device), layer.num_bytes // len(layer.w1)
    logger.warning(
        "%.3f GB of host memory for experts cannot be pinned (ulimit -l, a container's limit, or too little of it): "
        "the GPU cannot read experts there itself, so the host copies every missing one, first to pinned memory and "
        "then to the GPU (measured: %.3f ms for an expert of %.3f MB), and waits for the GPU in every layer; decode "
        "steps are not replayed from a CUDA graph",
        num_bytes / 1e9,
        seconds * 1e3,
        expert / 1e6,
    )


def seconds_to_copy(*tensors: Tensor, device: torch.device) -> float:
    """What it takes to bring tensors from host memory to a device through pinned memory, the second time."""
    pairs = [
        (host_memory(each.shape, each.dtype, device)[0], torch.empty_like(each, device=device)) for each in tensors
    ]
    for _ in range(2):
        started = time.perf_counter()
        for each, (stage, target) in zip(tensors, pairs, strict=True):
            target.copy_(stage.copy_(each), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - started
