"""The layer's two grouped GEMMs alone, on given row counts: the floor of its compute, by torch and by Comet."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from comet.kernels.arguments import TileTable
from comet.kernels.group_gemm import GemmConfig, group_gemm
from comet.layout import round_up
from comet.plain import grouped_matmul
from comet.tuner.timing import Variant

BLOCK_ROWS = 128


def split_evenly(num_rows: int, num_experts: int) -> tuple[int, ...]:
    """Rows of each expert when all are alike; 7 rows over 3 experts: (3, 2, 2)."""
    share, rest = divmod(num_rows, num_experts)
    return tuple(share + (expert < rest) for expert in range(num_experts))


def gemm_variants(w1: Tensor, w2: Tensor, expert_counts: tuple[int, ...]) -> dict[str, Variant]:
    """Both GEMMs without SwiGLU, as variants ``gemm_torch`` and, on a GPU, ``gemm_comet``.

    Args:
        w1: ``(e, 2F/TP, D)``.
        w2: ``(e, D, F/TP)``.
        expert_counts: e routed rows of each expert.

    Returns:
        Name to variant.
    """
    variants = {"gemm_torch": _torch_gemms(w1, w2, expert_counts)}
    if w1.is_cuda:
        variants["gemm_comet"] = _comet_gemms(w1, w2, expert_counts)
    return variants


def _torch_gemms(w1: Tensor, w2: Tensor, expert_counts: tuple[int, ...]) -> Variant:
    ends = torch.tensor(list(accumulate(expert_counts)), dtype=torch.int32, device=w1.device)
    rows, hidden = _operands(w1, w2, sum(expert_counts))

    def run(index: int) -> None:
        grouped_matmul(rows, w1, expert_counts, ends)
        grouped_matmul(hidden, w2, expert_counts, ends)

    return run


def _comet_gemms(w1: Tensor, w2: Tensor, expert_counts: tuple[int, ...]) -> Variant:
    table, num_rows = tile_table(expert_counts, w1.device)
    rows, hidden = _operands(w1, w2, num_rows)
    first, second = rows.new_empty(num_rows, w1.shape[1]), rows.new_empty(num_rows, w2.shape[1])
    config = GemmConfig.select(w1.dtype)

    def run(index: int) -> None:
        group_gemm(rows, w1, first, table, gather=False, layout="nk", config=config)
        group_gemm(hidden, w2, second, table, gather=False, layout="nk", config=config)

    return run


def tile_table(expert_counts: tuple[int, ...], device: torch.device | str) -> tuple[TileTable, int]:
    """Lay the rows out as the plan does, in one phase, every expert from a multiple of 128 rows.

    Example: counts (130, 0, 5): tiles ``[[0, 0, 128, 0], [0, 128, 2, 0], [2, 256, 5, 0]]``, 384 rows.

    Args:
        expert_counts: e rows of each expert.
        device: Where the table lives.

    Returns:
        The table, and the rows its tiles span.
    """
    tiles: list[list[int]] = []
    num_rows = 0
    for expert, count in enumerate(expert_counts):
        for first in range(0, count, BLOCK_ROWS):
            tiles.append([expert, num_rows + first, min(BLOCK_ROWS, count - first), 0])
        num_rows += round_up(count, BLOCK_ROWS)
    table = TileTable(
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 4),
        num_tiles=torch.tensor([len(tiles)], dtype=torch.int32, device=device),
        row_ids=torch.arange(num_rows, dtype=torch.int32, device=device),
        counters=torch.zeros(32, dtype=torch.int32, device=device),
        block_rows=BLOCK_ROWS,
    )
    return table, num_rows


def _operands(w1: Tensor, w2: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Random rows of D and of F/TP columns; zeros would draw less power and flatter the clock."""
    shapes = ((num_rows, w1.shape[2]), (num_rows, w2.shape[2]))
    rows, hidden = (torch.randn(shape, device=w1.device, dtype=w1.dtype) for shape in shapes)
    return rows, hidden
