"""Missing experts computed on the host's cores, by the real process: kernels against twins, engines, faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import MATRIX, VECTOR, DecodeCase
from ranks import run_ranks
from tiers import slow, slow_but

from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.experts import ExpertCache
from comet.experts.host_cores import HostCores
from comet.experts.host_profile import HostProfile, HostSizes
from comet.experts.store import HeldExperts

CPU = torch.device("cpu")
TABLES = ("slots", "arriving", "last_used", "owners")
# Of 1 to 8 missing experts the host computes 0, 1, 1, 1, 2, 2, 3 and 3; of one alone, too, where the link is slow.
PROFILE = HostProfile(link_ns=200, request_ns=20, expert_ns=290, full_request_ns=20, full_expert_ns=290)
SLOW_LINK = replace(PROFILE, link_ns=1000)
DEADLINE_S = 60.0  # for answers that come

CASES = [
    DecodeCase(name="vector", T=1, K=3, E=9, D=80, F=48, config=VECTOR, seed=1),
    DecodeCase(name="fold", T=1, K=3, E=9, D=80, F=48, config=replace(VECTOR, fold=True), seed=1),
    DecodeCase(name="vector, two tokens", T=2, K=3, E=24, D=64, F=32, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=3),
    DecodeCase(name="matrix, by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=4),
]


def hosted_cache(
    case: DecodeCase, num_slots: int, policy: str, held: tuple[int, int], profile: HostProfile
) -> ExpertCache:
    """An empty cache of some experts of the case's model, which shares them with the host's cores."""
    made = torch.Generator().manual_seed(case.seed)
    first, end = held
    shapes = (2 * case.F, case.D), (case.D, case.F)
    w1, w2 = (torch.randn(case.E, *shape, generator=made)[first:end] / 8 for shape in shapes)
    sizes = HostSizes(
        num_experts=case.E, first_expert=first, hidden_size=case.D, top_k=case.K, max_tokens=case.T, dtype=torch.float32
    )
    cores = HostCores(1, sizes, CPU, DEADLINE_S)
    parts = HeldExperts.fill(HeldExperts(w1, w2, readable=True), torch.float32, CPU, cores.file).parts
    cache = ExpertCache(**parts, num_slots=num_slots, device=CPU, policy=policy, num_experts=case.E, first_expert=first)
    cores.start([cache.host], profile)
    cache.share_with(cores)
    return cache


def compare_steps(rank: int, world_size: int, case: DecodeCase, policy: str) -> None:
    """Random steps by kernels and by twins: equal tables, equal splits, and the outputs of resident experts."""
    print("seed", case.seed)
    made = torch.Generator().manual_seed(case.seed)
    slots = min(case.T * case.K, case.E)
    held = (1, case.E) if slots < case.E else (0, case.E)
    mine, twin = (hosted_cache(case, slots, policy, held, PROFILE) for _ in range(2))
    resident = ExpertCache(mine.host.w1, mine.host.w2, case.E, CPU, num_experts=case.E, first_expert=held[0])
    hosted = 0
    for _ in range(8):
        tokens, weights = (torch.rand(case.T, size, generator=made) for size in (case.D, case.K))
        ids = torch.randint(-1, case.E, (case.T, case.K), generator=made, dtype=torch.int32)
        output = run_kernels(tokens, ids, weights, mine.weights, config=case.config)
        expected = warp_decode_torch(tokens, ids, weights, resident.weights)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            warp_decode_torch(tokens, ids, weights, twin.weights), expected, rtol=1e-4, atol=1e-4
        )
        for name in TABLES:
            assert torch.equal(getattr(mine.tables, name), getattr(twin.tables, name)), name
        assert torch.equal(mine.tables.totals[:2], twin.tables.totals[:2])
        assert torch.equal(mine.tables.header, twin.tables.header)
        count, num_hosted = int(mine.tables.header[0]), int(mine.tables.header[6])
        assert num_hosted == mine.cores.mail.share[case.T, count]
        assert torch.equal(mine.tables.copies[:, :count], twin.tables.copies[:, :count])
        assert (mine.tables.copies[1, count - num_hosted : count] == -1).all()
        hosted += num_hosted
    for cache in (mine, twin):
        assert cache.cores.counts[0] == hosted > 0
        cache.cores.check()
        cache.cores.close()


@pytest.mark.parametrize("policy", ["lru", slow("lfu"), "score"])
@pytest.mark.parametrize("case", slow_but(["vector", "fold", "matrix"], CASES))
def test_kernels_split_misses_as_their_twins_do(case: DecodeCase, policy: str) -> None:
    run_ranks(compare_steps, 1, case, policy, interpret=True)
