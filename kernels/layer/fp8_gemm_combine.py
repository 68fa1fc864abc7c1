"""Layer 1 in block FP8 in CUDA C++, in the launch of ``gemm_combine_cuda``.

How it multiplies: ``fp8_dispatch_gemm_cuda``.
"""

import functools

import torch
from torch import Tensor

from ..runtime.arguments import Returns, Scaled, TileTable, Wire
from ..runtime.case import CudaCase
from ..runtime.cuda_text import (
    FP8_COLS,
    LAUNCH_REGISTERS,
    LINE,
    SHARED_LIMIT,
    TILE_ROWS,
    fp8_cuda_text,
    fp8_memory_bytes,
)
from ..runtime.nvrtc import CudaKernel, compile_cubin, is_available, load_kernel, tensor_map
from .gemm_combine_launch import (
    AOT_SHAPES,
    ITEM_BYTES,
    MOST_ENTRIES,
    NAME,
    NUM_THREADS,
    Extent,
    Scales,
    combiner_bytes,
    launch,
    launch_constants,
)

SOURCES = (
    "hopper", "recorder", "signals", "ring", "items", "fp8_products", "panels", "fp8_panel_gemm", "combine",
    "gemm_combine",
)  # fmt: skip
NUM_STAGES = 4
BOX_ROWS = 64
AHEAD, AHEAD_AFTER = 12, 32  # see CudaConfig of gemm_combine_cuda
LEAST_PRODUCTS = 10_000_000_000  # with fewer of a rank Triton is faster (benchmarks/results/fp8.md)


def shared_bytes(num_experts: int, entries: int) -> int:
    """Dynamic shared memory of a block.

    Args:
        num_experts: Experts of this rank.
        entries: Most rows that a sum has.

    Returns:
        Bytes: alignment, stages, their scales, barriers, items, draws, combiners, the table of pieces.

    Example:
        32 experts, 8 entries: 1024 + 4 * 49152 + 4 * 512 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33 = 224836.
    """
    memory = fp8_memory_bytes(NUM_STAGES, 1, 0, ITEM_BYTES)
    return memory + combiner_bytes(entries, AHEAD) + 4 * (num_experts + 1)


def runs_cuda(y: Tensor, b: Scaled, wire: Wire, returns: Returns, table: TileTable) -> bool:
    """Whether a forward launch is the one in CUDA C++; equal on all ranks, for the flags of the two are not the same.

    Args:
        y: ``(Q, D)`` scratch.
        b: ``(e, D, C)`` weights.
        wire: See ``gemm_combine``.
        returns: See ``gemm_combine``.
        table: See ``gemm_combine``.

    Example: M=512, K=8, D=2048 and F=768 are 6.4e9 products: not taken; M=2048 is.
    """
    products = wire.max_tokens * returns.row_slots.shape[1] * b.elements.shape[1] * b.elements.shape[2]
    return products >= LEAST_PRODUCTS and can_run(y, b, wire, returns, table)


def can_run(y: Tensor, b: Scaled, wire: Wire, returns: Returns, table: TileTable) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of whatever size; see ``runs_cuda``."""
    entries = max(returns.row_slots.shape[1], wire.world_size)
    return (
        y.element_size() == 2
        and table.block_rows == TILE_ROWS
        and entries <= MOST_ENTRIES
        and shared_bytes(len(b.elements), entries) <= SHARED_LIMIT
        and returns.row_weights is not None
        and returns.grads is None
        and table.segments is not None
        and is_available(y.device)
    )


def fp8_gemm_combine_cuda(
    a: Scaled,
    b: Scaled,
    y: Tensor,
    out: Tensor,
    wire: Wire,
    returns: Returns,
    table: TileTable,
    num_panels: int,
    spare_multiprocessors: int = 0,
) -> None:
    """y = a @ b[expert] for all routed rows, then out[t] = sum of token t's rows over all ranks.

    Args:
        a: ``(Q, C)`` routed rows, with scales ``(C / 128, Q)``.
        b: ``(e, D, C)``, with scales ``(e, D / 128, C / 128)``.
        y: ``(Q, D)`` scratch for the expert outputs, bfloat16 or float16.
        out: ``(T, D)`` result, same dtype.
        wire: Combine rows and flags.
        returns: Which rows to add up for whom, with weights.
        table: Segments, counters and the number of tiles.
        num_panels: Column panels.
        spare_multiprocessors: See ``GemmCombineConfig``.
    """
    experts, top_k, device = len(b.elements), returns.row_slots.shape[1], torch.cuda.current_device()
    kernel = _kernel(y.dtype, experts, top_k, wire.world_size, wire.recorder is not None, device)
    maps = tensor_map(a.elements, (BOX_ROWS, LINE)), tensor_map(b.elements, (1, FP8_COLS, LINE))
    scales = Scales(rows=a.scales.data_ptr(), weights=b.scales.data_ptr(), routed_rows=y.shape[0])
    extent = Extent(
        experts=experts,
        depth=b.elements.shape[2],
        num_panels=num_panels,
        spare_multiprocessors=spare_multiprocessors,
    )
    launch(kernel, maps, scales, y, out, wire, returns, table, extent)


@functools.cache
def _kernel(dtype: torch.dtype, experts: int, top_k: int, world_size: int, records: bool, device: int) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(dtype, top_k, world_size, records), NAME),
        NAME,
        num_threads=NUM_THREADS,
        cluster=1,
        shared_bytes=shared_bytes(experts, max(top_k, world_size)),
    )


def source(dtype: torch.dtype, top_k: int, world_size: int, records: bool) -> str:
    """The CUDA text of one configuration."""
    constants = launch_constants(top_k, world_size, records, False) | dict(
        CLUSTER=1, STAGES=NUM_STAGES, BOX_ROWS=BOX_ROWS, AHEAD_BESIDE=AHEAD, AHEAD_AFTER=AHEAD_AFTER,
        MULTIPLYING_REGISTERS=216,
    )  # fmt: skip
    return fp8_cuda_text(constants, dtype, SOURCES)


def aot_cases() -> list[CudaCase]:
    """Those of ``AOT_SHAPES``."""
    ranks, experts = 4, 64
    return [
        CudaCase(
            name=f"{str(dtype).removeprefix('torch.')}, top-{top_k}, {ranks} ranks{', recording' if records else ''}",
            kernel=f"fp8_{NAME}_cuda",
            source=source(dtype, top_k, ranks, records),
            shared_bytes=shared_bytes(experts, max(top_k, ranks)),
            registers=LAUNCH_REGISTERS,
        )
        for dtype, top_k, records in AOT_SHAPES
    ]
