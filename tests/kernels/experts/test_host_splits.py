"""Missing experts that kernels leave to the host's cores: tables, splits and sums of kernels and of their twins."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace

import pytest
import torch
from cache_cases import stop_after
from decode_cases import DecodeCase
from host_cases import (
    CASE,
    CASES,
    PROFILE,
    SLOW_LINK,
    compare_steps,
    hosted_cache,
    hosted_twins,
    set_deadline,
)
from ranks import in_ranks, run_ranks

from comet.decode.local import run_kernels
from comet.errors import HostComputeError
from comet.kernels.experts.prefetch import plan_torch, travel_torch
from comet.kernels.experts.tables import COUNT, HOSTED, NEXT, POLICIES


def test_steps_in_waves_fetch_all_that_they_miss() -> None:
    run_ranks(compare_steps, 1, CASES[2], CASES[2].K + 1, "lfu", 6, SLOW_LINK, interpret=True)


def compare_with_prefetch(rank: int, world_size: int, case: DecodeCase) -> None:
    """What came before its step half or whole is fetched as ever; the host computes others."""
    made, drawn = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    twins, cores = hosted_twins(case, case.T * case.K + 1, SLOW_LINK)
    mine, twin = twins.mine, twins.twin
    for cache in (mine, twin):
        cache.expect_prefetch()
    taken = asked = 0
    for _ in range(8):
        tokens, _, weights = twins.draw(made)
        ids = torch.randint(case.E, weights.shape, generator=made, dtype=torch.int32)
        for cache in (mine, twin):
            plan_torch(ids, cache.host)
            travel_torch(cache.weights.parts, cache.host)
        pieces = drawn.randint(0, int(mine.tables.header[NEXT.value]))
        for cache in (mine, twin):
            stop_after(pieces, cache)
        twins.step(tokens, ids, weights, hosted=True)
        assert mine.tables.header[HOSTED.value] == twin.tables.header[HOSTED.value]
        count, hosted = (int(mine.tables.header[word.value]) for word in (COUNT, HOSTED))
        asked += hosted
        taken += count > hosted > 0 and pieces % mine.host.pieces > 0
    assert taken > 0
    assert cores.counts[0] == 2 * asked > 0
    cores.close()


def test_experts_on_their_way_are_fetched_and_others_computed() -> None:
    run_ranks(compare_with_prefetch, 1, CASE, interpret=True)


@in_ranks(1, interpret=True)
def test_kernels_end_by_the_deadline(rank: int, world_size: int) -> None:
    cache, cores = hosted_cache(CASE, CASE.K, SLOW_LINK)
    os.kill(cores.process.pid, signal.SIGSTOP)
    set_deadline(cache, cores, 10**8)
    ids, tokens, weights = torch.arange(CASE.K, dtype=torch.int32)[None], torch.ones(1, CASE.D), torch.ones(1, CASE.K)
    assert run_kernels(tokens, ids, weights, cache.weights, config=CASE.config).isnan().all()
    with pytest.raises(HostComputeError, match=r"within 0\.1 s"):
        cores.check()
    cache.tables.slots.fill_(-1)
    run_kernels(tokens, ids, weights, cache.weights, config=CASE.config)
    assert cache.tables.header[HOSTED.value] == 0, "the host is asked no more"
    os.kill(cores.process.pid, signal.SIGCONT)
    cores.close()


QUICK = {("fold", "lfu"), ("matrix", "lru")}
SPLITS = [
    pytest.param(
        case, policy, id=f"{case.name}-{policy}", marks=[] if (case.name, policy) in QUICK else pytest.mark.slow
    )
    for case in CASES
    for policy in POLICIES
]


SPLITS += [
    pytest.param(replace(case, quantised=kind), "lru", id=kind, marks=[] if kind == "fp8" else pytest.mark.slow)
    for kind in ("fp8", "mxfp8", "mxfp4")
    for case in [DecodeCase(name=kind, T=3, K=2, E=12, D=160, F=32, config=None, seed=6)]
]


@pytest.mark.parametrize(("case", "policy"), SPLITS)
def test_kernels_split_misses_as_their_twins_do(case: DecodeCase, policy: str) -> None:
    run_ranks(compare_steps, 1, case, min(case.T * case.K, case.E), policy, 6, PROFILE, interpret=True)
