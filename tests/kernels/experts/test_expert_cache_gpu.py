"""The expert cache on a GPU: steps of kernels against twins and against resident experts, launched and replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cached_layers import D, E, F, K, captured, check_slots, draw_step, refill, resident
from decode_cases import stored_parts
from torch import Tensor

from comet.decode.runners import LocalRunner
from comet.experts import CachedExperts, ExpertCache
from comet.kernels.experts.cache import bring_torch
from comet.kernels.experts.tables import POLICIES, CacheTables, HostExperts
from comet.kernels.experts.waves import count_waves, split_waves, split_waves_torch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def parts_of(made: torch.Generator, kind: str = "", ffn_size: int = F) -> dict[str, Tensor]:
    weights = torch.randn(E, 2 * ffn_size, D, generator=made), torch.randn(E, D, ffn_size, generator=made)
    return stored_parts(kind, *(weights if kind else (weight.bfloat16() for weight in weights)))


# Where F is 208, an expert has 16 and 8 scales of block FP8, which share lines with those of other slots.
@pytest.mark.parametrize(("kind", "ffn_size"), [("mxfp8", 192), ("mxfp4", 192), ("fp8", 208), ("fp8", 256)])
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 9), (5, 20), (11, E)])
def test_steps_of_quantised_experts_equal_resident_ones(
    kind: str, ffn_size: int, num_tokens: int, num_slots: int
) -> None:
    print("seed", num_slots)
    made = torch.Generator().manual_seed(num_slots)
    parts = parts_of(made, kind, ffn_size)
    cache, everything = ExpertCache(**parts, num_slots=num_slots, device=CUDA), resident(parts)
    decode = LocalRunner(K, num_tokens).decode
    for step in range(200):
        given = draw_step(made, num_tokens)
        assert torch.equal(decode(*given, cache.weights), decode(*given, everything)), f"step {step}"
    check_slots(cache, parts)
    assert int(cache.tables.totals[1]) >= num_slots


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (1, E), (2, 9), (5, 20), (11, E)])
def test_steps_equal_twin_and_resident_experts(num_tokens: int, num_slots: int, policy: str) -> None:
    made = torch.Generator().manual_seed(num_slots)
    parts = parts_of(made)
    cache, everything = ExpertCache(**parts, num_slots=num_slots, device=CUDA, policy=policy), resident(parts)
    twin = CacheTables.create(E, num_slots, torch.device("cpu"))
    twin_host = replace(cache.host, tables=twin)
    twin_slots = [part.new_zeros(num_slots, *part.shape[1:]) for part in parts.values()]
    decode = LocalRunner(K, num_tokens).decode
    for step in range(100):
        tokens, ids, weights = draw_step(made, num_tokens)
        weights = weights.mul(8).ceil() / 8  # sums that are exact in any order
        output = decode(tokens, ids, weights, cache.weights)
        assert torch.equal(output, decode(tokens, ids, weights, everything)), f"step {step}"
        bring_torch(ids.cpu(), weights.cpu(), *twin_slots, twin_host)
        assert torch.equal(cache.tables.last_used.cpu(), twin.last_used), f"step {step}"
        if policy == "lru":  # scores fade by products that round differently
            for name in ("slots", "arriving", "owners"):
                assert torch.equal(getattr(cache.tables, name).cpu(), getattr(twin, name)), f"{name}, step {step}"
            assert torch.equal(cache.tables.totals[:2].cpu(), twin.totals[:2])
    check_slots(cache, parts)
    assert int(cache.tables.totals[2]) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("num_tokens", "num_slots"), [(1, K), (1, 13), (1, E), (2, K), (5, 7), (5, 19), (16, K), (16, 30)]
)
def test_replayed_steps_equal_resident_experts_bit_for_bit(num_tokens: int, num_slots: int, policy: str) -> None:
    """Steps of one token, and of more in waves."""
    print("seed", num_slots)
    made = torch.Generator().manual_seed(num_slots)
    parts, runner = parts_of(made), LocalRunner(K, num_tokens)
    cached = CachedExperts(ExpertCache(**parts, num_slots=num_slots, device=CUDA, policy=policy), runner, K)
    tables, everything = cached.cache.tables, resident(parts)
    assert (count_waves(num_tokens * K, E, num_slots) > 1) == (num_tokens > 1)
    given = draw_step(made, num_tokens)
    graph, out = captured(lambda: cached(*given, *parts.values()))
    for step in range(100):
        refill(given, draw_step(made, num_tokens, (K, 12, E)[step % 3], masked=False))  # one wave, some, all
        needed = given[1].unique().long()
        missing, before = int((tables.slots[needed] < 0).sum()), tables.totals[:2].clone()
        graph.replay()
        assert torch.equal(out, runner.decode(*given, everything)), f"step {step}"
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
