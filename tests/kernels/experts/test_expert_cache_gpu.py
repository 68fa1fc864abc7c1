"""The expert cache on a GPU: steps of kernels against twins and against resident experts, launched and replayed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_cases import cache_of, check_slots, resident_weights
from cached_layers import CUDA, E, K, case_of, draw_step, refill
from gpus import captured
from torch.nn.functional import pad

from comet.decode.runners import LocalRunner
from comet.experts.cached import CachedExperts
from comet.kernels.experts.cache import bring_torch
from comet.kernels.experts.tables import CacheTables, HostExperts
from comet.kernels.experts.waves import count_waves, split_waves, split_waves_torch
from comet.kernels.runtime.activation import Activation
from comet.layout import RoutedTokens

pytestmark = pytest.mark.gpu
PLACE = (None, CUDA, torch.bfloat16)
BIASED = dict(F=192, biased=True, activation=Activation("clamped_swiglu", limit=0.5))


# F=208 gives an expert 16 and 8 scales of block FP8, which share lines with those of other slots.
@pytest.mark.parametrize(
    "changes",
    [
        dict(quantised="mxfp8", F=192),
        dict(quantised="mxfp4", F=192),
        dict(quantised="fp8"),
        dict(quantised="fp8", F=256),
        *(BIASED | dict(quantised=kind) for kind in ("", "mxfp8", "mxfp4")),
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 9), (5, 20), (11, E)])
def test_steps_of_quantised_experts_and_biases_equal_resident_ones(
    changes: dict[str, Any], num_tokens: int, num_slots: int
) -> None:
    print("seed", num_slots)
    made, case = torch.Generator().manual_seed(num_slots), case_of(num_tokens, seed=num_slots, **changes)
    cache, everything = cache_of(case, num_slots, *PLACE), resident_weights(case, *PLACE)
    decode = LocalRunner(K, num_tokens).decode
    for step in range(200):
        given = draw_step(made, num_tokens)
        assert torch.equal(decode(*given, cache.weights), decode(*given, everything)), f"step {step}"
    check_slots(cache)
    assert int(cache.tables.totals[1]) >= num_slots


@pytest.mark.parametrize("num_slots", [1, K - 1])
def test_one_token_that_needs_more_experts_than_there_are_slots(num_slots: int) -> None:
    made, case = torch.Generator().manual_seed(num_slots), case_of(1, seed=num_slots)
    cache, everything = cache_of(case, num_slots, *PLACE), resident_weights(case, *PLACE)
    runner = LocalRunner(K, 2)
    path = CachedExperts(cache, runner, K)
    for step in range(50):
        tokens, ids, weights = given = draw_step(made, 1)
        output = path(given, cache.weights.w1, cache.weights.w2)
        two = tokens.expand(2, -1), torch.cat((ids, torch.full_like(ids, -1))), weights.expand(2, -1)
        assert torch.equal(output, runner.decode(*two, everything)[:1]), f"step {step}"
    check_slots(cache)


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("in_waves", [False, True], ids=["one wave", "waves"])
def test_hundreds_of_steps_that_nobody_waits_for(num_tokens: int, in_waves: bool) -> None:
    """Each step with misses, of Qwen3's shape, follows one without, where ``down_kernel`` may begin early.

    Without waves every second step needs what the one before did; of waves the last one has nothing to do.
    """
    top_k, num_experts, num_slots = 8, 128, 6 if in_waves else 8 * num_tokens
    made, case = torch.Generator().manual_seed(0), case_of(num_tokens, K=top_k, E=num_experts, D=2048, F=768)
    cache, everything = cache_of(case, num_slots, *PLACE), resident_weights(case, *PLACE)
    runner = LocalRunner(top_k, max(2, num_tokens))
    path = CachedExperts(cache, runner, top_k)
    needed = torch.rand(300, num_experts, generator=made).argsort(1)[:, : num_tokens * top_k]
    ids = needed.view(-1, num_tokens, top_k).int().cuda().repeat_interleave(1 if in_waves else 2, dim=0)
    tokens = torch.randn(num_tokens, 2048, generator=made).bfloat16().cuda()
    weights = torch.full((num_tokens, top_k), 1 / top_k, device=CUDA)
    absent = in_waves and num_tokens == 1  # one token in waves takes the kernels of two

    def decode(ids: torch.Tensor) -> torch.Tensor:
        of_step = [pad(each, (0, 0, 0, absent), value=-1) for each in (tokens, ids, weights)]
        return runner.decode(*of_step, everything)[:num_tokens]

    expected = [decode(each) for each in ids]
    for _ in range(4):
        torch.cuda.synchronize()
        outputs = [path(RoutedTokens(tokens, each, weights), cache.weights.w1, cache.weights.w2) for each in ids]
        torch.cuda.synchronize()
        wrong = [step for step in range(len(ids)) if not torch.equal(outputs[step], expected[step])]
        assert not wrong


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (1, E), (2, 9), (5, 20), (11, E)])
def test_steps_equal_twin_and_resident_experts(num_tokens: int, num_slots: int) -> None:
    made, case = torch.Generator().manual_seed(num_slots), case_of(num_tokens, seed=num_slots)
    cache, everything = cache_of(case, num_slots, *PLACE), resident_weights(case, *PLACE)
    twin = CacheTables.create(E, num_slots, torch.device("cpu"))
    twin_host = replace(cache.host, tables=twin)
    twin_slots = [part.new_zeros(num_slots, *part.shape[1:]) for part in cache.host.parts]
    decode = LocalRunner(K, num_tokens).decode
    for step in range(100):
        tokens, ids, weights = draw_step(made, num_tokens)
        weights = weights.mul(8).ceil() / 8  # sums that are exact in any order
        output = decode(tokens, ids, weights, cache.weights)
        assert torch.equal(output, decode(tokens, ids, weights, everything)), f"step {step}"
        bring_torch(ids.cpu(), *twin_slots, twin_host)
        assert torch.equal(cache.tables.last_used.cpu(), twin.last_used), f"step {step}"
        for name in ("slots", "arriving", "owners"):
            assert torch.equal(getattr(cache.tables, name).cpu(), getattr(twin, name)), f"{name}, step {step}"
        assert torch.equal(cache.tables.totals[:2].cpu(), twin.totals[:2])
    check_slots(cache)
    assert int(cache.tables.totals[2]) > 0


@pytest.mark.parametrize(
    ("num_tokens", "num_slots"), [(1, K), (1, 13), (1, E), (2, K), (5, 7), (5, 19), (16, K), (16, 30)]
)
@pytest.mark.parametrize("changes", [{}, BIASED], ids=["plain", "biased"])
def test_replayed_steps_equal_resident_experts_bit_for_bit(
    changes: dict[str, Any], num_tokens: int, num_slots: int
) -> None:
    """Steps have one token, or more tokens in waves."""
    print("seed", num_slots)
    made, case = torch.Generator().manual_seed(num_slots), case_of(num_tokens, seed=num_slots, **changes)
    runner, everything = LocalRunner(K, num_tokens), resident_weights(case, *PLACE)
    cached = CachedExperts(cache_of(case, num_slots, *PLACE), runner, K)
    tables = cached.cache.tables
    assert (count_waves(num_tokens * K, E, num_slots) > 1) == (num_tokens > 1)
    given = draw_step(made, num_tokens)
    graph, out = captured(lambda: cached(given, everything.w1, everything.w2))
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
