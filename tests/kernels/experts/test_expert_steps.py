"""Steps from an expert cache: kernels under Triton's interpreter against their twins and resident experts.

What is missing is fetched, in waves where a step needs more experts than there are slots, or computed by the host's
cores; some of it has travelled before its step.
"""

import math
import os
import random
import signal
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
import torch
from cache_cases import (
    CASE,
    CPU,
    PROFILE,
    SLOW_LINK,
    cache_of,
    check_slots,
    compare_waves_over_ranks,
    hosted_cache,
    parts_of,
    resident_weights,
    set_deadline,
)
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor

from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import DecodeWeights
from comet.errors import HostComputeError
from comet.experts.cache import ExpertCache
from comet.experts.host.cores import HostCores
from comet.experts.host.profile import HostProfile
from comet.kernels.decode.blocks import BlockShape, DecodeConfig
from comet.kernels.experts.host import used_longest_ago
from comet.kernels.experts.prefetch import MOST_AHEAD, plan, plan_torch, travel, travel_torch
from comet.kernels.experts.tables import (
    AHEAD_WORDS,
    BEGUN,
    COUNT,
    DONE,
    GATE,
    HOSTED,
    NEEDED,
    NEXT,
    PLANNED,
    READY,
    CacheConstants,
    CacheTables,
    HostExperts,
)
from comet.kernels.experts.waves import count_waves, split_waves, split_waves_torch
from comet.kernels.runtime.activation import Activation
from comet.kernels.runtime.case import meta

BYTES = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=64), down=BlockShape(rows=16, depth=64))
TILES = DecodeConfig(form="matrix", gate_up=BlockShape(rows=32, depth=64), down=BlockShape(rows=32, depth=128))
WIDE = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=512), down=BlockShape(rows=16, depth=512))
BIASED = dict(biased=True, activation=Activation("clamped_swiglu", limit=0.5))
CASES = [
    DecodeCase(name="vector", T=1, K=3, E=9, D=48, F=48, config=VECTOR, seed=1),
    DecodeCase(name="fold", T=1, K=3, E=9, D=48, F=48, config=FOLD, seed=1),
    DecodeCase(name="vector, two tokens", T=2, K=3, E=24, D=48, F=32, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=48, F=32, config=MATRIX, seed=3),
    DecodeCase(name="matrix, by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=4),
]
# Scales of one expert are 12 bytes of w1 and 8 of w2 in block FP8, and more than a block copies at once in MXFP8.
QUANTISED = [
    DecodeCase(name="mxfp8", T=1, K=1, E=4, D=288, F=256, config=WIDE, seed=6, quantised="mxfp8"),
    DecodeCase(name="mxfp8, matrix", T=3, K=2, E=20, D=96, F=64, config=TILES, seed=7, quantised="mxfp8"),
    DecodeCase(name="mxfp4", T=1, K=2, E=9, D=96, F=64, config=BYTES, seed=8, quantised="mxfp4"),
    DecodeCase(name="mxfp4, matrix", T=3, K=2, E=20, D=64, F=96, config=TILES, seed=9, quantised="mxfp4", **BIASED),
    DecodeCase(name="fp8", T=2, K=1, E=9, D=48, F=144, config=BYTES, seed=10, quantised="fp8"),
    DecodeCase(name="fp8, matrix", T=3, K=2, E=20, D=144, F=48, config=TILES, seed=11, quantised="fp8"),
    DecodeCase(name="fold with biases", T=1, K=3, E=9, D=64, F=96, config=FOLD, seed=12, **BIASED),
]
IN_WAVES = [
    DecodeCase(name="vector", T=2, K=3, E=9, D=48, F=48, config=VECTOR, seed=1, **BIASED),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=48, F=32, config=MATRIX, seed=2, **BIASED),
    DecodeCase(name="by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=3),
    DecodeCase(name="tiles", T=16, K=2, E=20, D=32, F=16, config=replace(MATRIX, tile=8), seed=4),
    DecodeCase(name="mxfp8", T=3, K=2, E=12, D=64, F=32, config=None, seed=5, quantised="mxfp8"),
]
ON_HOST = [
    DecodeCase(name=kind, T=3, K=2, E=12, D=160, F=32, config=TILES, seed=6, quantised=kind)
    for kind in ("fp8", "mxfp8", "mxfp4")
]


@dataclass(frozen=True)
class Twins:
    """A cache that kernels serve, one that their twins do, and all experts; the same is asked of the three.

    Both caches ask the same ``cores`` of the host in turn, if there are any.
    """

    case: DecodeCase
    mine: ExpertCache
    twin: ExpertCache
    everything: DecodeWeights
    cores: HostCores | None

    @classmethod
    def make(cls, case: DecodeCase, num_slots: int, first: int, profile: HostProfile | None) -> Self:
        """Empty caches of the experts from ``first`` on."""
        print("seed", case.seed)
        held = (first, case.E)
        mine, twin, cores = (*(cache_of(case, num_slots, held) for _ in range(2)), None)
        if profile is not None:
            mine, cores = hosted_cache(case, num_slots, profile, first)
            twin.share_with(cores, 0)
        return cls(case, mine, twin, resident_weights(case, held), cores)

    def draw(self, made: torch.Generator, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, ids, some of them -1, and weights of a step."""
        case = self.case
        tokens, weights = (torch.rand(num_tokens, size, generator=made) for size in (case.D, case.K))
        return tokens, torch.randint(-1, case.E, (num_tokens, case.K), generator=made, dtype=torch.int32), weights

    def step(self, *given: Tensor) -> None:
        """The output of all experts, with its bits unless the host computes some; equal tables; slots as stored."""
        output = run_kernels(*given, self.mine.weights, config=self.case.config)
        of_twin = warp_decode_torch(*given, self.twin.weights)
        wanted = run_kernels(*given, self.everything, config=self.case.config)
        assert self.cores is not None or torch.equal(output, wanted)
        for found in (output, of_twin):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        mine, twin = self.mine.tables, self.twin.tables
        for name in ("slots", "arriving", "last_used", "owners"):
            assert torch.equal(getattr(mine, name), getattr(twin, name)), name
        for word in (COUNT, HOSTED, GATE, PLANNED, BEGUN, NEEDED):
            assert mine.header[word.value] == twin.header[word.value]
        assert torch.equal(mine.totals[[0, 1, 4, 5, 6]], twin.totals[[0, 1, 4, 5, 6]])
        check_slots(self.mine)

    def close(self) -> None:
        """Once the host has computed what the tables say, if it was to."""
        assert not self.mine.tables.header[[READY.value, DONE.value]].any(), "a step finds its flags as the first did"
        if self.cores is not None:
            assert self.cores.counts[0] == 2 * self.mine.tables.totals[7] > 0
            self.cores.check()
            self.cores.close()


def steps(case: DecodeCase, *, slots: int | None = None, host: HostProfile | None = None, quick: bool) -> Any:
    """A case of the test, with slots for all that a step may need unless the caller says how many."""
    num_slots = slots or min(case.T * case.K, case.E)
    words = [case.name, f"{num_slots} slots", *["host"] * (host is not None)]
    return pytest.param(case, num_slots, host, id=", ".join(words), marks=[] if quick else pytest.mark.slow)


STEPS = [
    *(steps(case, quick=case.name in ("vector", "matrix")) for case in CASES),
    *(steps(case, quick=case.name not in ("mxfp8, matrix", "fp8, matrix")) for case in QUANTISED),
    *(steps(case, slots=case.K + 1, quick=case.name == "matrix") for case in IN_WAVES[1:]),
    steps(IN_WAVES[0], slots=4, quick=True),
    steps(IN_WAVES[0], slots=1, quick=True),
    steps(CASES[2], slots=4, host=SLOW_LINK, quick=False),
    *(steps(case, host=PROFILE, quick=case.name == "fold") for case in CASES),
    *(steps(case, host=PROFILE, quick=False) for case in ON_HOST),
]


@pytest.mark.parametrize(("case", "num_slots", "profile"), STEPS)
@in_ranks(1, interpret=True)
def test_kernels_equal_their_twins(
    rank: int, world_size: int, case: DecodeCase, num_slots: int, profile: HostProfile | None
) -> None:
    """Each missing expert is fetched once or, in a step of one wave, computed by the host's cores."""
    twins = Twins.make(case, num_slots, int(num_slots < case.E), profile)
    made, first, cores = torch.Generator().manual_seed(case.seed), twins.mine.first_expert, twins.cores
    tables = twins.mine.tables
    for step in range(4):
        one_wave = step % 2 and num_slots >= case.K  # in between
        tokens, ids, weights = twins.draw(made, 1 if one_wave else case.T)
        needed = {expert for expert in ids.flatten().tolist() if expert >= first}
        missing, before = [expert for expert in needed if tables.slots[expert] < 0], tables.totals.clone()
        twins.step(tokens, ids, weights)
        in_waves = count_waves(ids.numel(), case.E - first, num_slots) > 1
        hosted = 0 if cores is None or in_waves else int(cores.mail.share[len(tokens), len(missing)])
        assert (tables.totals - before)[[0, 1, 7]].tolist() == [len(needed), len(missing) - hosted, hosted]
        count = int(tables.header[COUNT.value])
        assert torch.equal(tables.header, twins.twin.tables.header)
        assert torch.equal(tables.copies[:, :count], twins.twin.tables.copies[:, :count])
        if not in_waves:
            assert (tables.copies[1, count - hosted : count] == -1).all()
    assert tables.totals[1] > 0
    assert not (tables.arriving == -2).any()
    twins.close()


def test_the_expert_used_longest_ago_loses_its_slot() -> None:
    """Expert 0 comes twice, expert 2 once; then expert 3 needs one of their two slots."""
    case = DecodeCase(name="one", T=1, K=1, E=4, D=16, F=16, config=VECTOR, seed=5)
    for experts, kept in {(0, 0, 2, 3): {2, 3}, (2, 0, 0, 3): {0, 3}}.items():
        cache = cache_of(case, 2)
        for expert in experts:
            warp_decode_torch(torch.rand(1, 16), torch.tensor([[expert]]), torch.ones(1, 1), cache.weights)
        assert set(cache.tables.owners.tolist()) == kept


def constants_of(num_experts: int, num_slots: int, num_bytes: list[int], *launch: int) -> CacheConstants:
    """Constants of experts whose parts have so many bytes."""
    parts = [meta(num_experts, each, dtype=torch.uint8) for each in num_bytes]
    tables = CacheTables.create(num_experts, num_slots, parts[0].device)
    named = dict(zip(("w1", "w2", "w1_scales", "w2_scales"), parts, strict=False))
    return HostExperts(**named, tables=tables).constants(*launch)


def test_words_of_scales() -> None:
    """Scales of an expert have words of 8 bytes, or of 4 bytes for an odd number of float32."""
    found = constants_of(4, 2, [288 * 48, 48 * 144, 12, 8], 2, 1)
    assert (found.words1, found.words2, found.scales1, found.scales2) == (1728, 864, 3, 1)
    assert found.lines_shared, "12 bytes"
    found = constants_of(128, 32, [2 * 768 * 2048, 768 * 2048, 98304, 49152], 8, 4)
    assert (found.scales1, found.scales2, found.lines_shared) == (12288, 6144, False)
    assert constants_of(4, 2, [64, 32], 2, 1)[5:8] == (0, 0, False)


# ---- waves -----------------------------------------------------------------------------------------------------------


def test_the_examples_of_waves() -> None:
    assert [count_waves(40, 128, slots) for slots in (12, 40)] == [4, 1]
    assert count_waves(128, 16, 12) == 2, "a rank has no more experts than it serves"
    assert count_waves(0, 16, 12) == 1


@in_ranks(1, interpret=True)
def test_waves_equal_their_twin(rank: int, world_size: int) -> None:
    made = torch.Generator().manual_seed(5)
    for num_tokens, top_k, num_experts, num_slots in ((2, 3, 20, 4), (7, 2, 9, 2), (16, 4, 40, 5), (3, 2, 5, 2)):
        tables = CacheTables.create(num_experts, num_slots, CPU, (1, num_experts - 1))
        held = torch.randperm(num_experts - 2, generator=made)[:num_slots] + 1
        tables.slots[held] = torch.arange(num_slots, dtype=torch.int32)
        tables.slots[tables.ahead.fill_(int(held[0]))[0, :1].long()] = -1
        tables.header[PLANNED.value] = 1
        num_waves = count_waves(num_tokens * top_k, num_experts - 2, num_slots)
        host = HostExperts(w1=torch.rand(num_experts - 2, 2, 1), w2=torch.rand(num_experts - 2, 1, 1), tables=tables)
        for dtype in (torch.int32, torch.int64):
            ids = torch.randint(-1, num_experts + 2, (num_tokens, top_k), generator=made).to(dtype)
            found = split_waves(ids, host, num_waves)[:, : ids.numel()].view(num_waves, num_tokens, top_k)
            assert torch.equal(found, split_waves_torch(ids, host, num_waves).int())
            assert all(len(set(wave.flatten().tolist()) - {-1}) <= num_slots for wave in found)
            served = (ids > 0) & (ids < num_experts - 1)
            assert torch.equal(found.amax(0), ids.where(served, -1).int()), "each routed row in one wave"
            assert torch.equal((found >= 0).sum(0), served.long())


@pytest.mark.parametrize("num_slots", range(3, 14))
def test_twins_in_waves_equal_resident_ones_bit_for_bit(num_slots: int) -> None:
    """K slots up to one for every expert, 1 to 16 tokens; experts lose their slots all the time."""
    print("seed", num_slots)
    case = DecodeCase(name="any", T=0, K=3, E=13, D=32, F=16, seed=num_slots)
    made = torch.Generator().manual_seed(num_slots)
    cache, everything = cache_of(case, num_slots), resident_weights(case)
    for num_tokens in torch.randint(1, 17, (40,), generator=made).tolist():
        ids = torch.rand(num_tokens, case.E + 1, generator=made).argsort(dim=1)[:, : case.K] - 1
        tokens, weights = (torch.rand(num_tokens, size, generator=made) for size in (case.D, case.K))
        missing = {expert for expert in set(ids.flatten().tolist()) - {-1} if cache.tables.slots[expert] < 0}
        before = int(cache.tables.totals[1])
        found = warp_decode_torch(tokens, ids, weights, cache.weights)
        assert torch.equal(found, warp_decode_torch(tokens, ids, weights, everything))
        assert int(cache.tables.totals[1]) - before == len(missing)
    assert (int(cache.tables.totals[1]) > case.E) == (num_slots < case.E), "experts that were given away came back"


@pytest.mark.parametrize("replicated", [True, False], ids=["replicated", "own tokens"])
def test_waves_over_ranks(replicated: bool) -> None:
    case = DecodeCase(name="ranks", T=4 if replicated else 2, K=2, E=12, D=32, F=16, config=MATRIX, seed=6)
    counts = (4, 1) if replicated else (2, 1)
    run_ranks(compare_waves_over_ranks, 2, case, 2, counts, replicated, interpret=True)


@pytest.mark.usefixtures("interpreted")
def test_a_step_of_one_token_is_one_wave() -> None:
    cache = cache_of(DecodeCase(name="fold", T=1, K=2, E=4, D=80, F=48, config=FOLD), 1)
    with pytest.raises(ValueError, match="num_slots=1 must be at least 2: K of one token"):
        run_kernels(torch.rand(1, 80), torch.tensor([[0, 1]]), torch.rand(1, 2), cache.weights, config=FOLD)


# ---- experts that travel before their step ---------------------------------------------------------------------------


def stop_after(pieces: int, cache: ExpertCache) -> None:
    """Pretend that so many pieces have come: other numbers follow them, and slots without a piece are as before."""
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


def compare_guessed(rank: int, world_size: int, case: DecodeCase, num_slots: int, profile: HostProfile | None) -> None:
    """Guess and stop at random before each step; the host computes, if at all, experts that do not travel."""
    twins = Twins.make(case, num_slots, 1, profile)
    made, drawn = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    mine, twin, completed = twins.mine, twins.twin, 0
    for cache in (mine, twin):
        cache.expect_prefetch()
    for _ in range(12):
        tokens, ids, weights = twins.draw(made, case.T)
        guessed = ids.where(torch.rand(ids.shape, generator=made) < 0.7, (ids + 1) % case.E)
        plan(guessed, mine.weights.parts, mine.host)
        plan_torch(guessed, twin.host)
        travel(mine.weights.parts, mine.host)
        travel_torch(twin.weights.parts, twin.host)
        count = int(mine.tables.header[PLANNED.value])
        assert torch.equal(mine.tables.ahead[:, :count], twin.tables.ahead[:, :count])
        assert count <= MOST_AHEAD
        most = count * mine.host.pieces
        pieces = drawn.choice([0, most, *(drawn.randint(0, most) for _ in range(4))])
        for cache in (mine, twin):
            stop_after(pieces, cache)
        twins.step(tokens, ids, weights)
        hosted = int(mine.tables.header[HOSTED.value])
        completed += pieces % mine.host.pieces > 0 and int(mine.tables.header[COUNT.value]) > hosted > 0
    assert mine.tables.totals[5] > 0
    assert twins.cores is None or completed > 0
    twins.close()


@pytest.mark.parametrize("case", [CASES[0], *(slow(case) for case in CASES[1:4])])
def test_guesses_equal_their_twins_whenever_the_step_begins(case: DecodeCase) -> None:
    run_ranks(compare_guessed, 1, case, case.T * case.K + 1, None, interpret=True)


@pytest.mark.parametrize(
    ("case", "num_slots", "profile"), [slow(replace(CASES[3], T=3), 4, None), slow(CASES[0], 4, SLOW_LINK)]
)
def test_waves_and_the_host_leave_alone_what_travelled(
    case: DecodeCase, num_slots: int, profile: HostProfile | None
) -> None:
    run_ranks(compare_guessed, 1, case, num_slots, profile, interpret=True)


def test_a_predictor_that_is_wrong_rests() -> None:
    cache = cache_of(DecodeCase(name="guessed", T=1, K=1, E=6, D=32, F=16), 3)
    cache.expect_prefetch()
    header = cache.tables.header
    header[BEGUN.value], header[NEEDED.value] = 40, 9
    for _ in range(4):  # 36 is no more than four times 9
        plan_torch(torch.tensor([[1]]), cache.host)
        assert not header[PLANNED.value]
    plan_torch(torch.tensor([[1]]), cache.host)
    assert header[PLANNED.value] == 1


# ---- the host's cores ------------------------------------------------------------------------------------------------


def test_those_used_longest_ago_go_to_the_host() -> None:
    assert used_longest_ago([1, 4, 6], torch.tensor([9, 3, 9, 9, 1, 9, 1]), 2) == [4, 6]
    assert used_longest_ago([1, 4, 6], torch.tensor([9, 3, 9, 9, 1, 9, 1]), 1) == [4]


@in_ranks(1, interpret=True)
def test_kernels_end_by_the_deadline(rank: int, world_size: int) -> None:
    cache, cores = hosted_cache(CASE, CASE.K, SLOW_LINK)
    os.kill(cores.process.pid, signal.SIGSTOP)
    set_deadline(cache, cores, 10**7)
    ids, tokens, weights = torch.arange(CASE.K, dtype=torch.int32)[None], torch.ones(1, CASE.D), torch.ones(1, CASE.K)
    assert run_kernels(tokens, ids, weights, cache.weights, config=CASE.config).isnan().all()
    with pytest.raises(HostComputeError, match=r"within 0\.0 s"):
        cores.check()
    cache.tables.slots.fill_(-1)
    run_kernels(tokens, ids, weights, cache.weights, config=CASE.config)
    assert cache.tables.header[HOSTED.value] == 0, "the host is asked no more"
    os.kill(cores.process.pid, signal.SIGCONT)
    cores.close()
