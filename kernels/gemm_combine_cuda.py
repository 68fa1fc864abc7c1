"""Layer 1's forward pass in CUDA C++ (``cuda/``): what ``gemm_combine`` does, bit for bit, in one launch.

What it has and its Triton twin cannot have: a warp that only loads, rows that two blocks share through multicast,
pieces of rows of equal height in the place of tiles of 128, and combining warps with a dozen loads on their way each.

Every block has its share of the GEMM, and none ends before the last panel has been combined: the launch ends if its
blocks get onto the GPU together. A kernel of another stream only delays it, unless that waits for another rank as well.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .aot_case import CudaCase
from .arguments import COMBINE_CHUNK_ROWS, MAX_PANELS, Returns, TileTable, Wire
from .cuda_text import (
    COLS,
    DEPTH,
    LAUNCH_REGISTERS,
    LINE,
    PASS_COLS,
    SHARED_LIMIT,
    TILE_ROWS,
    WARPS,
    cuda_text,
    memory_bytes,
)
from .gemm_panels import PANEL_COUNTERS
from .nvrtc import CudaKernel, compile_cubin, is_available, load_kernel, tensor_map
from .primitives import PLACE_LAYER1, PLACE_PANEL
from .recorder import KIND_FINAL_SUM, KIND_LAYER1_TILE, KIND_REDUCE

NAME = "gemm_combine"
SOURCES = ("hopper", "recorder", "signals", "products", "panel_gemm", "combine", "gemm_combine")

# Constants of the sources, which get them from here and from ``cuda_text``.
BLOCK_COLS = 256  # columns that count as one in panels
COMBINERS = 3  # warps that combine from the start
WARPS_BESIDE = 132 * COMBINERS  # of a GPU of 132 multiprocessors

ITEM_BYTES = 32
ENTRY_BYTES = 8
SLOT_BYTES = 2 * PASS_COLS
# Each warpgroup of each of the blocks that share a column block tells of its part of a tile.
SHARES_PER_TILE = 2 * BLOCK_COLS // COLS
MOST_ENTRIES = 8  # experts of a token, or ranks
# With fewer products of a rank, or a longer contraction, Triton is as fast or faster (benchmarks/RESULTS.md, run 5).
LEAST_PRODUCTS = 50_000_000_000
MOST_DEPTH = 2048
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
        up to 6 % elsewhere (benchmarks/RESULTS.md, run 8).

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
            Bytes: alignment, stages, staging, barriers, items, combiners, the table of pieces.

        Example:
            32 experts, 8 entries: 1024 + 4 * 49152 + 2 * 4096 + 64 + 256 + 3 * (2048 + 6144) + 4 * 33 = 230852.
        """
        memory = memory_bytes(self.num_stages, self.most_rows, 2 * self.staged_rows * LINE, ITEM_BYTES)
        combiner = COMBINE_CHUNK_ROWS * entries * ENTRY_BYTES + self.ahead * SLOT_BYTES
        return memory + COMBINERS * combiner + 4 * (num_experts + 1)


DEFAULT = CudaConfig()
TALL = CudaConfig(most_rows=272, box_rows=16, staged_rows=16, ahead=8)
SELECTABLE = DEFAULT, TALL


class Arguments(ctypes.Structure):
    """``Returns`` of ``cuda/combine.cu``: addresses, then integers."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "y", "landing", "out", "row_slots", "row_weights", "send_rows", "recv_counts", "landing_addresses", "flags",
            "flag_addresses", "tickets", "panel_counters", "num_tiles", "epoch", "fault", "timeout_ns", "events",
        )),
        *((name, ctypes.c_int32) for name in (
            "rank", "num_tokens", "max_tokens", "cols", "panels", "parts", "shares_per_tile", "event_capacity",
        )),
    )  # fmt: skip


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
    return fits and _is_large(max_tokens, top_k, cols, depth)


def _is_large(max_tokens: int, top_k: int, cols: int, depth: int) -> bool:
    """Nor of too long a contraction."""
    return max_tokens * top_k * cols * depth >= LEAST_PRODUCTS and depth <= MOST_DEPTH


@functools.cache
def _fits(entries: int, experts: int, itemsize: int, block_rows: int) -> bool:
    return (
        itemsize == 2
        and block_rows == TILE_ROWS
        and entries <= MOST_ENTRIES
        and all(config.shared_bytes(experts, entries) <= SHARED_LIMIT for config in SELECTABLE)
    )


def runs_cuda(a: Tensor, b: Tensor, wire: Wire, returns: Returns, table: TileTable) -> bool:
    """Whether a forward launch is the one in CUDA C++; equal on all ranks, for the flags of the two are not the same.

    Args:
        a: Routed rows.
        b: ``(e, D, C)`` weights.
        wire: See ``gemm_combine``.
        returns: See ``gemm_combine``.
        table: See ``gemm_combine``.
    """
    is_large = _is_large(wire.max_tokens, returns.row_slots.shape[1], *b.shape[1:])
    return is_large and can_run(a, b, wire, returns, table)


def can_run(a: Tensor, b: Tensor, wire: Wire, returns: Returns, table: TileTable) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of whatever size; see ``runs_cuda``."""
    entries = max(returns.row_slots.shape[1], wire.world_size)
    return (
        _fits(entries, len(b), a.element_size(), table.block_rows)
        and returns.row_weights is not None
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
    config: CudaConfig | None = None,
) -> None:
    """y = a @ b[expert] for all routed rows, then out[t] = sum of token t's rows over all ranks.

    Args:
        a: ``(Q, C)`` routed rows, bfloat16 or float16.
        b: ``(e, D, C)``, same dtype.
        y: ``(Q, D)`` scratch for the expert outputs.
        out: ``(T, D)`` result.
        wire: Combine rows and flags.
        returns: Which rows to add up for whom, with weights.
        table: Segments, counters and the number of tiles.
        num_panels: Column panels.
        config: Shape of the blocks.
    """
    config = config or CudaConfig.select(table.even_rows)
    assert table.segments is not None
    starts, counts = table.segments
    experts, cols, depth = b.shape
    top_k, recorder = returns.row_slots.shape[1], wire.recorder
    shape = a.dtype, experts, top_k, wire.world_size, recorder is not None, torch.cuda.current_device()
    kernel = _selectable_kernels(*shape).get(config) or _kernel(config, *shape)
    num_blocks = torch.cuda.get_device_properties(a.device).multi_processor_count // config.cluster * config.cluster
    tensors = dict(
        y=y, landing=wire.rows, out=out, row_slots=returns.row_slots, row_weights=returns.row_weights,
        send_rows=returns.send_rows, recv_counts=returns.recv_counts, landing_addresses=wire.row_pointers,
        flags=wire.flags, flag_addresses=wire.flag_pointers, tickets=table.counters,
        panel_counters=table.counters[PANEL_COUNTERS:], num_tiles=table.num_tiles, epoch=wire.epoch, fault=wire.fault,
    )  # fmt: skip
    if recorder is not None:
        tensors["events"] = recorder.events
    arguments = Arguments(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        timeout_ns=wire.timeout_ns,
        rank=wire.rank,
        num_tokens=out.shape[0],
        max_tokens=wire.max_tokens,
        cols=cols,
        panels=num_panels,
        parts=column_parts(wire.max_tokens, wire.world_size, cols, num_panels),
        shares_per_tile=SHARES_PER_TILE,
        event_capacity=0 if recorder is None else recorder.capacity,
    )
    maps = tensor_map(a, (config.box_rows, DEPTH)), tensor_map(b, (1, COLS, DEPTH))
    kernel.launch(num_blocks, [*maps, counts, starts, experts, depth, arguments])


def column_parts(max_tokens: int, world_size: int, cols: int, num_panels: int) -> int:
    """Parts that the combine cuts a panel's columns into, so that each warp beside the GEMM has two tickets.

    Ranks must agree on it, so it does not depend on the GPU: warps are counted as on one of 132 multiprocessors.

    Args:
        max_tokens: M.
        world_size: W.
        cols: D.
        num_panels: Panels.

    Returns:
        At least 1, at most the column blocks of a panel, and no more than there are flags.

    Example:
        M=2048 and W=4 make 256 chunks for 396 warps: 4 parts would give each two tickets, but a panel of D=2048 in 4
        panels has 2 column blocks: 2 parts; of D=7168: 4 parts. M=8192: 1024 chunks, 1 part.
    """
    chunks = max_tokens // COMBINE_CHUNK_ROWS * world_size
    col_blocks = -(-cols // BLOCK_COLS)
    wanted, widest = -(-2 * WARPS_BESIDE // chunks), -(-col_blocks // num_panels)
    return min(wanted, widest, MAX_PANELS // num_panels)


@functools.cache
def _selectable_kernels(
    dtype: torch.dtype, experts: int, top_k: int, world_size: int, records: bool, device: int
) -> dict[CudaConfig, CudaKernel]:
    """Loaded together: which one runs depends on a call's tokens, and who compiles keeps other ranks waiting."""
    return {config: _kernel(config, dtype, experts, top_k, world_size, records, device) for config in SELECTABLE}


@functools.cache
def _kernel(
    config: CudaConfig, dtype: torch.dtype, experts: int, top_k: int, world_size: int, records: bool, device: int
) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(config, dtype, top_k, world_size, records), NAME),
        NAME,
        num_threads=32 * (WARPS + COMBINERS + 1),
        cluster=config.cluster,
        shared_bytes=config.shared_bytes(experts, max(top_k, world_size)),
    )


def source(config: CudaConfig, dtype: torch.dtype, top_k: int, world_size: int, records: bool) -> str:
    """The CUDA text of one configuration."""
    constants = dict(
        CLUSTER=config.cluster, ROWS_BY_THREADS=0, STAGES=config.num_stages, STAGED_ROWS=config.staged_rows,
        AHEAD_BESIDE=config.ahead, AHEAD_AFTER=config.ahead_after, TOP_K=top_k, WORLD=world_size, RECORDS=int(records),
        BLOCK_COLS=BLOCK_COLS, BOX_ROWS=config.box_rows, COMBINERS=COMBINERS, CHUNK=COMBINE_CHUNK_ROWS,
        MAX_PANELS=MAX_PANELS, PLACE_PANEL=PLACE_PANEL.value, PLACE_LAYER1=PLACE_LAYER1.value,
        KIND_LAYER1_TILE=KIND_LAYER1_TILE.value, KIND_REDUCE=KIND_REDUCE.value, KIND_FINAL_SUM=KIND_FINAL_SUM.value,
    )  # fmt: skip
    return cuda_text(constants, dtype, SOURCES, config.most_rows)


def aot_cases() -> list[CudaCase]:
    """Few and many experts of a token, float16, and with recording."""
    shapes = [
        (torch.bfloat16, 2, False),
        (torch.bfloat16, 8, False),
        (torch.bfloat16, 8, True),
        (torch.float16, 8, False),
    ]
    ranks, experts = 4, 64
    return [
        CudaCase(
            name=f"{str(dtype).removeprefix('torch.')}, top-{top_k}, {ranks} ranks, pieces of {config.most_rows}"
            f"{', recording' if records else ''}",
            kernel=f"{NAME}_cuda",
            source=source(config, dtype, top_k, ranks, records),
            shared_bytes=config.shared_bytes(experts, max(top_k, ranks)),
            registers=LAUNCH_REGISTERS,
        )
        for dtype, top_k, records in shapes
        for config in SELECTABLE
    ]
