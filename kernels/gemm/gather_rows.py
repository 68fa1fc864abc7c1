"""Received rows in the order of the experts: a copy of a row for every routed row.

For backward GEMMs, above all the weight gradients, which contract over an expert's rows: gathered inside, w1's takes
up to twice as long, and this copy, at the rate of memory, a tenth of that (benchmarks/results/backward_kernels.md).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import TileTable, power_of_2, require_multiples_of_16, require_shapes
from .group_gemm import num_blocks
from .tiles import rows_of_piece

ROWS = 8  # rows a block copies at once; divides every tile
ROW_BYTES = 2048  # of each of them
BLOCKS_PER_PROCESSOR = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """Received rows that lie elsewhere: this rank's own, where they did not travel."""

    rows: Tensor  # ``(T, N)`` contiguous
    first: int  # received row that the first of them is


@triton.jit(do_not_specialize=["first_own", "num_own"], do_not_specialize_on_alignment=["num_tiles_ptr"])
def gather_rows_kernel(
    rows_ptr, own_ptr, out_ptr, tiles_ptr, num_tiles_ptr, row_ids_ptr, first_own, num_own, N,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Persistent blocks over pieces of ROWS rows of a tile."""
    num_pieces = tl.load(num_tiles_ptr) * (BLOCK_M // ROWS)
    for piece in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        q, valid = rows_of_piece(piece, tiles_ptr, BLOCK_M, ROWS)
        row_ids = tl.load(row_ids_ptr + q, mask=valid, other=0)
        source = rows_ptr + row_ids.to(tl.int64)[:, None] * N
        if HAS_OWN:
            own_ids = row_ids - first_own
            is_own = (own_ids >= 0) & (own_ids < num_own)
            source = tl.where(is_own[:, None], own_ptr + own_ids.to(tl.int64)[:, None] * N, source)
            source = tl.multiple_of(source, (16, 16))  # Triton 3.9 does not see it through the choice
        target = out_ptr + q.to(tl.int64)[:, None] * N
        for first in range(0, N, COLS):
            cols = first + tl.arange(0, COLS)[None, :]
            mask = valid[:, None] & (cols < N)
            tl.store(target + cols, tl.load(source + cols, mask=mask), mask=mask)


def gather_rows(rows: Tensor, out: Tensor, row_ids: Tensor, table: TileTable, own: OwnRows | None = None) -> None:
    """``out[q] = rows[row_ids[q]]`` for the routed rows q of all tiles.

    Args:
        rows: ``(R, N)`` contiguous, N a multiple of 16.
        out: ``(Q, N)``, same dtype; rows of no tile and the padding of tiles are left alone.
        row_ids: ``(Q,)`` int32; those of valid routed rows are in [0, R).
        table: Tiles.
        own: Rows that are read in the place of ``rows[own.first :]``, or ``None``.

    Example: one tile of 2 rows, row_ids ``[1, 0, -1]``: rows ``[[5], [6]]`` (were such a width legal) make
    ``[[6], [5], ..]``, and with own rows ``[[7]]`` from 1 on ``[[7], [5], ..]``.
    """
    width, own_rows = rows.shape[1], rows[:0] if own is None else own.rows
    require_multiples_of_16(**{"columns of rows": width})
    require_shapes(
        rows=(rows, (len(rows), width)), out=(out, (row_ids.numel(), width)),
        **{"own rows": (own_rows, (len(own_rows), width))},
    )  # fmt: skip
    if not rows.dtype == own_rows.dtype == out.dtype:
        raise ValueError(f"dtypes of rows={rows.dtype}, own rows={own_rows.dtype} and out={out.dtype} must be one")
    cols = min(ROW_BYTES // rows.element_size(), power_of_2(width))
    max_items = table.tiles.shape[0] * (table.block_rows // ROWS)
    gather_rows_kernel[(num_blocks(rows.device, max_items, per_processor=BLOCKS_PER_PROCESSOR),)](
        rows, own_rows, out, table.tiles, table.num_tiles, row_ids, 0 if own is None else own.first, len(own_rows),
        width,
        BLOCK_M=table.block_rows, ROWS=ROWS, COLS=cols, HAS_OWN=own is not None,
    )  # fmt: skip
