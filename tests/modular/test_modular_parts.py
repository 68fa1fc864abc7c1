"""Worked examples of ``comet.modular``, verbatim, and rows that are packed."""

import pytest
import torch
from plan_cases import plan_from_ids

from comet.layer.plan import Plan, routed_row_capacity
from comet.layout import ExpertLayout
from comet.modular.all_to_all import pack, unpack
from comet.modular.experts import routed_capacity, tiles_of_batches, tiles_of_ids
from comet.modular.symmetric import batch_table

NAN = float("nan")


def ids_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_routed_capacity_example() -> None:
    assert (routed_capacity(20, 3, 16), routed_capacity(2, 3, 16)) == (80, 32)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_packed_rows_come_back(num_rows: int) -> None:
    odd = torch.randn(3, num_rows, dtype=torch.float16).T  # non-contiguous; any stride when there is one row
    column = torch.arange(4 * num_rows, dtype=torch.int32).view(num_rows, 4)[:, 1:2]
    parts = [odd, torch.randn(num_rows, 16).to(torch.float8_e4m3fn), torch.randn(num_rows, 2).double(), column]
    for wanted, found in zip(parts, unpack(pack(parts), parts), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.double(), wanted.double())


def test_tiles_of_ids_example() -> None:
    table, row_slots = tiles_of_ids(ids_of([[1, 0], [1, -1]]), 2, 16)
    assert row_slots.tolist() == [[16, 0], [17, -1]]
    assert table.row_ids[[0, 16, 17]].tolist() == [0, 0, 1]
    assert table.tiles[: int(table.num_tiles)].tolist() == [[0, 0, 1, 0], [1, 16, 2, 0]]


def test_tiles_of_batches_example() -> None:
    table = tiles_of_batches(torch.tensor([1, 0, 20], dtype=torch.int32), 32, 16)
    assert table.tiles[: int(table.num_tiles)].tolist() == [[0, 0, 1, 0], [2, 64, 16, 0], [2, 80, 4, 0]]


def make_plan(ids: torch.Tensor, layout: ExpertLayout, num_tokens: int) -> Plan:
    return plan_from_ids(
        ids,
        torch.rand(ids.shape),
        layout,
        num_tokens=num_tokens,
        block_rows=16,
        expert_capacity=None,
        max_routed_rows=routed_row_capacity(layout, ids.shape[1], 16, None),
    )


def test_batch_table_example() -> None:
    ids = torch.full((1, 128, 2), -1, dtype=torch.int32)
    ids[0, 0], ids[0, 1, 0] = torch.tensor([1, 0]), 1
    plan = make_plan(ids, ExpertLayout(num_experts=2, top_k=2, ep=1, tp=1, rank=0), 2)
    row_ids, row_slots = batch_table(plan, 4)
    assert row_ids.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    assert row_slots[:2].tolist() == [[4, 0], [5, -1]]
    assert row_slots[2:].max() == -1
