"""Layer 1: grouped GEMM || weighted top-k reduce || combine in one launch.

The hidden columns are cut into panels, and the GEMM finishes a panel over all experts before it starts the next. The
last ``comm_blocks`` blocks never compute: they reduce and send each panel as soon as it is complete, and the compute
blocks join them when their share of the GEMM is done (``combine.reduce_and_send``). At last all blocks add up the
partial sums of this rank's own tokens (``combine.sum_partials``). Every slot is written once and every order is fixed:
results are bitwise reproducible.

A block waits for the GEMM of its own launch only after its own share of it, and for other ranks only after all reduce
tickets of its own rank have been drawn. So the launch always ends, if its blocks are resident together.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .arguments import CHUNK_ROWS, MAX_PANELS, TileTable, Wire
from .combine import reduce_and_send, sum_partials
from .primitives import after_block
from .recorder import KIND_CONVERT, KIND_LAYER1_TILE, now, record, recording
from .tiles import decode_columns

PANEL_COUNTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCombineConfig:
    """Tile shape and split of the launch.

    Args:
        comm_blocks: Blocks that only reduce and send.
        num_panels: Column panels, at most 16 and at most the column blocks of D.
        block_n: Columns of a GEMM tile.
        block_k: Contraction step.
        group_tiles: Consecutive tiles that share their weight columns through L2.
        move_rows: Rows the reduce and the final sum handle at once.
        move_cols: Columns they handle at once, a power of two.
        sum_tokens: Tokens of one ticket of the final sum, a multiple of ``move_rows``.
        flatten: Fetch the next item's operands during the epilogue.
        num_stages: Depth of the load pipeline.
        num_warps: Warps per block.
    """

    comm_blocks: int = 16
    num_panels: int = 4
    block_n: int = 256
    block_k: int = 64
    group_tiles: int = 8
    move_rows: int = 16
    move_cols: int = 512
    sum_tokens: int = 64
    flatten: bool = True
    num_stages: int = 4
    num_warps: int = 8


@triton.jit
def gemm_panels(
    a_desc, b_desc, y_ptr, tiles_ptr, num_tiles, num_cols, num_panels, first_item, stride, panel_counters, epoch, D,
    CONTRACTION, events_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr, B_IS_KN: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Every ``stride``-th (panel, tile, column block) from ``first_item`` on; each adds 1 to its panel's counter."""
    rows = tl.arange(0, BLOCK_M)
    for item in tl.range(first_item, num_tiles * num_cols, stride, flatten=FLATTEN):
        tile, col, panel = decode_columns(item, num_tiles, num_cols, num_panels, GROUP_TILES)
        begin = now(EVENTS, INTERPRET)
        expert = tl.load(tiles_ptr + tile * 4)
        first_row = tl.multiple_of(tl.load(tiles_ptr + tile * 4 + 1), BLOCK_M)
        valid = rows < tl.load(tiles_ptr + tile * 4 + 2)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, CONTRACTION, BLOCK_K):
            a = a_desc.load([first_row, k])
            if B_IS_KN:
                b = b_desc.load([expert, k, col * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
                accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
            else:
                b = b_desc.load([expert, col * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
                accumulator = tl.dot(a, b.T, accumulator, input_precision=PRECISION)
        cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
        target = y_ptr + first_row.to(tl.int64) * D + rows[:, None] * D + cols[None, :]
        tl.store(target, accumulator.to(y_ptr.dtype.element_ty), mask=valid[:, None] & (cols < D)[None, :])
        tl.atomic_add(panel_counters + panel, after_block(1, INTERPRET), sem="release", scope="gpu")
        record(events_ptr, KIND_LAYER1_TILE, epoch, tile, col, panel, begin, begin, EVENTS, INTERPRET)


@triton.jit(do_not_specialize=["rank", "comm_blocks", "num_panels", "timeout_ns", "T"])
def gemm_combine_kernel(
    a_desc, b_desc, y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts,
    combine_ptr, combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses,
    tiles_ptr, num_tiles_ptr, counters, epoch_ptr, fault_ptr,
    rank, comm_blocks, num_panels, timeout_ns, T, M, D, CONTRACTION, events_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_TILES: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, HAS_GRADS: tl.constexpr,
    B_IS_KN: tl.constexpr, FLATTEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, PANELS: tl.constexpr, PANEL_COUNTERS: tl.constexpr, PRECISION: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; counters 0 and 1 hold reduce and sum tickets, panel counters follow at PANEL_COUNTERS."""
    epoch = tl.load(epoch_ptr)
    num_tiles = tl.load(num_tiles_ptr)
    num_cols = tl.cdiv(D, BLOCK_N)
    panel_counters = counters + PANEL_COUNTERS
    compute_blocks = tl.num_programs(0) - comm_blocks
    if tl.program_id(0) < compute_blocks:
        gemm_panels(
            a_desc, b_desc, y_ptr, tiles_ptr, num_tiles, num_cols, num_panels, tl.program_id(0), compute_blocks,
            panel_counters, epoch, D, CONTRACTION, events_ptr, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_TILES, B_IS_KN,
            FLATTEN, PRECISION, EVENTS, INTERPRET,
        )  # fmt: skip
        converted = now(EVENTS, INTERPRET)
        record(events_ptr, KIND_CONVERT, epoch, 1, 0, 0, converted, converted, EVENTS, INTERPRET)
    reduce_and_send(
        y_ptr, row_slots, row_weights, row_grads, recv_counts, combine_addresses, combine_grad_addresses,
        flag_addresses, counters, panel_counters, fault_ptr, timeout_ns, epoch, rank, W, num_tiles,
        num_cols, num_panels, M, D, events_ptr, K, K_BLOCK, WEIGHTED, HAS_GRADS, BLOCK_N, ROWS, COLS, CHUNK, PANELS,
        EVENTS, INTERPRET,
    )  # fmt: skip
    sum_partials(
        out_ptr, grads_out, combine_ptr, combine_grads, send_rows, flag_ptr, counters + 1, fault_ptr, timeout_ns, epoch,
        num_cols, num_panels, T, M, D, events_ptr, W, K, K_BLOCK, HAS_GRADS, BLOCK_N, TOKENS, ROWS, COLS, CHUNK, PANELS,
        EVENTS, INTERPRET,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Returns:
    """How routed rows become token rows again (``comet.plan``).

    Args:
        row_slots: ``(R, K)`` int32 routed row of each (received row, slot), or -1.
        row_weights: ``(R, K)`` float32 routing weights, or ``None`` to add rows up unweighted.
        send_rows: ``(M, W)`` int32 the row of each token at each rank, or -1.
        recv_counts: ``(W,)`` int32.
    """

    row_slots: Tensor
    row_weights: Tensor | None
    send_rows: Tensor
    recv_counts: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GradWire:
    """Gradients of the routing weights on their way home: received rows' ``(R, K)`` float32 and where they go.

    Args:
        row_grads: ``(R, K)`` gradient of each (received row, slot) computed here, 0 elsewhere.
        landing: ``(R, K)`` this rank's symmetric copy.
        landing_pointers: ``(W,)`` int64 address of every rank's copy.
        out: ``(T, K)`` result for this rank's tokens.
    """

    row_grads: Tensor
    landing: Tensor
    landing_pointers: Tensor
    out: Tensor


def gemm_combine(
    a: Tensor,
    b: Tensor,
    y: Tensor,
    out: Tensor,
    wire: Wire,
    returns: Returns,
    table: TileTable,
    config: GemmCombineConfig,
    *,
    b_is_kn: bool = False,
    grads: GradWire | None = None,
) -> None:
    """y = a @ b[expert] for all routed rows, then out[t] = sum of token t's rows over all ranks.

    Args:
        a: ``(Q, C)`` routed rows.
        b: ``(e, D, C)``, or ``(e, C, D)`` with ``b_is_kn``.
        y: ``(Q, D)`` scratch for the expert outputs.
        out: ``(T, D)`` result.
        wire: Combine rows and ``(W, C, 16)`` flags.
        returns: Which rows to add up for whom.
        table: Tiles.
        config: Tile shape, panels and split.
        b_is_kn: The contraction is b's middle axis.
        grads: Routing-weight gradients to send along, or ``None``.
    """
    contraction, hidden_size = a.shape[1], out.shape[1]
    block_n, block_k = config.block_n, config.block_k
    interpret = triton.knobs.runtime.interpret
    # The interpreter runs block after block: the first must finish the GEMM before any waits for it.
    num_blocks = 2 if interpret else torch.cuda.get_device_properties(a.device).multi_processor_count
    top_k = returns.row_slots.shape[1]
    unused = returns.row_slots
    gemm_combine_kernel[(num_blocks,)](
        TensorDescriptor.from_tensor(a, [table.block_rows, block_k]),
        TensorDescriptor.from_tensor(b, [1, block_k, block_n] if b_is_kn else [1, block_n, block_k]),
        y, out, unused if grads is None else grads.out, returns.row_slots,
        unused if returns.row_weights is None else returns.row_weights, unused if grads is None else grads.row_grads,
        returns.send_rows, returns.recv_counts, wire.rows, wire.row_pointers,
        unused if grads is None else grads.landing, wire.row_pointers if grads is None else grads.landing_pointers,
        wire.flags, wire.flag_pointers, table.tiles, table.num_tiles, table.counters, wire.epoch, wire.fault,
        wire.rank, min(config.comm_blocks, num_blocks - 1), config.num_panels, wire.timeout_ns,
        out.shape[0], wire.max_tokens, hidden_size, contraction,
        BLOCK_M=table.block_rows, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_TILES=config.group_tiles,
        W=wire.world_size, K=top_k, K_BLOCK=triton.next_power_of_2(top_k), WEIGHTED=returns.row_weights is not None,
        HAS_GRADS=grads is not None, B_IS_KN=b_is_kn, FLATTEN=config.flatten, TOKENS=config.sum_tokens,
        ROWS=config.move_rows, COLS=config.move_cols, CHUNK=CHUNK_ROWS,
        PANELS=MAX_PANELS, PANEL_COUNTERS=PANEL_COUNTERS,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32", INTERPRET=interpret,
        **recording(wire.recorder, num_blocks),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
