"""Experts that travel before their step: kernels against twins, and steps that begin at any moment."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from cache_cases import cache_of, check_slots, parts_of, resident_weights
from decode_cases import MATRIX, VECTOR, DecodeCase
from ranks import run_ranks
from tiers import slow
from training_cases import MODEL, MOE

from comet.config import ParallelConfig
from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.experts import ExpertCache
from comet.generation.engine import GPTEngine
from comet.kernels.experts.prefetch import MOST_AHEAD, plan, plan_torch, take_over_torch, travel, travel_torch
from comet.kernels.experts.tables import (
    AHEAD_WORDS,
    BEGUN,
    GATE,
    NEEDED,
    NEXT,
    PLANNED,
    CacheTables,
    HostExperts,
    pieces_of,
)
from comet.layer.group import make_expert_group
from comet.models.gpt import GPT

TABLES = ("slots", "arriving", "last_used", "owners")


def prefetched(case: DecodeCase, num_slots: int, policy: str, held: tuple[int, int]) -> ExpertCache:
    cache = cache_of(case, num_slots, policy, held)
    cache.host = replace(cache.host, prefetched=True)
    cache.weights = replace(cache.weights, host=cache.host)
    return cache


def stop_after(pieces: int, cache: ExpertCache) -> None:
    """As if the step had begun after so many pieces: other numbers behind them, and slots as they were before them."""
    tables = cache.tables
    tables.header[NEXT.value] = pieces
    for copy in range(int(tables.header[PLANNED.value])):
        slot, former = tables.ahead[1:, copy].tolist()
        there = pieces - copy * cache.host.pieces
        has_begun = there > 0
        for slots, stored in zip(parts_of(cache.weights), parts_of(cache.host), strict=True):
            if has_begun:
                slots[slot].flatten()[max(there, 0) * 8 * AHEAD_WORDS :] = 0x7F
                there -= math.ceil(slots[slot].numel() / (8 * AHEAD_WORDS))
            elif former >= 0:
                slots[slot] = stored[former - cache.first_expert]


def compare(rank: int, world_size: int, case: DecodeCase, num_slots: int, policy: str) -> None:
    """Random predictions, stops and steps: equal tables, outputs of resident experts, slots as stored."""
    print("seed", case.seed)
    made, drawn = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    held = (1, case.E)
    mine, twin = (prefetched(case, num_slots, policy, held) for _ in range(2))
    everything = resident_weights(case, held)
    for _ in range(12):
        tokens, weights = (torch.rand(case.T, size, generator=made) for size in (case.D, case.K))
        ids = torch.randint(-1, case.E, (case.T, case.K), generator=made, dtype=torch.int32)
        guessed = ids.where(torch.rand(ids.shape, generator=made) < 0.7, (ids + 1) % case.E)
        for launch, arrive, cache in ((plan, travel, mine), (plan_torch, travel_torch, twin)):
            launch(guessed, cache.weights.parts, cache.host) if launch is plan else launch(guessed, cache.host)
            arrive(cache.weights.parts, cache.host)
        count = int(mine.tables.header[PLANNED.value])
        assert torch.equal(mine.tables.ahead[:, :count], twin.tables.ahead[:, :count])
        assert count <= MOST_AHEAD
        pieces = drawn.choice([0, count * mine.host.pieces, drawn.randint(0, count * mine.host.pieces)])
        stop_after(pieces, mine)
        stop_after(pieces, twin)
        output = run_kernels(tokens, ids, weights, mine.weights, config=case.config)
        assert torch.equal(output, run_kernels(tokens, ids, weights, everything, config=case.config))
        warp_decode_torch(tokens, ids, weights, twin.weights)
        for name in TABLES:
            assert torch.equal(getattr(mine.tables, name), getattr(twin.tables, name)), name
        assert torch.equal(mine.tables.totals[[0, 1, 4, 5, 6]], twin.tables.totals[[0, 1, 4, 5, 6]])
        mine_header, twin_header = mine.tables.header.clone(), twin.tables.header.clone()
        for word in (GATE, PLANNED, BEGUN, NEEDED):
            assert mine_header[word.value] == twin_header[word.value]
        check_slots(mine)
    assert mine.tables.totals[5] > 0


CASES = [
    DecodeCase(name="vector", T=1, K=2, E=9, D=80, F=48, config=VECTOR, seed=1),
    DecodeCase(name="two tokens", T=2, K=3, E=24, D=96, F=80, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=3),
]


@pytest.mark.parametrize(
    ("policy", "case"),
    [
        ("lru", CASES[0]),
        ("score", CASES[0]),
        slow("lru", CASES[1]),
        slow("score", CASES[1]),
        slow("lru", CASES[2]),
        slow("score", CASES[2]),
    ],
)
def test_kernels_equal_their_twins_whenever_the_step_begins(case: DecodeCase, policy: str) -> None:
    run_ranks(compare, 1, case, case.T * case.K + 1, policy, interpret=True)


def test_steps_in_waves_take_over_what_travelled() -> None:
    run_ranks(compare, 1, CASES[2], 4, "lru", interpret=True)


def tables_of_the_example() -> HostExperts:
    tables = CacheTables.create(6, 3, torch.device("cpu"))
    for slot, (expert, step) in enumerate([(3, 1), (0, 3), (5, 2)]):
        tables.slots[expert] = tables.arriving[expert] = slot
        tables.owners[slot], tables.last_used[expert] = expert, step
    # Ten pieces: w1 has 6 of 1024 words of 8 bytes, w2 has 4.
    return HostExperts(w1=torch.rand(6, 12, 1024), w2=torch.rand(6, 1024, 8), tables=tables, prefetched=True)


def test_the_examples_of_the_docs() -> None:
    host = tables_of_the_example()
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


def test_what_has_not_begun_gives_its_slot_back() -> None:
    host = tables_of_the_example()
    plan_torch(torch.tensor([[5, 2, 4]]), host)
    take_over_torch(host, 4)
    assert host.tables.owners.tolist() == [3, 0, 5]
    assert host.tables.slots.tolist() == [1, -1, -1, 0, -1, 2]


def test_a_predictor_that_is_wrong_rests() -> None:
    host = tables_of_the_example()
    header = host.tables.header
    header[BEGUN.value], header[NEEDED.value] = 40, 9
    for _ in range(4):  # 36 is no more than four times 9
        plan_torch(torch.tensor([[1]]), host)
        assert not header[PLANNED.value]
    plan_torch(torch.tensor([[1]]), host)
    assert header[PLANNED.value] == 1


@pytest.mark.parametrize("expert_slots", [MOE.top_k, MOE.top_k + 1, MOE.num_experts - 1])
def test_decode_with_prefetch_equals_resident_decode_bit_for_bit(expert_slots: int) -> None:
    group = make_expert_group(MODEL.moe, ParallelConfig(), max_tokens=256, dtype=torch.float32, device="cpu")
    engines = []
    for slots in (expert_slots, None):
        model = GPT(MODEL, group, seed=1, expert_device=None if slots is None else torch.device("cpu"))
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
        engines.append(GPTEngine(model, group, expert_slots=slots, expert_prefetch=slots is not None))
    drawn = torch.Generator().manual_seed(7)
    token = torch.randint(256, (1,), generator=drawn)
    found = [engine.prefill(token[:, None], torch.tensor([1]), 30) for engine in engines]
    for step in range(21):
        assert torch.equal(*found), f"step {step}"
        token = torch.randint(256, (1,), generator=drawn)
        found = [engine.decode(token) for engine in engines]
    ids = torch.randint(256, (1, 25), generator=drawn)  # a prompt that streams, and a step behind it
    for engine in engines:
        engine.prefill(ids, torch.tensor([25]), 30)
    torch.testing.assert_close(*[engine.decode(token) for engine in engines], rtol=1e-4, atol=1e-4)
    report = engines[0].cache_report()
    assert report is not None
    assert report.prefetched >= report.prefetched_needed > 0
