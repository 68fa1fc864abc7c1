"""The order in which rows travel: the numbers of the docstrings."""

from __future__ import annotations

import torch
from rank_plans import plan_from_ids

from comet.layer.twin.plan import _places, waves
from comet.layout import ExpertLayout, num_waves


def test_examples_of_waves() -> None:
    assert [num_waves(2), num_waves(32), num_waves(256)] == [4, 32, 32]
    local = torch.tensor([[0, 5], [1, 7], [7, -1], [-1, -1]])
    assert waves(local, local >= 0, 8).tolist() == [0, 1, 13, 15]
    assert _places(torch.tensor([3, 0, 3, 0])).tolist() == [2, 0, 3, 1]
    # Of four tokens, 1 goes to rank 1's second expert, 3 to its first, 0 and 2 stay.
    layout = ExpertLayout(num_experts=4, top_k=1, ep=2, tp=1, rank=0)
    ids = torch.full((2, 128, 1), -1, dtype=torch.int32)
    ids[0, :4, 0] = torch.tensor([0, 3, 1, 2])
    plan = plan_from_ids(
        ids, torch.ones(ids.shape), layout, num_tokens=4, block_rows=16, expert_capacity=None,
        max_routed_rows=96,
    )  # fmt: skip
    assert plan.send_token_ids[1, :4].tolist() == [3, 1, -1, -1]
    assert plan.send_rows[:4, 1].tolist() == [-1, 1, -1, 0]
