"""A plan whose wait met its deadline: other kernels of the device read it before the host raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import emulated_group
from plan_cases import Case, assert_same_plan, random_case, twin_plan, workspace
from ranks import run_ranks

from comet.errors import CommTimeoutError
from comet.layer.plan import Plan

GARBAGE = 123456789
DEADLINE_S = 0.002


def make_case() -> Case:
    """Two ranks, each with all its tokens at two of eight experts, and room for all rows."""
    case = random_case(7, 2, 1, num_experts=8, top_k=2, max_tokens=128)
    return replace(case, expert_capacity=None, max_routed_rows=1024, block_rows=16)


def new_ids(case: Case, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(128, 8, generator=generator).argsort(dim=1)[:, :2].int() for _ in range(2)]
    return replace(case, ids=ids, weights=[torch.rand(128, 2, generator=generator) for _ in range(2)])


def late_ids(rank: int, world_size: int) -> str:
    """The ids of rank 1 reach rank 0 after it counted and before it places; returns rank 0's complaint."""
    from comet.kernels.plan import metadata
    from comet.layer import fused

    cut, place_plan = metadata.cut, fused.place_plan

    def dirty(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = cut(*arguments)
        for tensor in tensors.values():
            tensor.fill_(GARBAGE)
        return tensors

    metadata.cut = fused.cut = dirty
    pools = [workspace(make_case(), comm) for comm in emulated_group(2, "cpu", DEADLINE_S)]

    for epoch in range(2):  # both halves of the pools hold ids of older plans
        case = new_ids(make_case(), epoch)
        for player in range(2):
            case.send(player, pools[player])
        for player in range(2):
            assert_same_plan(case.plan(player, pools[player]), twin_plan(case, player), f"epoch {epoch} rank {player}")
    case = new_ids(make_case(), 2)

    def place_late(*arguments: Any) -> None:
        fused.place_plan = place_plan
        case.send(1, pools[1])
        place_plan(*arguments)

    fused.place_plan = place_late
    check_harmless(case, case.plan(0, pools[0]))
    assert int(pools[0].epoch) == 2, "flags of the epoch that failed could still be raised"
    assert_same_plan(case.plan(1, pools[1]), twin_plan(case, 1), "the late rank")
    with pytest.raises(CommTimeoutError) as complaint:
        pools[0].check()
    return str(complaint.value)


def check_harmless(case: Case, plan: Plan) -> None:
    """Nothing that a kernel takes for a row or a token lies outside what there is."""
    for start, count in zip(plan.segment_starts.tolist(), plan.segment_counts.tolist(), strict=False):
        for field in (plan.routed_row_ids, plan.routed_slots):
            assert not (field[start : start + count] == GARBAGE).any(), "a row of a segment was left as it was"
    assert plan.segment_counts.tolist() == [0] * 4
    assert plan.segment_starts.tolist() == [0] * 5
    assert plan.tile_starts.tolist() == [0] * 3
    assert plan.status.tolist() == [0] * 4
    assert (plan.row_slots == -1).all()
    assert (plan.row_weights == 0).all()
    assert ((plan.send_token_ids >= -1) & (plan.send_token_ids < case.max_tokens)).all()
    assert ((plan.send_rows >= -1) & (plan.send_rows < case.max_tokens)).all()
    assert plan.send_counts.tolist() == plan.recv_counts.tolist() == [0, 0]


def test_a_plan_without_all_ids_has_no_rows() -> None:
    assert run_ranks(late_ids, 1, interpret=True) == [
        "rank 0 waited 0.0 s for rank 1 (exchange of top-k ids, chunk 0, epoch 3, saw 2)"
    ]
