"""The expert cache on a GPU: steps of kernels against twins and against resident experts, launched and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_cases import QUANTISERS
from torch import Tensor

from comet.decode.runners import LocalRunner
from comet.decode.weights import DecodeWeights
from comet.experts import CachedExperts, ExpertCache
from comet.kernels.experts.cache import bring_torch
from comet.kernels.experts.tables import POLICIES, CacheTables, HostExperts
from comet.kernels.experts.waves import count_waves, split_waves, split_waves_torch

pytestmark = pytest.mark.gpu
E, K, D, F = 48, 4, 512, 208
CUDA = torch.device("cuda")


def weights_of(made: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(E, 2 * F, D, generator=made).bfloat16(), torch.randn(E, D, F, generator=made).bfloat16()


def quantised_parts(kind: str, made: torch.Generator, ffn_size: int) -> dict[str, Tensor]:
    """Elements and scales of w1 and w2, on the CPU."""
    parts = {}
    for name, size in (("w1", (2 * ffn_size, D)), ("w2", (D, ffn_size))):
        packed = QUANTISERS[kind](torch.randn(E, *size, generator=made))
        parts |= {name: packed.elements, f"{name}_scales": packed.scales}
    return parts


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a graph, and where its output is."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()


# Where F is 208, an expert has 16 and 8 scales of block FP8, which share lines with those of other slots.
@pytest.mark.parametrize(("kind", "ffn_size"), [("mxfp8", 192), ("mxfp4", 192), ("fp8", 208), ("fp8", 256)])
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 9), (5, 20), (11, E)])
def test_steps_of_quantised_experts_equal_resident_ones(
    kind: str, ffn_size: int, num_tokens: int, num_slots: int
) -> None:
    print("seed", num_slots)
    made = torch.Generator().manual_seed(num_slots)
    parts = quantised_parts(kind, made, ffn_size)
    cache = ExpertCache(**parts, num_slots=num_slots, device=CUDA)
    resident = DecodeWeights(
        **{name: part.cuda() for name, part in parts.items()}, slots=torch.arange(E, dtype=torch.int32, device=CUDA)
    )
    decode = LocalRunner(K, num_tokens).decode
    for step in range(200):
        ids = torch.stack([torch.randperm(E + 1, generator=made)[:K] - 1 for _ in range(num_tokens)]).int().cuda()
        weights = torch.rand(ids.shape, generator=made).cuda()
        tokens = torch.randn(num_tokens, D, generator=made).bfloat16().cuda()
        output = decode(tokens, ids, weights, cache.weights)
        assert torch.equal(output, decode(tokens, ids, weights, resident)), f"step {step}"
    slots = cache.tables.slots.tolist()
    for expert in (expert for expert in range(E) if slots[expert] >= 0):
        for name, part in parts.items():
            there = getattr(cache.weights, name)[slots[expert]].cpu()
            assert torch.equal(there.view(torch.uint8), part[expert].view(torch.uint8)), f"{name} of {expert}"
    assert int(cache.tables.totals[1]) >= num_slots


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (1, E), (2, 9), (5, 20), (11, E)])
def test_steps_equal_twin_and_resident_experts(num_tokens: int, num_slots: int, policy: str) -> None:
    made = torch.Generator().manual_seed(num_slots)
    w1, w2 = weights_of(made)
    cache = ExpertCache(w1, w2, num_slots, CUDA, policy=policy)
    twin = CacheTables.create(E, num_slots, torch.device("cpu"))
    twin_host = replace(cache.host, tables=twin)
    twin_w1, twin_w2 = w1.new_zeros(num_slots, 2 * F, D), w2.new_zeros(num_slots, D, F)
    resident = DecodeWeights(w1=w1.cuda(), w2=w2.cuda(), slots=torch.arange(E, dtype=torch.int32, device=CUDA))
    decode = LocalRunner(K, num_tokens).decode
    for step in range(100):
        ids = torch.stack([torch.randperm(E + 1, generator=made)[:K] - 1 for _ in range(num_tokens)]).int()
        weights = torch.randint(1, 9, ids.shape, generator=made) / 8  # sums that are exact in any order
        tokens = torch.randn(num_tokens, D, generator=made).bfloat16().cuda()
        output = decode(tokens, ids.cuda(), weights.cuda(), cache.weights)
        assert torch.equal(output, decode(tokens, ids.cuda(), weights.cuda(), resident)), f"step {step}"
        bring_torch(ids, weights, twin_w1, twin_w2, twin_host)
        assert torch.equal(cache.tables.last_used.cpu(), twin.last_used), f"step {step}"
        if policy == "lru":  # scores fade by products that round differently
            for name in ("slots", "arriving", "owners"):
                assert torch.equal(getattr(cache.tables, name).cpu(), getattr(twin, name)), f"{name}, step {step}"
            assert torch.equal(cache.tables.totals[:2].cpu(), twin.totals[:2])
    slots = cache.tables.slots.tolist()
    for expert in (expert for expert in range(E) if slots[expert] >= 0):
        assert torch.equal(cache.weights.w1[slots[expert]].cpu(), w1[expert])
        assert torch.equal(cache.weights.w2[slots[expert]].cpu(), w2[expert])
    assert int(cache.tables.totals[2]) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(2, K), (5, 7), (5, 19), (16, K), (16, 30)])
def test_replayed_steps_in_waves_equal_resident_experts_bit_for_bit(
    num_tokens: int, num_slots: int, policy: str
) -> None:
    print("seed", num_slots)
    made = torch.Generator().manual_seed(num_slots)
    w1, w2 = weights_of(made)
    resident = DecodeWeights(w1=w1.cuda(), w2=w2.cuda(), slots=torch.arange(E, dtype=torch.int32, device=CUDA))
    runner = LocalRunner(K, num_tokens)
    cached = CachedExperts(ExpertCache(w1, w2, num_slots, CUDA, policy=policy), runner, K)
    tables = cached.cache.tables
    assert count_waves(num_tokens * K, E, num_slots) > 1
    tokens = torch.randn(num_tokens, D, generator=made).bfloat16().cuda()
    ids = torch.zeros(num_tokens, K, dtype=torch.int32, device=CUDA)
    weights = torch.rand(num_tokens, K, generator=made).cuda()
    graph, out = captured(lambda: cached(tokens, ids, weights, w1, w2))
    for step in range(100):
        num_used = (K, 12, E)[step % 3]  # one wave, some, all
        ids.copy_(torch.stack([torch.randperm(num_used, generator=made)[:K] for _ in range(num_tokens)]).int())
        tokens.copy_(torch.randn(num_tokens, D, generator=made).bfloat16())
        needed = ids.unique().long()
        missing, before = int((tables.slots[needed] < 0).sum()), tables.totals[:2].clone()
        graph.replay()
        assert torch.equal(out, runner.decode(tokens, ids, weights, resident)), f"step {step}"
        assert (tables.totals[:2] - before).tolist() == [len(needed), missing], f"step {step}"


@pytest.mark.parametrize(("num_tokens", "num_waves"), [(2, 2), (16, 11)])
def test_waves_equal_their_twin(num_tokens: int, num_waves: int) -> None:
    made = torch.Generator().manual_seed(num_tokens)
    tables = CacheTables.create(E, 5, torch.device("cpu"), (3, E - 2))
    tables.slots[torch.randperm(E - 5, generator=made)[:5] + 3] = torch.arange(5, dtype=torch.int32)
    ids = torch.randint(-1, E, (num_tokens, K), generator=made, dtype=torch.int32)
    host = HostExperts(w1=torch.rand(E, 2, 1), w2=torch.rand(E, 1, 1), tables=tables)
    on_device = replace(host, tables=replace(tables, state=tables.state.cuda()))
    found = split_waves(ids.cuda(), on_device, num_waves)[:, : ids.numel()].view(num_waves, num_tokens, K)
    assert torch.equal(found.cpu(), split_waves_torch(ids, host, num_waves))


@pytest.mark.parametrize("num_slots", [K, 13, E])
def test_replayed_steps_equal_resident_experts_bit_for_bit(num_slots: int) -> None:
    made = torch.Generator().manual_seed(5)
    w1, w2 = weights_of(made)
    resident = DecodeWeights(w1=w1.cuda(), w2=w2.cuda(), slots=torch.arange(E, dtype=torch.int32, device=CUDA))
    runner = LocalRunner(K, 1)
    decode = runner.decode
    cached = CachedExperts(ExpertCache(w1, w2, num_slots, CUDA), runner, K)
    tokens = torch.randn(1, D, generator=made).bfloat16().cuda()
    ids, weights = torch.zeros(1, K, dtype=torch.int32, device=CUDA), torch.rand(1, K, generator=made).cuda()
    graph, out = captured(lambda: cached(tokens, ids, weights, w1, w2))
    for step in range(200):
        ids.copy_(torch.randperm(E, generator=made)[:K].int()[None])
        tokens.copy_(torch.randn(1, D, generator=made).bfloat16())
        graph.replay()
        assert torch.equal(out, decode(tokens, ids, weights, resident)), f"step {step}"
    assert int(cached.cache.tables.totals[0]) >= 200 * K
