"""The routing of drafts as the list of what travels for their verification: kernels, twins, and whole models."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from cache_cases import TABLES, Twins, check_slots, host_of, parts_of, stop_after
from decode_cases import VECTOR, DecodeCase
from ranks import run_ranks
from torch import Tensor
from training_cases import MODEL, awake_model

from comet.config import MoEConfig, SpeculationConfig
from comet.experts import Speculation
from comet.experts.prefetch import prefetch_between
from comet.generation.engine import GPTEngine
from comet.generation.generate import generate
from comet.generation.text import ByteCodec
from comet.jobs.generate import GenerateConfig
from comet.kernels.experts.drafts import count_streamed_torch, plan_draft, plan_draft_torch, settle_torch
from comet.kernels.experts.prefetch import MOST_AHEAD, STOP, plan, plan_torch, take_over_torch, travel, travel_torch
from comet.kernels.experts.tables import (
    AHEAD_WORDS,
    BEGUN,
    CLOCK,
    DRAFT_BEGUN,
    DRAFT_NEEDED,
    GATE,
    HALF,
    HALF_EXPERT,
    HALF_PLACE,
    NEXT,
    PLANNED,
    ROUND,
    THERE1,
    THERE2,
    UNUSED,
    CacheTables,
    HostExperts,
)
from comet.kernels.experts.waves import count_waves

CASE = DecodeCase(name="drafts", T=2, K=4, E=14, D=80, F=48, config=VECTOR, seed=5)
R = 2  # experts of a draft


def words(tables: CacheTables) -> list[int]:
    """What the header says of prefetch, and what it counts."""
    header = tables.header.clone()
    header[[THERE1.value, THERE2.value]] = 0  # of one step, and the kernel's alone
    if not header[HALF.value]:
        header[[HALF_EXPERT.value, HALF_PLACE.value]] = 0
    return [*header[GATE.value : DRAFT_NEEDED.value + 8].tolist(), *tables.totals[[0, 1, 4, 5, 6]].tolist()]


class Pair:
    """A cache that kernels serve, and one that their twins do; both are asked the same."""

    def __init__(self, num_slots: int, policy: str, drawn: random.Random) -> None:
        self.twins, self.drawn, self.kept = Twins.make(CASE, num_slots, policy), drawn, 0
        self.mine, self.twin = self.twins.mine, self.twins.twin
        for cache in (self.mine, self.twin):
            cache.expect_prefetch(drafts=True)

    def travel(self, only: int | None = None) -> None:
        """To a random piece behind those that are there, or ``only`` so far."""
        header = self.mine.tables.header
        most = int(header[PLANNED.value]) * self.mine.host.pieces
        began = min(int(header[NEXT.value]), most)
        travel(self.mine.weights.parts, self.mine.host)
        travel_torch(self.twin.weights.parts, self.twin.host)
        pieces = self.drawn.choice([began, most, self.drawn.randint(began, most), self.drawn.randint(began, most)])
        for cache in (self.mine, self.twin):
            stop_after(pieces if only is None else only, cache)

    def guess(self, ids: Tensor) -> None:
        """What the layer before does in any pass."""
        plan(ids, self.mine.weights.parts, self.mine.host)
        plan_torch(ids, self.twin.host)
        self.travel()

    def step(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.twins.step(tokens, ids, weights)
        self.check()
        self.kept += int(self.mine.tables.header[HALF.value]) > 0

    def list_rest(self, ids: Tensor, only: int | None = None) -> None:
        """What follows a draft; ``only`` so many pieces travel."""
        steps = count_waves(len(ids) * R, CASE.E - 1, self.mine.num_slots)
        plan_draft(ids, steps, self.mine.weights.parts, self.mine.host)
        plan_draft_torch(ids, steps, self.twin.host)
        count = int(self.mine.tables.header[PLANNED.value])
        assert count <= MOST_AHEAD
        assert torch.equal(self.mine.tables.ahead[:, :count], self.twin.tables.ahead[:, :count])
        former = [each for each in self.mine.tables.ahead[2, :count].tolist() if each >= 0]
        since = int(self.mine.tables.header[ROUND.value])
        assert all(self.mine.tables.last_used[each] < since for each in former), "none that the round named"
        self.check()
        for word, value in ((GATE, STOP.value), (CLOCK, int(self.mine.tables.header[CLOCK.value]))):
            following = torch.zeros(32, dtype=torch.int32)
            following[word.value] = value
            before = self.mine.tables.header.clone()
            travel(self.mine.weights.parts, self.mine.host, until=following)
            assert torch.equal(before, self.mine.tables.header), "the next layer has begun its step, or ended it"
        self.travel(only)

    def check(self) -> None:
        for name in (*TABLES, "unused"):  # also where no step has compared them
            assert torch.equal(getattr(self.mine.tables, name), getattr(self.twin.tables, name)), name
        assert words(self.mine.tables) == words(self.twin.tables)
        assert int(self.mine.tables.unused.sum()) == int(self.mine.tables.header[UNUSED.value])
        half, *of = self.mine.tables.header[HALF.value : HALF_PLACE.value + 1].tolist()
        for slot, expert in enumerate(self.mine.tables.owners.tolist()):
            if expert >= 0 and not (half and of == [expert, slot]):
                assert self.mine.tables.slots[expert] == slot
                for slots, stored in zip(parts_of(self.mine.weights), parts_of(self.mine.host), strict=True):
                    assert torch.equal(slots[slot], stored[expert - self.mine.first_expert])


def compare(rank: int, world_size: int, num_slots: int, policy: str, rounds: int) -> None:
    """Random rounds: drafts, with and without guesses before them, verification or a plain step behind them."""
    made, drawn = torch.Generator().manual_seed(CASE.seed), random.Random(CASE.seed + num_slots)
    pair = Pair(num_slots, policy, drawn)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.rand(count, CASE.E, generator=made).argsort(dim=1)[:, : CASE.K].int()
        return torch.rand(count, CASE.D, generator=made), ids, torch.rand(count, CASE.K, generator=made)

    for _ in range(rounds):
        named = []
        for _ in range(drawn.randint(0, 3)):
            tokens, ids, weights = draw(drawn.choice([1, 1, 2]))
            if drawn.random() < 0.4:
                pair.guess(ids[:, :R].contiguous())
            pair.step(tokens, ids[:, :R].contiguous(), weights[:, :R].contiguous())
            pair.list_rest(ids)
            named.append(ids)
        tokens, ids, weights = draw(drawn.choice([1, CASE.T]))
        if named and drawn.random() < 0.8:  # else none of the drafts was any good
            rows = torch.cat(named)[: len(ids)]
            ids[: len(rows)] = rows
        if drawn.random() < 0.5:
            pair.guess(ids)
        pair.step(tokens, ids, weights)
    # A draft in vain: what is half there outlives one step, and no other.
    tokens, ids, weights = draw(1)
    pair.step(tokens, ids[:, :R].contiguous(), weights[:, :R].contiguous())
    pair.list_rest(ids, only=1)
    planned, half = int(pair.mine.tables.header[PLANNED.value]), []
    for _ in range(2):
        pair.step(tokens, ids[:, :R].contiguous(), weights[:, :R].contiguous())
        half.append(int(pair.mine.tables.header[HALF.value]))
    assert half == [1, 0] or not planned, (half, planned)
    assert planned or num_slots < CASE.T * CASE.K
    totals = pair.mine.tables.totals.tolist()
    print(totals, "kept half", pair.kept)
    assert totals[4] >= totals[5] > 0
    assert pair.kept > 0 or num_slots < CASE.T * CASE.K, "waves keep none"


@pytest.mark.parametrize(("num_slots", "policy"), [(9, "score"), (5, "lru")], ids=["slots", "waves"])
def test_rounds_on_kernels_equal_their_twins_and_resident_experts(num_slots: int, policy: str) -> None:
    run_ranks(compare, 1, num_slots, policy, 5, interpret=True)


def take_step(host: HostExperts, *needed: int) -> tuple[int, int]:
    """What a step does to the tables before it looks for misses."""
    now = int(host.tables.header[CLOCK.value]) + 1
    host.tables.last_used[list(needed)] = now
    found = take_over_torch(host, now)
    host.tables.header[CLOCK.value] = now
    return found


@pytest.fixture
def host() -> HostExperts:
    """Slots of the experts 3, 0 and 5, of which 3 was used longest ago and 5 in the last step, the fourth."""
    return host_of((3, 1), (0, 3), (5, 4))


def test_the_example_of_the_docs(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2, 4, 3]]), 1, host)
    assert host.tables.owners.tolist() == [3, -1, 5]
    assert host.tables.header[PLANNED.value] == 1
    assert host.tables.ahead[:, :1].tolist() == [[2], [1], [0]]
    assert host.tables.last_used.tolist() == [3, 0, 4, 4, 4, 4]


def test_a_plan_is_empty_where_the_round_has_named_all_that_is_there(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 0, 3, 1]]), 1, host)
    assert host.tables.header[PLANNED.value] == 0
    assert host.tables.owners.tolist() == [3, 0, 5]
    take_step(host, 5)
    plan_draft_torch(torch.tensor([[5, 2, 4, 1]]), 1, host)  # the same round: 0 and 3 are kept
    assert host.tables.header[PLANNED.value] == 0
    take_step(host, 5)  # verification
    take_step(host, 5)
    plan_draft_torch(torch.tensor([[5, 2, 4, 1]]), 1, host)
    assert host.tables.ahead[:, :2].tolist() == [[2, 4], [0, 1], [3, 0]]


def test_what_a_round_named_is_planned_again_behind_the_next_list() -> None:
    host = host_of((-1, 0), (-1, 0), (5, 4))
    plan_draft_torch(torch.tensor([[5, 4, 3]]), 1, host)
    take_step(host, 5)  # before any piece
    assert host.tables.owners.tolist() == [-1, -1, 5]
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    assert host.tables.header[PLANNED.value] == 2
    assert host.tables.ahead[0, :2].tolist() == [2, 3]


def test_half_an_expert_is_kept_for_the_next_draft_and_goes_on(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    host.tables.header[NEXT.value] = 7
    assert take_step(host, 5) == (-1, 1)
    assert host.tables.owners.tolist() == [2, 0, 5]
    assert host.tables.slots[2] == -1
    plan_draft_torch(torch.tensor([[5, 1]]), 1, host)
    assert host.tables.ahead[:, :2].tolist() == [[2, 1], [0, 1], [-1, 0]]
    assert host.tables.header[NEXT.value] == 7
    host.tables.header[NEXT.value] = 10
    take_step(host, 5, 2)
    assert host.tables.slots[2] == 0
    assert host.tables.slots[0] == 1, "what has not begun gave its slot back"
    assert host.tables.totals[4:7].tolist() == [1, 1, 10 * AHEAD_WORDS]


@pytest.mark.parametrize("what", ["a plain step", "a guess", "a draft of another round", "a miss took its slot"])
def test_half_an_expert_is_dropped_by(what: str, host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    host.tables.header[NEXT.value] = 7
    take_step(host, 5)
    if what == "a miss took its slot":
        host.tables.owners[0], host.tables.slots[4], host.tables.last_used[4] = 4, 0, 5
        plan_draft_torch(torch.tensor([[5, 4]]), 1, host)
        assert host.tables.owners[0] == 4
    elif what == "a guess":
        plan_torch(torch.tensor([[5]]), host)
    elif what == "a draft of another round":
        host.tables.header[CLOCK.value] += 3
        plan_draft_torch(torch.tensor([[5]]), 1, host)
    else:
        take_step(host, 5, 2)
        assert host.tables.slots[2] == -1, "it is fetched as a whole"
    assert host.tables.header[HALF.value] == 0
    assert 2 not in host.tables.owners.tolist()
    assert host.tables.totals[4:7].tolist() == [1, 0, 7 * AHEAD_WORDS]
    assert host.tables.header[DRAFT_BEGUN.value : DRAFT_NEEDED.value + 1].tolist() == [1, 0]


@pytest.mark.parametrize("is_needed", [True, False])
def test_what_came_is_judged_by_the_round_and_counts_for_drafts_alone(is_needed: bool, host: HostExperts) -> None:
    header = host.tables.header
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    host.tables.header[NEXT.value] = 10
    take_step(host, 5)  # the next draft
    plan_draft_torch(torch.tensor([[5]]), 1, host)
    assert header[[DRAFT_BEGUN.value, UNUSED.value]].tolist() == [0, 1]
    take_step(host, 5, *([2] if is_needed else []))  # verification
    take_step(host, 5)
    plan_draft_torch(torch.tensor([[5]]), 1, host)  # the next round
    assert header[[DRAFT_BEGUN.value, DRAFT_NEEDED.value, UNUSED.value, BEGUN.value]].tolist() == [1, is_needed, 0, 0]
    assert host.tables.totals[4:6].tolist() == [1, is_needed]
    assert host.tables.slots[2] == 0


def test_what_lost_its_slot_before_it_was_needed_was_not_worth_its_way(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    host.tables.header[NEXT.value] = 10
    take_step(host, 5)
    host.tables.owners[0], host.tables.slots[2], host.tables.slots[1] = 1, -1, 0
    take_step(host, 5)
    assert host.tables.totals[4:6].tolist() == [1, 0]
    assert host.tables.header[[DRAFT_BEGUN.value, DRAFT_NEEDED.value, UNUSED.value]].tolist() == [1, 0, 0]


def test_a_victim_that_has_not_been_overwritten_is_there_for_the_next_draft(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2, 4]]), 1, host)
    assert host.tables.ahead[2, :2].tolist() == [3, 0]
    host.tables.header[NEXT.value] = 2
    take_step(host, 0, 3)
    assert host.tables.slots[[0, 3]].tolist() == [1, -1], "the slot of 3 has pieces of 2"


def test_drafts_that_are_wrong_rest_and_guesses_do_not(host: HostExperts) -> None:
    host.tables.header[DRAFT_BEGUN.value : DRAFT_NEEDED.value + 1] = torch.tensor([37, 9])
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    assert host.tables.header[PLANNED.value] == 0
    plan_torch(torch.tensor([[2]]), host)
    assert host.tables.header[PLANNED.value] == 1
    take_step(host, 5)
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    assert host.tables.header[PLANNED.value] == 1


def test_a_guess_leaves_a_plan_of_drafts_alone(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2]]), 1, host)
    plan_torch(torch.tensor([[4, 1]]), host)
    assert host.tables.ahead[0, :1].tolist() == [2]
    assert host.tables.header[PLANNED.value] == 1


def test_tokens_that_stream_find_what_came_whole(host: HostExperts) -> None:
    plan_draft_torch(torch.tensor([[5, 2, 4]]), 1, host)
    host.tables.header[NEXT.value] = 13
    assert settle_torch(host) == 1
    assert host.tables.owners.tolist() == [2, -1, 5]
    assert host.tables.header[[PLANNED.value, HALF.value]].tolist() == [0, 0]
    count_streamed_torch(host, torch.tensor([5, 2]))
    assert host.tables.totals[4:7].tolist() == [2, 1, 13 * AHEAD_WORDS]
    assert host.tables.header[[DRAFT_BEGUN.value, DRAFT_NEEDED.value, UNUSED.value]].tolist() == [2, 1, 0]
    host.tables.header[CLOCK.value] += 1
    plan_draft_torch(torch.tensor([[5, 4]]), 1, host)
    assert host.tables.header[ROUND.value] == 5, "tokens that stream are no step, and end a round"


def test_an_expert_that_its_step_completes_is_counted_in_the_bytes_of_the_step_alone(host: HostExperts) -> None:
    plan_torch(torch.tensor([[2, 4]]), host)
    host.tables.header[NEXT.value] = 13
    assert take_step(host, 4) == (4, 2)
    assert host.tables.totals[4:7].tolist() == [2, 1, 10 * AHEAD_WORDS]


EXPERTS = MoEConfig(hidden_size=32, ffn_size=32, num_experts=16, top_k=4)
DRAFTS = SpeculationConfig(speculate="conservative", draft_experts=(R,), draft_tokens=3, tau=0.0)


def engine_of(
    slots: int,
    *,
    prefetch: bool = False,
    drafts: SpeculationConfig = DRAFTS,
    moe: MoEConfig = EXPERTS,
    policy: str = "lru",
) -> GPTEngine:
    config = replace(MODEL, context=160, moe=moe)
    model, group = awake_model(config, in_slots=True, sharpness=1.0)
    return GPTEngine(
        model, group, expert_slots=slots, expert_policy=policy, expert_prefetch=prefetch, speculation=drafts
    )


def rounds_of(engine: GPTEngine, num_sequences: int, rounds: int) -> tuple[list[Tensor], int]:
    """Logits of rounds that draft random tokens and accept some of them, and how many experts verification fetched.

    All sequences are equal.
    """
    drawn, found, fetched = torch.Generator().manual_seed(7), [], 0
    lengths = torch.full((num_sequences,), 2)
    engine.prefill(torch.randint(256, (1, 2), generator=drawn).expand(num_sequences, 2), lengths, 160)
    for _ in range(rounds):
        ids = torch.randint(256, (1, 4), generator=drawn).expand(num_sequences, 4)
        for place in range(3):
            before = engine.cache_report().fetched
            found.append(engine.draft(ids[:, place]))
            if engine._drafts.layers[0].slots is not None:
                assert engine.cache_report().fetched == before, "drafts of cached experts fetch nothing"
        engine.rewind(lengths)
        before = sum(int(cache.tables.totals[1]) for cache in engine.caches)
        found.append(engine.verify(ids))
        fetched += sum(int(cache.tables.totals[1]) for cache in engine.caches) - before
        lengths = lengths + torch.randint(1, 5, (1,), generator=drawn)
        engine.rewind(lengths)
    return found, fetched


@pytest.mark.parametrize("cached_only", [False, True])
def test_verification_misses_less_and_the_numbers_stay(cached_only: bool) -> None:
    drafts = replace(DRAFTS, draft_cached_only=cached_only)
    plain, guessing, listing = (engine_of(11, prefetch=each, drafts=drafts) for each in (False, True, True))
    prefetch_between(guessing.stored, [path.prefetch._predict for path in guessing.stored])  # no drafts
    (expected, most), (found, fewer), (others, fewest) = (rounds_of(each, 1, 12) for each in (plain, guessing, listing))
    print(most, fewer, fewest, listing.cache_report())
    assert fewest < 0.7 * fewer < most
    if not cached_only:  # else drafts take what is there
        for one, two, three in zip(expected, found, others, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)
    report = listing.cache_report()
    assert report is not None
    assert report.prefetched >= report.prefetched_needed > 0
    assert report.prefetch_precision is not None
    assert report.prefetch_precision > 0.5


@pytest.mark.parametrize("policy", ["lru", "score"])
def test_greedy_texts_are_those_without_prefetch(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation.__init__, "__defaults__", (itertools.count().__next__,))  # rounds take equally long
    asked = GenerateConfig(prompts=("a", "b"), max_new_tokens=30, temperature=0.0, speculate="conservative", tau=0.0)
    made = []
    for prefetch in (False, True):
        engine = engine_of(9, prefetch=prefetch, policy=policy)
        made.append(generate(engine, ByteCodec(), [[7, 1, 9, 4], [3]], asked, context=64))
        assert engine.cache_report().fetched > 0
    assert made[0].texts == made[1].texts
    assert made[0].speculation == made[1].speculation
    assert made[0].speculation["drafted"] > made[0].speculation["accepted"] > 0
    assert engine.cache_report().prefetched_needed > 0


def test_verification_that_streams_finds_what_travelled() -> None:
    plain, listing = (engine_of(20, prefetch=each, moe=replace(EXPERTS, num_experts=32)) for each in (False, True))
    assert plain.runner.decode.max_tokens == 16
    (expected, most), (found, fewest) = (rounds_of(each, 5, 4) for each in (plain, listing))  # 20 tokens
    print(most, fewest, listing.cache_report())
    assert fewest < most
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert listing.cache_report().prefetched_needed > 0
    for cache in listing.caches:
        assert cache.tables.header[PLANNED.value] == 0
        check_slots(cache)
