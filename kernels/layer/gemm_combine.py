"""Layer 1, and layer 0's gradients, in CUDA C++ (``cuda/``): what ``gemm_combine`` does, bit for bit, in one launch.

What it has and its Triton twin cannot have: a warp that only loads, rows that two blocks share through multicast,
pieces of rows of equal height in the place of tiles of 128, and combining warps with a dozen loads on their way each.

Blocks draw the items of the GEMM and the tickets of the combine: the launch ends with whatever blocks find a place on
the GPU, also beside a kernel of another stream that holds some and waits for another rank.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.arguments import Returns, TileTable, Wire
from ..runtime.case import CudaCase
from ..runtime.cuda_text import COLS, DEPTH, LAUNCH_REGISTERS, LINE, SHARED_LIMIT, TILE_ROWS, cuda_text, memory_bytes
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
    "hopper", "recorder", "signals", "ring", "items", "products", "panels", "store_rows", "panel_gemm",
    "combine", "gemm_combine",
)  # fmt: skip

# With fewer products of a rank, for gradients twice as many, or a longer contraction, Triton is as fast or faster
# (benchmarks/results/forward_kernels.md; of gradients backward_kernels.md).
LEAST_PRODUCTS = 50_000_000_000
MOST_DEPTH = 2048
MOST_GRADIENT_DEPTH = 4096
TALL_FROM, TALL_TO = 232.0, 280.0  # rows of an expert for which taller pieces pay


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig:
    """Shape of the blocks, as measured best on an H200.

    Args:
        cluster: Blocks that share their rows: 1 or 2.
        most_rows: Most rows of a piece that has all rows of its expert; others have up to ``MOST_AT_ONCE``.
        num_stages: Depth of the load pipeline.
        box_rows: Rows per bulk load, a divisor of ``most_rows``.
        staged_rows: Rows of a result that are stored at once, a divisor of ``most_rows``.
        ahead: Rows that a combining warp has on their way beside the GEMM, a multiple of 4.
        ahead_after: The same after it, in the memory of the stages.
    """

    cluster: int = 2
    most_rows: int = 256
    num_stages: int = 4
    box_rows: int = 32
    staged_rows: int = 32
    ahead: int = 12
    ahead_after: int = 32

    @staticmethod
    def select(even_rows: float) -> "CudaConfig":
        """The blocks for experts of about so many rows.

        Around what an instruction multiplies at once, half of the experts have a few rows more, for which all their
        weights are loaded again, unless one piece holds them. Its stages leave combining warps less memory, which costs
        up to 6 % elsewhere (benchmarks/results/forward_kernels.md).

        Args:
            even_rows: See ``TileTable``.

        Example: 256 +- 16 rows: pieces of up to 272; 512 or 64: of up to 256.
        """
        return TALL if TALL_FROM <= even_rows <= TALL_TO else DEFAULT

    def shared_bytes(self, num_experts: int, entries: int) -> int:
        """Dynamic shared memory of a block.

        Args:
            num_experts: Experts of this rank.
            entries: Most rows that a sum has.

        Returns:
            Bytes: alignment, stages, staging, barriers, items, draws, combiners, the table of pieces.

        Example:
            32 experts, 8 entries: 1024 + 4 * 49152 + 2 * 4096 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33 = 230980.
        """
        memory = memory_bytes(self.num_stages, self.most_rows, 2 * self.staged_rows * LINE, ITEM_BYTES)
        return memory + combiner_bytes(entries, self.ahead) + 4 * (num_experts + 1)


DEFAULT = CudaConfig()
TALL = CudaConfig(most_rows=272, box_rows=16, staged_rows=16, ahead=8)
SELECTABLE = DEFAULT, TALL


def takes(
    max_tokens: int, top_k: int, world_size: int, experts: int, cols: int, depth: int, itemsize: int, block_rows: int
) -> bool:
    """Whether a forward launch of this size is one for CUDA C++, on a GPU that has it.

    Args:
        max_tokens: M.
        top_k: K.
        world_size: W.
        experts: Experts of this rank.
        cols: D.
        depth: F of this rank.
        itemsize: Bytes of an element.
        block_rows: Rows of the plan's tiles.

    Example:
        M=4096, K=8, D=2048 and F=768 are 5.2e10 products: taken, if in 16 bits; M=2048 not.
    """
    fits = _fits(max(top_k, world_size), experts, itemsize, block_rows)
    return fits and _is_large(max_tokens, top_k, cols, depth, False)


def _is_large(max_tokens: int, top_k: int, cols: int, depth: int, is_gradient: bool) -> bool:
    """Nor of too long a contraction."""
    least, most = (2 * LEAST_PRODUCTS, MOST_GRADIENT_DEPTH) if is_gradient else (LEAST_PRODUCTS, MOST_DEPTH)
    return max_tokens * top_k * cols * depth >= least and depth <= most


@functools.cache
def _fits(entries: int, experts: int, itemsize: int, block_rows: int) -> bool:
    return (
        itemsize == 2
        and block_rows == TILE_ROWS
        and entries <= MOST_ENTRIES
        and all(config.shared_bytes(experts, entries) <= SHARED_LIMIT for config in SELECTABLE)
    )


def runs_cuda(a: Tensor, b: Tensor, wire: Wire, returns: Returns, table: TileTable) -> bool:
    """Whether a launch is the one in CUDA C++; equal on all ranks, for the flags of the two are not the same.

    Args:
        a: Routed rows.
        b: ``(e, D, C)`` weights, or ``(e, C, D)`` of gradients.
        wire: See ``gemm_combine``.
        returns: See ``gemm_combine``.
        table: See ``gemm_combine``.
    """
    is_gradient = returns.grads is not None
    cols, depth = b.shape[:0:-1] if is_gradient else b.shape[1:]
    is_large = _is_large(wire.max_tokens, returns.row_slots.shape[1], cols, depth, is_gradient)
    return is_large and can_run(a, b, wire, returns, table)


def can_run(a: Tensor, b: Tensor, wire: Wire, returns: Returns, table: TileTable) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of whatever size; see ``runs_cuda``."""
    entries = max(returns.row_slots.shape[1], wire.world_size)
    return (
        _fits(entries, len(b), a.element_size(), table.block_rows)
        and (returns.row_weights is None) == (returns.grads is not None)
        and table.segments is not None
        and is_available(a.device)
    )


def gemm_combine_cuda(
    a: Tensor,
    b: Tensor,
    y: Tensor,
    out: Tensor,
    wire: Wire,
    returns: Returns,
    table: TileTable,
    num_panels: int,
    spare_multiprocessors: int = 0,
    config: CudaConfig | None = None,
) -> None:
    """y = a @ b[expert] for all routed rows, then out[t] = sum of token t's rows over all ranks.

    Args:
        a: ``(Q, C)`` routed rows, bfloat16 or float16.
        b: ``(e, D, C)``, same dtype; of gradients ``(e, C, D)``.
        y: ``(Q, D)`` scratch for the expert outputs.
        out: ``(T, D)`` result.
        wire: Combine rows and flags.
        returns: Which rows to add up for whom, with weights, or with these weights' gradients.
        table: Segments, counters and the number of tiles.
        num_panels: Column panels.
        spare_multiprocessors: See ``GemmCombineConfig``.
        config: Shape of the blocks.
    """
    config = config or CudaConfig.select(table.even_rows)
    is_gradient, device = returns.grads is not None, torch.cuda.current_device()
    shape = a.dtype, len(b), returns.row_slots.shape[1], wire.world_size, wire.recorder is not None, is_gradient
    kernel = _selectable_kernels(*shape, device).get(config) or _kernel(config, *shape, device)
    box = (1, DEPTH, LINE // b.itemsize) if is_gradient else (1, COLS, DEPTH)
    maps = tensor_map(a, (config.box_rows, DEPTH)), tensor_map(b, box)
    extent = Extent(
        experts=len(b), depth=a.shape[1], num_panels=num_panels, spare_multiprocessors=spare_multiprocessors
    )
    launch(kernel, maps, Scales(), y, out, wire, returns, table, extent)


@functools.cache
def _selectable_kernels(
    dtype: torch.dtype, experts: int, top_k: int, world_size: int, records: bool, is_gradient: bool, device: int
) -> dict[CudaConfig, CudaKernel]:
    """Loaded together: which one runs depends on a call's tokens, and who compiles keeps other ranks waiting."""
    shape = dtype, experts, top_k, world_size, records, is_gradient, device
    return {config: _kernel(config, *shape) for config in SELECTABLE}


@functools.cache
def _kernel(
    config: CudaConfig,
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    world_size: int,
    records: bool,
    is_gradient: bool,
    device: int,
) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(config, dtype, top_k, world_size, records, is_gradient), NAME),
        NAME,
        num_threads=NUM_THREADS,
        cluster=config.cluster,
        shared_bytes=config.shared_bytes(experts, max(top_k, world_size)),
    )


def source(
    config: CudaConfig, dtype: torch.dtype, top_k: int, world_size: int, records: bool, is_gradient: bool
) -> str:
    """The CUDA text of one configuration."""
    constants = launch_constants(top_k, world_size, records, is_gradient) | dict(
        CLUSTER=config.cluster, STAGES=config.num_stages, STAGED_ROWS=config.staged_rows, BOX_ROWS=config.box_rows,
        AHEAD_BESIDE=config.ahead, AHEAD_AFTER=config.ahead_after, MULTIPLYING_REGISTERS=176, FENCED_BY_MULTIPLIERS=0,
    )  # fmt: skip
    return cuda_text(constants, dtype, SOURCES, config.most_rows)


def aot_cases() -> list[CudaCase]:
    """Those of ``AOT_SHAPES``, in all blocks that a layer takes, and gradients."""
    ranks, experts = 4, 64
    return [
        CudaCase(
            name=f"{str(dtype).removeprefix('torch.')}, top-{top_k}, {ranks} ranks, pieces of {config.most_rows}"
            f"{', gradients' if is_gradient else ''}{', recording' if records else ''}",
            kernel=f"{NAME}_cuda",
            source=source(config, dtype, top_k, ranks, records, is_gradient),
            shared_bytes=config.shared_bytes(experts, max(top_k, ranks)),
            registers=LAUNCH_REGISTERS,
        )
        for dtype, top_k, records in AOT_SHAPES
        for is_gradient in (False, True)
        for config in SELECTABLE
    ]
