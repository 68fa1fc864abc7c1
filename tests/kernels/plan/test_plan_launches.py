"""How a plan is launched, which parts wait, what its kernels count and store; what a deadline that was met leaves."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import emulated_group
from plan_cases import Case, assert_same_plan, random_case, twin_plan, workspace
from ranks import in_ranks

from comet.comm import LocalCommunicator
from comet.errors import CommTimeoutError
from comet.kernels.plan.metadata import PlanConfig, plan_constants
from comet.kernels.runtime.buffers import allocate, cut
from comet.layer.plan import Plan

CPU = torch.device("cpu")


@pytest.mark.parametrize(("ep", "tp", "expected"), [(4, 1, 12), (2, 2, 10), (1, 4, 9)])
@in_ranks(1, interpret=True)
def test_own_tokens_are_waited_for_once_for_each_shard(
    rank: int, world_size: int, ep: int, tp: int, expected: int
) -> None:
    """Count the programs that wait for a chunk while rank 0 makes its plan; all ids are there."""
    from comet.kernels.plan import counting

    case = random_case(6, ep, tp, num_experts=8, top_k=2, max_tokens=128)
    waited: list[object] = []
    wait_flags = counting.wait_flags

    def noted(*arguments: object) -> None:
        waited.append(arguments)
        wait_flags(*arguments)

    pools = [workspace(case, comm) for comm in emulated_group(case.world_size, "cpu")]
    for player, pool in enumerate(pools):
        case.send(player, pool)
    counting.wait_flags = noted
    assert_same_plan(case.plan(0, pools[0]), twin_plan(case, 0), "rank 0")
    assert len(waited) == expected


@in_ranks(1, interpret=True)
def test_more_chunks_than_a_program_reads_at_once(rank: int, world_size: int) -> None:
    """The plan of 36 chunks equals the twin's; programs read buckets and counts of fewer chunks at once."""
    case = replace(random_case(5, 1, 1, num_experts=40, top_k=2, max_tokens=36 * 128), expert_capacity=None)
    ids = torch.rand(case.max_tokens - 3, 40).argsort(dim=1)[:, :2].int()
    case = replace(case, ids=[ids], weights=[torch.rand(ids.shape)], max_routed_rows=40 * 128 * 4, block_rows=128)
    plan = case.plan(0, workspace(case, LocalCommunicator(CPU)))
    assert_same_plan(plan, twin_plan(case, 0), "36 chunks")
    constants = plan_constants(config(experts_local=40, ep=1), 2, 36)
    assert (constants.sum_block, constants.scan_rows) == (32, 16)


def config(**changes: int) -> PlanConfig:
    shape = {"top_k": 8, "experts_local": 64, "ep": 2, "tp": 1, "block_rows": 128}
    return PlanConfig(**{**shape, "expert_capacity": 2**31 - 1, **changes})


def test_examples_of_the_launches() -> None:
    few, many = 4, 64  # chunks of a source with 512 and 8192 tokens
    four = config(experts_local=32, ep=4)
    wide, narrow = (plan_constants(four, 8, chunks) for chunks in (many, few))
    assert (wide.flat, wide.expert_block, narrow.expert_block) == (1024, 32, 8)
    placed = [plan_constants(config(), 8, chunks) for chunks in (many, few)]
    assert [(one.scan_rows, one.sum_block) for one in placed] == [(16, 32), (4, 4)]


def test_tensors_lie_apart_and_aligned() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        shapes = {
            f"tensor {index}": tuple(draw.choice((0, 1, 2, 3, 7, 64, 65)) for _ in range(draw.randint(0, 4)))
            for index in range(draw.randint(1, 12))
        }
        tensors = cut(allocate(shapes, CPU), shapes)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
        for number, tensor in enumerate(tensors.values()):
            assert tensor.is_contiguous()
            assert tensor.storage_offset() % 64 == 0
            tensor.fill_(number)
        for number, (name, tensor) in enumerate(tensors.items()):
            assert (tensor == number).all(), f"{name} shares memory with another"
            assert tensor.numel() == math.prod(shapes[name])


# ---- a deadline that was met -----------------------------------------------------------------------------------------


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


@in_ranks(1, interpret=True)
def test_a_plan_without_all_ids_has_no_rows(rank: int, world_size: int) -> None:
    """The ids of rank 1 reach rank 0 after it counted and before it places."""
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
    said = r"^rank 0 waited 0\.0 s for rank 1 \(exchange of top-k ids, chunk 0, epoch 3, saw 2\); a rank that makes"
    with pytest.raises(CommTimeoutError, match=said):
        pools[0].check()


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
