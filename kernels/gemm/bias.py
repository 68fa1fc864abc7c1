"""Gradients that expert biases add: of the biases themselves, and of the routing weights of what they were added to.

A bias's gradient sums rows of an expert in one order, in float32, a block for some columns of an expert, so results
are bitwise reproducible. What bounds both: reading the rows once.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import TileTable, power_of_2
from .group_gemm import num_blocks
from .tiles import rows_of_piece

ROWS, COLS = 32, 64  # size of a step of a sum over rows
PIECE = 8  # rows a block multiplies with their bias at once; divides every tile
WIDE = 256
BLOCKS_PER_PROCESSOR = 8


@triton.jit
def bias_gradient_kernel(
    rows_ptr, row_ids_ptr, slots_ptr, weights_ptr, out_ptr, starts_ptr, counts_ptr, N, K,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Grid (experts, blocks of columns); ``weights_ptr`` is ``None`` where rows weigh 1."""
    expert, cols = tl.program_id(0), tl.program_id(1) * COLS + tl.arange(0, COLS)
    start, count = tl.load(starts_ptr + expert), tl.load(counts_ptr + expert)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, count, ROWS):
        in_segment = first + tl.arange(0, ROWS)
        valid, q = in_segment < count, start + in_segment
        mask = valid[:, None] & (cols < N)[None, :]
        part = tl.load(rows_ptr + q[:, None].to(tl.int64) * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            row_ids = tl.load(row_ids_ptr + q, mask=valid, other=0).to(tl.int64)
            slots = tl.load(slots_ptr + q, mask=valid, other=0)
            part *= tl.load(weights_ptr + row_ids * K + slots, mask=valid, other=0.0)[:, None]
        total += part
    target = out_ptr + expert.to(tl.int64) * N + cols
    tl.store(target, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize_on_alignment=["num_tiles_ptr"])
def bias_products_kernel(
    rows_ptr, bias_ptr, row_ids_ptr, slots_ptr, tiles_ptr, num_tiles_ptr, grad_weights_ptr, N, K,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Persistent blocks over pieces of ROWS rows of a tile."""
    num_pieces = tl.load(num_tiles_ptr) * (BLOCK_M // ROWS)
    for piece in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        q, valid = rows_of_piece(piece, tiles_ptr, BLOCK_M, ROWS)
        expert = tl.load(tiles_ptr + piece // (BLOCK_M // ROWS) * 4).to(tl.int64)
        total = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for first in range(0, N, COLS):
            cols = first + tl.arange(0, COLS)
            mask = valid[:, None] & (cols < N)[None, :]
            part = tl.load(rows_ptr + q[:, None].to(tl.int64) * N + cols[None, :], mask=mask, other=0.0)
            bias = tl.load(bias_ptr + expert * N + cols, mask=cols < N, other=0.0)
            total += part.to(tl.float32) * bias.to(tl.float32)[None, :]
        row_ids = tl.load(row_ids_ptr + q, mask=valid, other=0).to(tl.int64)
        places = grad_weights_ptr + row_ids * K + tl.load(slots_ptr + q, mask=valid, other=0)
        tl.store(places, tl.load(places, mask=valid, other=0.0) + tl.sum(total, axis=1), mask=valid)


def bias_gradient(
    rows: Tensor, out: Tensor, segments: tuple[Tensor, Tensor], routing: tuple[Tensor, Tensor, Tensor] | None
) -> None:
    """Sum of the rows of each expert, weighted or not.

    Example: one expert of rows ``[[1, 2], [3, 4], [nan, nan]]``, the last one padding, weights 1 and 10 (were such
    widths legal): ``[[31, 42]]``; without weights ``[[4, 6]]``.

    Args:
        rows: ``(Q, N)`` contiguous.
        out: ``(e, N)`` result, rounded once from float32; zeros for experts without rows.
        segments: ``(e,)`` or longer int32 first routed row of each expert, and ``(e,)`` int32 how many it has.
        routing: ``(Q,)`` int32 received row and ``(Q,)`` int32 slot of each routed row, and the routing weights
            ``(R, K)`` float32 by these; ``None``: all rows weigh 1.
    """
    if rows.shape[0] == 0:
        out.zero_()
        return
    row_ids, slots, weights = routing or (None, None, None)
    grid = (out.shape[0], triton.cdiv(out.shape[1], COLS))
    bias_gradient_kernel[grid](
        rows, row_ids, slots, weights, out, *segments, out.shape[1], 1 if weights is None else weights.shape[1],
        ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip


def add_bias_products(rows: Tensor, bias: Tensor, slots: Tensor, table: TileTable, grad_weights: Tensor) -> None:
    """Add to the gradient of each routed row's weight what comes through the bias: its gradient times the bias.

    Example: a row ``[1, 2]`` of an expert of bias ``[10, 100]`` (were such widths legal) adds 210 to its weight's.

    Args:
        rows: ``(Q, N)`` gradient of the output, by routed row.
        bias: ``(e, N)``.
        slots: ``(Q,)`` int32 slot of each routed row.
        table: Tiles and ``row_ids``.
        grad_weights: ``(R, K)`` float32, added to at [row_ids[q], slots[q]].
    """
    if rows.shape[0] == 0 or grad_weights.shape[0] == 0:
        return
    max_items, width = table.tiles.shape[0] * (table.block_rows // PIECE), rows.shape[1]
    bias_products_kernel[(num_blocks(rows.device, max_items, per_processor=BLOCKS_PER_PROCESSOR),)](
        rows, bias, table.row_ids, slots, table.tiles, table.num_tiles, grad_weights, width, grad_weights.shape[1],
        BLOCK_M=table.block_rows, ROWS=PIECE, COLS=min(WIDE, power_of_2(width)), num_warps=4,
    )  # fmt: skip
