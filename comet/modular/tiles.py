"""GEMM tiles over the rows of each expert, made on the device: from ids, or from batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comet.layout import round_up
from comet.modular.interfaces import Problem

if TYPE_CHECKING:
    from comet.kernels.arguments import TileTable


def routed_capacity(problem: Problem, block_rows: int) -> int:
    """Routed rows that always suffice, each expert's padded to whole tiles.

    Example: N=10, K=2, e=3, tiles of 16: 20 rows and 3 * 15 of padding, rounded up to 80.
    """
    return round_up(problem.num_rows * problem.top_k + problem.num_experts * (block_rows - 1), block_rows)


def tiles_of_ids(top_k_ids: Tensor, num_experts: int, capacity: int, block_rows: int) -> tuple[TileTable, Tensor]:
    """Lay the slots out by expert, each expert's from a multiple of ``block_rows`` on.

    Example: ids ``[[1, 0], [1, -1]]``, 2 experts, capacity 48, tiles of 16: row_ids is 0 at routed row 0, and 0, 1 at
    routed rows 16 and 17; row_slots ``[[16, 0], [17, -1]]``; two tiles, ``[0, 0, 1, 0]`` and ``[1, 16, 2, 0]``.

    Args:
        top_k_ids: ``(N, K)`` local experts or -1.
        num_experts: e.
        capacity: Q, a multiple of ``block_rows`` that suffices (see ``routed_capacity``).
        block_rows: Rows of a tile.

    Returns:
        Tiles with ``row_ids (Q,)``, 0 in the padding; and ``(N, K)`` int32 routed row of each slot, -1 for none.
    """
    ids, device = top_k_ids.flatten().long(), top_k_ids.device
    bins = ids.where(ids >= 0, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    order = bins.argsort(stable=True)
    rank_in_bin = torch.empty_like(bins)
    rank_in_bin[order] = torch.arange(bins.numel(), device=device) - (counts.cumsum(0) - counts)[bins[order]]
    tiles_until = ((counts[:-1] + block_rows - 1) // block_rows).cumsum(0)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    starts[1:] = tiles_until * block_rows
    row_slots = (starts[bins] + rank_in_bin).where(ids >= 0, -1)
    # What is nowhere goes to one row more than there are, which is cut off.
    row_ids = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
    rows = torch.arange(bins.numel(), dtype=torch.int32, device=device) // top_k_ids.shape[1]
    row_ids[row_slots.where(ids >= 0, capacity)] = rows
    tile = torch.arange(capacity // block_rows, device=device)
    experts = torch.searchsorted(tiles_until, tile, right=True).clamp(max=num_experts - 1)
    valid = (starts[experts] + counts[experts] - tile * block_rows).clamp(0, block_rows)
    table = _table(experts, tile * block_rows, valid, tiles_until[-1:], row_ids[:-1], block_rows)
    return table, row_slots.int().view(top_k_ids.shape)


def tiles_of_batches(counts: Tensor, batch_rows: int, block_rows: int) -> TileTable:
    """The tiles of batches of ``batch_rows`` rows that hold something, by expert.

    Example: counts ``[1, 0, 20]``, batches of 32, tiles of 16: three tiles, ``[0, 0, 1, 0]``, ``[2, 64, 16, 0]`` and
    ``[2, 80, 4, 0]``.

    Args:
        counts: ``(e,)`` int32 valid rows of each batch.
        batch_rows: B.
        block_rows: Rows of a tile.

    Returns:
        Tiles without ``row_ids``.
    """
    per_batch = -(-batch_rows // block_rows)
    tile = torch.arange(counts.numel() * per_batch, device=counts.device)
    experts, first = tile // per_batch, tile % per_batch * block_rows
    valid = (counts[experts] - first).clamp(0, block_rows)
    used = valid > 0
    order = (~used).argsort(stable=True)
    rows = experts * batch_rows + first
    return _table(experts[order], rows[order], valid[order], used.sum()[None], counts.new_empty(0), block_rows)


def _table(
    experts: Tensor, rows: Tensor, valid: Tensor, num_tiles: Tensor, row_ids: Tensor, block_rows: int
) -> TileTable:
    from comet.kernels.arguments import TileTable  # needs triton

    return TileTable(
        tiles=torch.stack([experts, rows, valid, torch.zeros_like(experts)], dim=1).int(),
        num_tiles=num_tiles.int(),
        row_ids=row_ids,
        counters=row_ids.new_empty(0),  # of the fused kernels
        block_rows=block_rows,
    )
