"""Copies of received rows in the order of the experts: the example, and what is refused; else see test_group_gemm."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import make_table
from torch import Tensor

from comet.kernels.gemm.gather_rows import OwnRows, gather_rows, gather_rows_torch
from comet.kernels.runtime.arguments import TileTable


def one_tile(row_ids: list[int]) -> TileTable:
    """Of the first two routed rows."""
    tiles, num_tiles, ids = (torch.tensor(each, dtype=torch.int32) for each in ([[0, 0, 2, 0]], [1], row_ids))
    return make_table(tiles, num_tiles, ids, 16)


def test_worked_example() -> None:
    table, rows, own = one_tile([1, 0, -1]), torch.zeros(2, 16), torch.zeros(1, 16)
    rows[:, 0], own[0, 0] = torch.tensor([5.0, 6.0]), 7
    for apart, copied in ((None, [6, 5, 0]), (OwnRows(rows=own, first=1), [7, 5, 0])):
        out = torch.zeros(3, 16)
        gather_rows_torch(rows, out, table.row_ids, table, apart)
        assert out[:, 0].tolist() == copied


def test_gathering_names_the_wrong_argument() -> None:
    rows, out, table = torch.zeros(4, 32), torch.zeros(8, 32), one_tile([0] * 8)

    def run(rows: Tensor = rows, out: Tensor = out, own: OwnRows | None = None) -> None:
        gather_rows(rows, out, table.row_ids, table, own)

    with pytest.raises(
        ValueError, match=r"out of shape \(7, 32\) and torch.float32 must have a row for each of row_ids=8"
    ):
        run(out=out[:7])
    with pytest.raises(ValueError, match=r"out of shape \(8, 32\) .* and columns=16 and dtype=torch.float32 of rows"):
        run(rows=torch.zeros(4, 16))
    with pytest.raises(ValueError, match=r"dtype=torch.float16 of rows"):
        run(rows=rows.half())
    with pytest.raises(ValueError, match=r"columns of rows=24 must be a multiple of 16"):
        run(rows=torch.zeros(4, 24), out=torch.zeros(8, 24))
    with pytest.raises(
        ValueError, match=r"own rows of shape \(4, 16\) .* must have columns=32 and dtype=torch.float32"
    ):
        run(own=OwnRows(rows=rows[:, :16], first=0))
    with pytest.raises(ValueError, match=r"own rows of shape \(4, 32\) and torch.float16 must have columns=32"):
        run(own=OwnRows(rows=rows.half(), first=0))
    with pytest.raises(ValueError, match=r"own rows of shape \(4, 32\) must be contiguous, has strides \(1, 4\)"):
        run(own=OwnRows(rows=torch.zeros(32, 4).T, first=0))
    with pytest.raises(ValueError, match=r"rows of shape \(4, 32\) must be contiguous, has strides \(1, 4\)"):
        run(rows=torch.zeros(32, 4).T)
