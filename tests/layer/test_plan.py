"""The plan: the torch twin against plain loops, the kernels against the twin, the exchange between real ranks."""

import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_cases import (
    FIELDS,
    Case,
    assert_same_plan,
    check_pool,
    oracle,
    plan_all_ranks,
    plan_backend,
    plan_from_ids,
    random_case,
    twin_plan,
    workspace,
)
from ranks import in_ranks

from comet.comm import LocalCommunicator, make_communicator
from comet.errors import CapacityError, CommTimeoutError
from comet.layer.plan import Launch, Plan, PlanRules, routed_row_capacity
from comet.layout import ExpertLayout

LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (3, 1), (4, 2), (8, 1)]


def test_example_of_routed_row_capacity() -> None:
    layout = ExpertLayout(num_experts=8, top_k=2, ep=4, tp=1, rank=0)
    assert routed_row_capacity(layout, 128, 16, None) == 1056
    assert routed_row_capacity(layout, 128, 16, 1.5) == 416


# ---- the twin


@pytest.mark.parametrize("seed", range(90))
def test_twin_equals_loops(seed: int) -> None:
    case = random_case(seed, *LAYOUTS[seed % len(LAYOUTS)])
    print(f"seed {seed}")
    for rank in random.Random(seed).sample(range(case.world_size), min(case.world_size, 3)):
        plan, expected = twin_plan(case, rank), oracle(case, rank)
        for field in FIELDS:
            tensor = getattr(plan, field)
            wanted = torch.tensor(expected[field], dtype=tensor.dtype).view(tensor.shape)
            assert torch.equal(tensor, wanted), f"seed {seed} rank {rank}: {field}"


def test_worst_routing_fits_the_capacity() -> None:
    layout = ExpertLayout(num_experts=4, top_k=3, ep=2, tp=1, rank=0)
    ids = torch.tensor([0, 1, 2], dtype=torch.int32).expand(2, 128, 3).contiguous()
    ids[1, -1] = -1  # uneven segments need padding
    fits, smaller = (
        plan_from_ids(ids, torch.ones(ids.shape), layout, num_tokens=128, block_rows=64, max_routed_rows=limit)
        for limit in (routed_row_capacity(layout, 128, 64, None), 448)
    )
    assert fits.status.tolist() == [512, 0, 0, 0]
    assert smaller.status.tolist() == [512, 0, 1, 0]
    assert smaller.segment_counts.tolist() == [255, 192]


# ---- validation


def make_plan(**changes: Any) -> Plan:
    """A plan on one rank, of ids, routing weights, layout and rules with changes."""
    case = random_case(0, 1, 1, num_experts=8, top_k=2, max_tokens=128)
    given = {"block_rows": 16, "expert_capacity": None, "max_routed_rows": 256, "layout": case.layout(0)}
    given |= {"top_k_ids": torch.zeros(4, 2, dtype=torch.int32), "top_k_weights": torch.ones(4, 2)} | changes
    ids, weights, layout = (given.pop(name) for name in ("top_k_ids", "top_k_weights", "layout"))
    pool = workspace(case, LocalCommunicator(torch.device("cpu")))
    backend = plan_backend(layout, pool, PlanRules.create(**given), use_kernels=False)
    backend.check(ids, weights)
    return backend.plan(ids, weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k_ids": torch.zeros(4, 2, dtype=torch.int64)}, "dtype=torch.int64 of top_k_ids must be torch.int32"),
        ({"top_k_weights": torch.ones(4, 2).half()}, "dtype=torch.float16 of top_k_weights must be torch.float32"),
        ({"top_k_ids": torch.zeros(4, 3, dtype=torch.int32)}, "shape=(4, 3) of top_k_ids must be (tokens, top_k=2)"),
        ({"top_k_ids": torch.zeros(8, dtype=torch.int32)}, "shape=(8,) of top_k_ids must be (tokens, top_k=2)"),
        ({"top_k_weights": torch.ones(5, 2)}, "shape=(5, 2) of top_k_weights must equal (4, 2) of top_k_ids"),
        (
            {"top_k_ids": torch.zeros(129, 2, dtype=torch.int32), "top_k_weights": torch.ones(129, 2)},
            "num_tokens=129 must be at most max_tokens=128 of the workspace; raise max_tokens when it is made",
        ),
        (
            {"layout": ExpertLayout(num_experts=8, top_k=2, ep=2, tp=1, rank=1)},
            "rank=1 of 2 in the layout must be the communicator's 0 of 1",
        ),
        (
            {
                "layout": ExpertLayout(num_experts=8, top_k=3, ep=1, tp=1, rank=0),
                "top_k_ids": torch.zeros(4, 3, dtype=torch.int32),
                "top_k_weights": torch.ones(4, 3),
            },
            "top_k=3 must be at most the workspace's top_k=2",
        ),
        ({"expert_capacity": 0}, "expert_capacity=0 must be at least 1 and fit 32 bits, or None"),
        ({"max_routed_rows": 250}, "max_routed_rows=250 must be a positive multiple of block_rows=16"),
        ({"max_routed_rows": 0}, "max_routed_rows=0 must be a positive multiple of block_rows=16"),
        (
            {"top_k_ids": torch.full((4, 2), 8).int()},
            "top_k_ids of rank 0 contain 8; every id must be -1 (masked) or in [0, num_experts=8)",
        ),
        ({"top_k_ids": torch.full((4, 2), -2).int()}, "top_k_ids of rank 0 contain -2; every id must be -1"),
    ],
)
def test_errors_name_field_value_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(**changes)


def test_non_contiguous_ids() -> None:
    ids = torch.arange(8, dtype=torch.int32).view(2, 4).T
    plan = make_plan(top_k_ids=ids, top_k_weights=torch.rand(2, 4).T)
    expected = make_plan(top_k_ids=ids.contiguous(), top_k_weights=torch.zeros(4, 2))
    assert torch.equal(plan.routed_row_ids, expected.routed_row_ids)


# ---- passes


def test_a_backward_pass_has_counters_of_its_own_and_leaves_the_plan_as_it_was() -> None:
    plan = make_plan()
    plan.counters.fill_(7)
    back = plan.for_backward(plan.memory)
    assert back.row_slots is plan.row_slots
    assert not back.counters.any()
    assert (plan.counters == 7).all()
    back.counters_of(Launch.DGRAD_COMBINE).fill_(1)
    assert back.counters.nonzero().flatten().tolist() == list(range(96, 128))


def test_a_backward_pass_reads_the_memory_it_is_given() -> None:
    plan = make_plan()
    kept = plan.for_backward(plan.memory.clone())
    plan.memory.fill_(-5)
    wanted = make_plan()
    for name in ("routed_row_ids", "row_slots", "row_weights", "segment_starts", "tiles"):
        assert torch.equal(getattr(kept, name), getattr(wanted, name)), name


# ---- real ranks


def epochs_of(world_size: int, num_epochs: int, max_tokens: int) -> list[Case]:
    """Cases of the same pool size for one group of ranks, every layout of that size in turn."""
    layouts = [layout for layout in LAYOUTS if layout[0] * layout[1] == world_size]
    return [
        random_case(seed, *layouts[seed % len(layouts)], max_tokens=max_tokens, num_experts=24, top_k=1 + seed % 4)
        for seed in range(num_epochs)
    ]


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@in_ranks("world_size", interpret="use_kernels")
def test_plans_between_ranks(rank: int, world_size: int, use_kernels: bool) -> None:
    """All cases share one pool, with random delays; every plan equals the twin's."""
    num_epochs, max_tokens = (8 // world_size, 512 // world_size) if use_kernels else (12, 256)
    cases = epochs_of(world_size, num_epochs, min(max_tokens, 256))
    comm = make_communicator("cpu_shm", torch.distributed.group.WORLD, "cpu", timeout_s=60.0)
    wide = max(cases, key=lambda case: case.top_k)
    pool = workspace(wide, comm)
    draw = random.Random(rank)
    for epoch, case in enumerate(cases):
        time.sleep(draw.choice((0.0, 0.0, 0.05)) * draw.random())
        wanted = twin_plan(case, rank)
        if wanted.status[2] and not use_kernels:
            with pytest.raises(CapacityError, match=f"rank {rank} needs {int(wanted.status[0])} routed rows"):
                case.plan(rank, pool, use_kernels=False)
            continue
        plan = case.plan(rank, pool, use_kernels=use_kernels)
        check_pool(pool, plan)
        time.sleep(draw.choice((0.0, 0.05)) * draw.random())
        assert_same_plan(plan, wanted, f"epoch {epoch} rank {rank}")
    comm.close()
    assert pool.epoch == num_epochs


@pytest.mark.parametrize("use_kernels", [False, True])
@in_ranks(2, interpret="use_kernels")
def test_a_late_rank_is_named(rank: int, world_size: int, use_kernels: bool) -> None:
    """Rank 1 never sends its ids."""
    comm = make_communicator("cpu_shm", torch.distributed.group.WORLD, "cpu", timeout_s=0.02)
    case = random_case(3, 2, 1, max_tokens=128)
    pool = workspace(case, comm)

    def plan() -> None:
        case.plan(0, pool, use_kernels=use_kernels)
        pool.check()

    if rank == 0:
        said = r"^rank 0 waited 0\.0 s for rank 1 \(exchange of top-k ids, chunk 0, epoch 1, saw 0\); a rank that makes"
        with pytest.raises(CommTimeoutError, match=said):
            plan()
    torch.distributed.barrier()


@pytest.mark.parametrize("seeds", [[21, 27, 30], [23, 25]])
@in_ranks(1, interpret=True)
def test_kernels_equal_twin(rank: int, world_size: int, seeds: list[int]) -> None:
    """One process plays all ranks of each case."""
    for seed in seeds:
        case = random_case(seed, *LAYOUTS[seed % 7], max_tokens=(128, 256, 384)[seed % 3])
        for plans in plan_all_ranks(case, "cpu", epochs=1):
            for player, plan in enumerate(plans):
                assert_same_plan(plan, twin_plan(case, player), f"seed {seed} rank {player}")


@in_ranks(1, interpret=True)
def test_nothing_is_written_past_the_end(rank: int, world_size: int) -> None:
    """Tensors of routed rows have too small a Q."""
    from comet.layer import fused

    guards: list[torch.Tensor] = []
    cut = fused.cut

    def guarded(memory: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        tensors = cut(memory, shapes)
        for name in ("routed_row_ids", "routed_slots", "tiles", "row_slots"):
            if name in shapes:
                size = tensors[name].numel()
                padded = torch.full((size + 4096,), 77, dtype=torch.int32)
                guards.append(padded[size:])
                tensors[name] = padded[:size].view(shapes[name])
        return tensors

    fused.cut = guarded
    case = random_case(41, 1, 1, num_experts=6, top_k=2, max_tokens=256)
    ids = torch.randint(0, 6, (256, 2), dtype=torch.int32)
    ids[:4] = torch.tensor([[6, 7], [-9, 2**31 - 1], [-(2**31), 5], [0, 0]])  # a caller's bug must stay inside, too
    case = replace(case, ids=[ids], weights=[torch.ones(256, 2)])
    case = replace(case, block_rows=16, expert_capacity=None, max_routed_rows=64)
    plan = case.plan(0, workspace(case, LocalCommunicator(torch.device("cpu"))))
    assert plan.status[2] == 1
    assert plan.segment_starts[-1] == 64
    assert plan.row_slots.max() < 64
    assert len(guards) == 4
    assert all((guard == 77).all() for guard in guards)
