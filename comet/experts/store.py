"""Stores that hold all experts of a layer, in host memory that the device reads, or in files.

A host store is filled expert by expert, each read straight into its place, or quantised into it, so no expert is ever
held twice, but for the one that is being quantised. Memory is
page-locked ("pinned") exactly as large as it is: torch's own pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from comet.config import require
from comet.kernels.experts.tables import ExpertParts
from comet.quantization.formats import MX_BLOCK, MXType, check_mx_type, quantize_mx

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class ExpertReader(Protocol):
    """The experts of one layer, wherever they are kept."""

    @property
    def specs(self) -> Specs:
        """Shape, an expert a row, and dtype of each part, by the names and in the order of ``ExpertParts``."""
        ...

    def read(self, expert: int, into: Mapping[str, Tensor]) -> None:
        """Read one expert into host memory.

        Raises:
            ValueError: If what is read is damaged, has changed, or has scales that are no numbers; then nothing of
                ``into`` means anything.
        """
        ...


@dataclass(frozen=True, slots=True)
class QuantisedReader:
    """Experts of another reader, each quantised by ``quantize_mx`` as it is read; an ``ExpertReader``.

    Example: w1 ``(64, 128, 256)`` in bfloat16 becomes ``(64, 128, 128)`` uint8 in MXFP4, with w1_scales
    ``(64, 128, 8)``.
    """

    reader: ExpertReader
    to: MXType  # the type that experts are stored in

    def __post_init__(self) -> None:
        check_mx_type("expert_dtype", self.to)
        for shape in self._wide.values():
            require(
                shape[-1] % MX_BLOCK == 0, f"contraction={shape[-1]} must be a multiple of {MX_BLOCK} for {self.to}"
            )

    @property
    def specs(self) -> Specs:
        """Elements and scales of each part."""
        element, per_byte = (torch.uint8, 2) if self.to == "mxfp4" else (torch.float8_e4m3fn, 1)
        wide = self._wide
        elements = {name: ((*shape[:-1], shape[-1] // per_byte), element) for name, shape in wide.items()}
        scales = {f"{name}_scales": ((*shape[:-1], shape[-1] // MX_BLOCK), torch.uint8) for name, shape in wide.items()}
        return elements | scales | {name: spec for name, spec in self.reader.specs.items() if name not in wide}

    def read(self, expert: int, into: Mapping[str, Tensor]) -> None:
        """Read one expert and quantise it."""
        specs = self.reader.specs
        wide = {name: torch.empty(shape[1:], dtype=specs[name][1]) for name, shape in self._wide.items()}
        self.reader.read(expert, {name: into[name] for name in specs} | wide)
        for name, weight in wide.items():
            packed = quantize_mx(weight, self.to)
            into[name].copy_(packed.elements)
            into[f"{name}_scales"].copy_(packed.scales)

    @property
    def _wide(self) -> dict[str, tuple[int, ...]]:
        return {name: self.reader.specs[name][0] for name in ("w1", "w2")}  # biases stay as they are


@dataclass(frozen=True, slots=True)
class HeldExperts(ExpertParts):
    """All experts of one layer in host memory, which is itself an ``ExpertReader``."""

    w1: Tensor  # (E, 2F, D); quantised as in DecodeWeights
    w2: Tensor  # (E, D, F)
    readable: bool  # whether the device reads this memory: it is pinned, or the device is the CPU
    w1_scales: Tensor | None = None
    w2_scales: Tensor | None = None
    b1: Tensor | None = None  # (E, 2F), gate, then up
    b2: Tensor | None = None  # (E, D); None on all but the first TP rank of a shard

    @classmethod
    def hold(cls, parts: Mapping[str, Tensor], device: torch.device, file: MemoryFile | None = None) -> HeldExperts:
        """Whole tensors: themselves where ``device`` reads them and there is no ``file``, else copies."""
        held: dict[str, Any] = {name: part.contiguous() for name, part in parts.items()}
        if file is None and (device.type == "cpu" or all(part.is_pinned() for part in held.values())):
            return cls(**held, readable=True)
        return cls.fill(cls(**held, readable=True), device, file)

    @classmethod
    def fill(cls, reader: ExpertReader, device: torch.device, file: MemoryFile | None = None) -> HeldExperts:
        """Read all experts of a layer, one after the other, into memory made for them, or into ``file``."""
        made = {name: host_memory(shape, dtype, device, file) for name, (shape, dtype) in reader.specs.items()}
        parts: dict[str, Any] = {name: memory for name, (memory, _) in made.items()}
        for expert in range(len(parts["w1"])):
            reader.read(expert, {name: memory[expert] for name, memory in parts.items()})
        return cls(**parts, readable=all(readable for _, readable in made.values()))

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.stored_parts.values())

    @property
    def specs(self) -> Specs:
        """Shape and dtype of each part."""
        return {name: (tuple(part.shape), part.dtype) for name, part in self.stored_parts.items()}

    def read(self, expert: int, into: Mapping[str, Tensor]) -> None:
        for name, part in self.stored_parts.items():
            into[name].copy_(part[expert])


class PinnedMapping(mmap.mmap):
    """Memory that a GPU reads, registered for as long as a tensor uses it."""

    registered: tuple[Any, Callable[[], int], int] | None = None

    def register(self, address: int, num_bytes: int) -> int:
        """Let the GPU read it; returns 0, or CUDA's error number."""
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if status == 0:
            self.registered = runtime, exchange_of_capture_mode(), address
            self.madvise(mmap.MADV_DONTFORK)  # a page that is copied on a write after a fork is not the GPU's page
        return status

    def __del__(self) -> None:
        if self.registered is not None:  # before the pages go
            runtime, exchange, address = self.registered
            exchange()  # garbage is collected at any time, and in the midst of a capture CUDA refuses this, and ends it
            runtime.cudaHostUnregister(address)
            exchange()


def exchange_of_capture_mode() -> Callable[[], int]:
    """Return a function that permits this thread what captures forbid, until it is called again."""
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return partial(exchange, ctypes.byref(ctypes.c_int(RELAXED)))


class MemoryFile:
    """A file in memory, without a name, that another process maps as well; it goes with the last one that does."""

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
        """Return the offset in the file, in bytes, of a tensor of ``host_memory``."""
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
