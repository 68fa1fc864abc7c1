"""Kernel configurations for the compile-ahead tool (see ``comet.kernels.aot.compile``), recorded from launches.

The modules of ``comet.kernels.aot``, and those of kernels in CUDA C++, define ``aot_cases()`` with the configurations
that users run. A case comes from the function that launches the kernel, called with ``meta`` tensors, which have a
shape and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from .arch import HOPPER
from .arguments import TileTable
from .cuda_source import LAUNCH_REGISTERS, CudaSource

FEATURES = ("wgmma", "wide_loads", "wide_stores")
WIDE_ACCESS = ("wide_loads", "wide_stores")


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One launch of a Triton kernel.

    Raises:
        ValueError: If a feature is unknown.
    """

    name: str  # the configuration in words, unique among the cases of the kernel
    source: ASTSource  # the kernel, and types, constants and alignment of the launch's arguments
    options: Mapping[str, Any]  # of the launch, such as ``num_warps``
    # features whose absence fails the compilation: wgmma; wide_loads and wide_stores: 16-byte accesses to global memory
    # are there and none is narrower than 4 bytes
    expects: frozenset[str] = field(default_factory=frozenset)
    # how many loads of less than 4 bytes are meant and do not count, such as scales of a byte per lane
    narrow_loads: int = 0
    spilled_bytes: int = 0  # how many bytes of spilled registers are known and do not fail the compilation

    def __post_init__(self) -> None:
        if unknown := self.expects - set(FEATURES):
            raise ValueError(f"{self.kernel} ({self.name}): expects={sorted(unknown)} must be among {FEATURES}")

    @property
    def kernel(self) -> str:
        return self.source.name


def recorded(
    name: str, expects: Collection[str], launch: Callable[..., object], *arguments: Any, **named: Any
) -> list[KernelCase]:
    """Return a case for each Triton kernel that ``launch`` launches with the given arguments; nothing is launched."""
    cases = []
    backend = make_backend(HOPPER.target)

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        _, *described = kernel._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(kernel, *described)
        cases.append(KernelCase(name=name, source=source, options=options, expects=frozenset(expects)))

    with mock.patch.object(JITFunction, "run", record):
        launch(*arguments, **named)
    return cases


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_tiles(num_rows: int) -> TileTable:
    """The tiles of so many routed rows for a launch that is recorded."""
    tiles, row_ids, counters = meta(num_rows // 128, 4), meta(num_rows), meta(32)
    return TileTable(tiles=tiles, num_tiles=meta(1), row_ids=row_ids, counters=counters, block_rows=128)


@dataclass(frozen=True)
class CudaCase:
    """One CUDA C++ kernel with one set of constants; most have to use the tensor cores and bulk loads."""

    source: CudaSource  # the launch's kernel and constants
    name: str  # the configuration in words, unique among the cases of the kernel
    spilled_bytes: int = 0  # how many bytes of spilled registers are known and do not fail the compilation
    expects: Collection[str] = FEATURES
    registers: int | None = LAUNCH_REGISTERS  # registers of a thread that the source counts on, or None
    narrow_loads: ClassVar[int] = 0

    @property
    def kernel(self) -> str:
        return self.source.entry
