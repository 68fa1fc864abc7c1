"""The expert cache on a GPU: kernels against their twins, and steps replayed from a graph against resident experts."""

from __future__ import annotations

import pytest
import torch

from comet.decode.runners import Decoder
from comet.decode.weights import DecodeWeights
from comet.experts import CachedExperts, ExpertCache
from comet.kernels.expert_cache import CacheTables, lookup, lookup_torch

pytestmark = pytest.mark.gpu
E, K, D, F = 48, 4, 512, 208


@pytest.mark.parametrize("num_slots", [K, 11, E])
def test_lookups_equal_the_twin(num_slots: int) -> None:
    made = torch.Generator().manual_seed(num_slots)
    mine, twin = (CacheTables.create(E, num_slots, torch.device(device)) for device in ("cuda", "cpu"))
    for step in range(200):
        count = int(torch.randint(1, num_slots + 1, (1,), generator=made))
        ids = torch.randint(-1, E + 1, (1, count), generator=made, dtype=torch.int32)
        lookup(ids.cuda(), mine)
        lookup_torch(ids, twin)
        for name in ("slots", "owners", "last_used", "clock", "counts"):
            assert torch.equal(getattr(mine, name).cpu(), getattr(twin, name)), f"{name}, step {step}"
        copies = int(twin.counts[0])
        assert torch.equal(mine.copies[:, :copies].cpu(), twin.copies[:, :copies])


@pytest.mark.parametrize("num_slots", [K, 13, E])
def test_replayed_steps_equal_resident_experts_bit_for_bit(num_slots: int) -> None:
    made = torch.Generator().manual_seed(5)
    w1, w2 = (torch.randn(*sizes, generator=made).bfloat16() for sizes in ((E, 2 * F, D), (E, D, F)))
    resident = DecodeWeights(w1=w1.cuda(), w2=w2.cuda(), slots=torch.arange(E, dtype=torch.int32, device="cuda"))
    decode = Decoder(K, 1)
    cached = CachedExperts(ExpertCache(w1, w2, num_slots, torch.device("cuda")), decode, K)
    tokens = torch.randn(1, D, generator=made).bfloat16().cuda()
    ids, weights = torch.zeros(1, K, dtype=torch.int32, device="cuda"), torch.rand(1, K, generator=made).cuda()
    for _ in range(2):
        cached(tokens, ids, weights, w1, w2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cached(tokens, ids, weights, w1, w2)
    for step in range(100):
        ids.copy_(torch.randperm(E, generator=made)[:K].int()[None])
        tokens.copy_(torch.randn(1, D, generator=made).bfloat16())
        graph.replay()
        assert torch.equal(out, decode(tokens, ids, weights, resident)), f"step {step}"
    assert int(cached.cache.tables.counts[1]) >= 100 * K
