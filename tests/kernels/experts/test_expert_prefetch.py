"""Experts that travel before their step: kernels against twins, and steps that begin at any moment."""

from __future__ import annotations

import random

import pytest
import torch
from cache_cases import Twins, check_slots, host_of, stop_after
from decode_cases import MATRIX, VECTOR, DecodeCase
from ranks import run_ranks
from tiers import slow_but
from training_cases import MOE, awake_model, compare_texts, nearly_equal

from comet.generation.engine import GPTEngine
from comet.kernels.experts.prefetch import MOST_AHEAD, plan, plan_torch, take_over_torch, travel, travel_torch
from comet.kernels.experts.tables import BEGUN, GATE, NEEDED, NEXT, PLANNED, HostExperts, pieces_of


def compare(rank: int, world_size: int, case: DecodeCase, num_slots: int, policy: str) -> None:
    """Random predictions, stops and steps: equal tables, outputs of resident experts, slots as stored."""
    twins = Twins.make(case, num_slots, policy)
    made, drawn = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    mine, twin = twins.mine, twins.twin
    for cache in (mine, twin):
        cache.expect_prefetch()
    for _ in range(12):
        tokens, ids, weights = twins.draw(made)
        guessed = ids.where(torch.rand(ids.shape, generator=made) < 0.7, (ids + 1) % case.E)
        plan(guessed, mine.weights.parts, mine.host)
        plan_torch(guessed, twin.host)
        travel(mine.weights.parts, mine.host)
        travel_torch(twin.weights.parts, twin.host)
        count = int(mine.tables.header[PLANNED.value])
        assert torch.equal(mine.tables.ahead[:, :count], twin.tables.ahead[:, :count])
        assert count <= MOST_AHEAD
        pieces = drawn.choice([0, count * mine.host.pieces, drawn.randint(0, count * mine.host.pieces)])
        stop_after(pieces, mine)
        stop_after(pieces, twin)
        twins.step(tokens, ids, weights)
        assert torch.equal(mine.tables.totals[4:7], twin.tables.totals[4:7])
        for word in (GATE, PLANNED, BEGUN, NEEDED):
            assert mine.tables.header[word.value] == twin.tables.header[word.value]
        check_slots(mine)
    assert mine.tables.totals[5] > 0


CASES = [
    DecodeCase(name="vector", T=1, K=2, E=9, D=80, F=48, config=VECTOR, seed=1),
    DecodeCase(name="two tokens", T=2, K=3, E=24, D=96, F=80, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=3),
]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("case", slow_but(["vector"], CASES))
def test_kernels_equal_their_twins_whenever_the_step_begins(case: DecodeCase, policy: str) -> None:
    run_ranks(compare, 1, case, case.T * case.K + 1, policy, interpret=True)


def test_steps_in_waves_take_over_what_travelled() -> None:
    run_ranks(compare, 1, CASES[2], 4, "lru", interpret=True)


@pytest.fixture
def host() -> HostExperts:
    return host_of((3, 1), (0, 3), (5, 2))


def test_the_examples_of_the_docs(host: HostExperts) -> None:
    tables = host.tables
    plan_torch(torch.tensor([[5, 2, 4]]), host)
    assert tables.owners.tolist() == [-1, -1, 5]
    assert tables.ahead[:, :2].tolist() == [[2, 4], [0, 1], [3, 0]]
    assert tables.slots.tolist() == [-1, -1, -1, -1, -1, 2]
    assert host.pieces == 10
    assert [pieces_of([size]) for size in (65_536, 65_544, 12)] == [8, 9, 1]
    tables.header[NEXT.value] = 12
    tables.last_used[[5, 2, 1]] = 4
    assert take_over_torch(host, 4) == (-1, 2)
    assert tables.slots.tolist() == [-1, -1, 0, -1, -1, 2]
    assert tables.owners.tolist() == [2, -1, 5]
    assert tables.totals[4:7].tolist() == [2, 1, 12 * 1024]


def test_what_has_not_begun_gives_its_slot_back(host: HostExperts) -> None:
    plan_torch(torch.tensor([[5, 2, 4]]), host)
    take_over_torch(host, 4)
    assert host.tables.owners.tolist() == [3, 0, 5]
    assert host.tables.slots.tolist() == [1, -1, -1, 0, -1, 2]


def test_a_predictor_that_is_wrong_rests(host: HostExperts) -> None:
    header = host.tables.header
    header[BEGUN.value], header[NEEDED.value] = 40, 9
    for _ in range(4):  # 36 is no more than four times 9
        plan_torch(torch.tensor([[1]]), host)
        assert not header[PLANNED.value]
    plan_torch(torch.tensor([[1]]), host)
    assert header[PLANNED.value] == 1


@pytest.mark.parametrize("expert_slots", [MOE.top_k, MOE.top_k + 1, MOE.num_experts - 1])
def test_decode_with_prefetch_equals_resident_decode_bit_for_bit(expert_slots: int) -> None:
    model, group = awake_model(in_slots=True, sharpness=1.0)
    engine = GPTEngine(model, group, expert_slots=expert_slots, expert_prefetch=True)
    engines = engine, GPTEngine(awake_model(group=group, sharpness=1.0)[0], group)
    drawn = compare_texts(*engines, steps=21)
    ids = torch.randint(256, (1, 25), generator=drawn)  # a prompt that streams, and a step behind it
    for each in engines:
        each.prefill(ids, torch.tensor([25]), 30)
    nearly_equal(*(each.decode(ids[0, :1]) for each in engines))
    report = engine.cache_report()
    assert report.prefetched >= report.prefetched_needed > 0
