"""Steps that need more experts than a cache has slots: waves over experts, bit for bit as if all were there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import cache_of, compare_waves_over_ranks, resident_weights
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase
from host_cases import compare_steps
from ranks import in_ranks, run_ranks
from tiers import slow_but

from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.kernels.experts.tables import PLANNED, CacheTables, HostExperts
from comet.kernels.experts.waves import count_waves, split_waves, split_waves_torch
from comet.kernels.runtime.activation import Activation

CPU = torch.device("cpu")


def test_the_examples_of_the_docs() -> None:
    assert [count_waves(40, 128, slots) for slots in (12, 40)] == [4, 1]
    assert count_waves(128, 16, 12) == 2, "a rank has no more experts than it serves"
    assert count_waves(0, 16, 12) == 1
    tables = CacheTables.create(5, 2, CPU)
    tables.slots[4] = 0
    host = HostExperts(w1=torch.rand(5, 2, 1), w2=torch.rand(5, 1, 1), tables=tables)
    found = split_waves_torch(torch.tensor([[3, 1], [4, 3]]), host, 2)
    assert found.tolist() == [[[-1, 1], [4, -1]], [[3, -1], [-1, 3]]]


@in_ranks(1, interpret=True)
def test_the_kernel_equals_its_twin(rank: int, world_size: int) -> None:
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


BIASED = dict(biased=True, activation=Activation("clamped_swiglu", limit=0.5))
CASES = [
    DecodeCase(name="vector", T=2, K=3, E=9, D=80, F=48, config=VECTOR, seed=1, **BIASED),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=2, **BIASED),
    DecodeCase(name="by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=3),
    DecodeCase(name="tiles", T=16, K=2, E=20, D=32, F=16, config=replace(MATRIX, tile=8), seed=4),
    DecodeCase(name="mxfp8", T=3, K=2, E=12, D=64, F=32, config=None, seed=5, quantised="mxfp8"),
]


@pytest.mark.parametrize("case", slow_but(["matrix", "vector"], CASES))
def test_steps_in_waves_equal_resident_ones_bit_for_bit(case: DecodeCase) -> None:
    run_ranks(compare_steps, 1, case, case.K + 1, "lru", 5, interpret=True)


def test_what_experts_are_worth_fades_once_a_step() -> None:
    run_ranks(compare_steps, 1, CASES[0], 3, "lfu", 5, interpret=True)


@pytest.mark.parametrize("num_slots", range(3, 14))
def test_twins_in_waves_equal_resident_ones_bit_for_bit(num_slots: int) -> None:
    """From K slots to one for every expert, 1 to 16 tokens, experts given away all the time."""
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


def test_waves_over_ranks() -> None:
    case = DecodeCase(name="ranks", T=4, K=2, E=12, D=32, F=16, config=MATRIX, seed=6)
    run_ranks(compare_waves_over_ranks, 2, case, 2, (4, 1), interpret=True)


@pytest.mark.usefixtures("interpreted")
def test_a_step_of_one_token_is_one_wave() -> None:
    case = DecodeCase(name="fold", T=1, K=2, E=4, D=80, F=48, config=FOLD)
    cache = cache_of(case, 1)
    with pytest.raises(ValueError, match="num_slots=1 of the cache must be at least K=2, for one token"):
        run_kernels(torch.rand(1, 80), torch.tensor([[0, 1]]), torch.rand(1, 2), cache.weights, config=FOLD)
