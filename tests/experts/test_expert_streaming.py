"""Many tokens from an expert cache: experts stream through its slots, and nothing else holds any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES, draw_biases
from decode_cases import stored_parts
from torch import Tensor

from comet.decode.runners import LocalRunner
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import DecodeWeights
from comet.experts import CACHED_DECODE_TOKENS, CachedExperts, ExpertCache, streaming
from comet.experts.staged import Stage, StagedCache, StagedExperts
from comet.experts.store import HeldExperts
from comet.experts.streaming import Visit, group_visits, plan_visits
from comet.kernels.runtime.activation import Activation
from comet.layout import ExpertLayout
from comet.reference.plain import plain_experts

E, K, D, F = 12, 3, 32, 16


LAYOUT = ExpertLayout(num_experts=E, top_k=K, ep=1, tp=1, rank=0)
CPU = torch.device("cpu")


def made_experts(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    print("seed", seed)
    made = torch.Generator().manual_seed(seed)
    return torch.randn(E, 2 * F, D, generator=made) / 4, torch.randn(E, D, F, generator=made) / 4, made


def routed(made: torch.Generator, num_tokens: int, num_used: int = E) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randn(num_tokens, D, generator=made)
    ids = torch.stack([torch.randperm(num_used, generator=made)[:K] for _ in range(num_tokens)]).int()
    ids[0, 0] = -1
    return tokens, ids, torch.rand(num_tokens, K, generator=made)


def check_tables(cache: ExpertCache) -> None:
    """Tables agree with each other, and every slot holds what they say."""
    tables = cache.tables
    for expert, slot in enumerate(tables.slots.tolist()):
        assert tables.arriving[expert] == slot
        if slot >= 0:
            assert tables.owners[slot] == expert
            assert torch.equal(cache.weights.w1[slot], cache.host.w1[expert])
            assert torch.equal(cache.weights.w2[slot], cache.host.w2[expert])
    assert (tables.slots >= 0).sum() == (tables.owners >= 0).sum()


def test_the_example_of_the_docs() -> None:
    assert plan_visits([2, 0, 1, 3], [1, 3]) == [Visit(3, 1, False), Visit(2, 0, True), Visit(0, 1, True)]


@pytest.mark.parametrize("seed", range(5))
def test_every_needed_expert_is_visited_once_and_no_slot_is_taken_before_its_expert_was(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (20,), generator=made).tolist()
    owners = [*torch.randperm(20, generator=made)[:5].tolist(), -1]
    held, computed = dict(enumerate(owners)), set()
    for visit in plan_visits(counts, owners):
        if visit.is_missing:
            replaced = held[visit.slot]
            assert replaced < 0 or not counts[replaced] or replaced in computed
            held[visit.slot] = visit.expert
        assert held[visit.slot] == visit.expert
        computed.add(visit.expert)
    assert computed == {expert for expert, count in enumerate(counts) if count}


def test_the_example_of_groups() -> None:
    visits = [Visit(3, 1, False), Visit(2, 2, True), Visit(0, 0, True), Visit(1, 1, True)]
    assert group_visits(visits, [1, 1, 1, 1], 3, 2) == [[visits[0]], [visits[2], visits[1]], [visits[3]]]


@pytest.mark.parametrize("seed", range(5))
def test_groups_that_follow_each_other_copy_to_different_slots(seed: int) -> None:
    """So one travels while the other is computed."""
    made = torch.Generator().manual_seed(seed)
    num_slots = 3 + seed
    counts = torch.randint(0, 4000, (30,), generator=made).tolist()
    owners = torch.randperm(30, generator=made)[:num_slots].tolist()
    visits = plan_visits(counts, owners)
    groups = group_visits(visits, counts, num_slots, num_slots // 2)
    assert [sorted(group, key=visits.index) for group in groups] == [
        [visit for visit in visits if visit in group] for group in groups
    ]
    assert sorted((visit for group in groups for visit in group), key=visits.index) == visits
    for group, following in pairwise(groups):
        assert len({visit.is_missing for visit in group}) == 1
        assert len(group) == 1 or sum(counts[visit.expert] for visit in group) <= streaming.MOST_ROWS
        if group[0].is_missing:
            assert not {visit.slot for visit in group} & {visit.slot for visit in following}


@pytest.mark.parametrize("num_slots", [K, 5, E])
@pytest.mark.parametrize("num_rows", [9, streaming.MOST_ROWS])
def test_streamed_experts_equal_the_plain_path_bit_for_bit_between_decode_steps(
    num_rows: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MOST_ROWS", num_rows)
    w1, w2, made = made_experts(num_slots)
    cache = ExpertCache(w1, w2, num_slots, CPU)
    path = CachedExperts(cache, LocalRunner(K, CACHED_DECODE_TOKENS), K)
    for num_tokens in (1, 40, 2, 70, 1, 17):
        tokens, ids, weights = routed(made, num_tokens, num_used=E if num_tokens > 17 else 5)
        found, wanted = path(tokens, ids, weights, w1, w2), plain_experts(tokens, ids, weights, w1, w2, LAYOUT, None)
        if num_tokens > CACHED_DECODE_TOKENS:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted)
        check_tables(cache)
    needed, fetched = cache.tables.totals[:2].tolist()
    assert needed >= fetched > 0
    assert (fetched == E) == (num_slots == E), "what has a slot is not copied again"


@pytest.mark.parametrize("staged", [False, True], ids=["pinned", "staged"])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:], ids=NAMES[1:])
def test_streamed_experts_have_the_layers_activation_and_biases(activation: Activation, staged: bool) -> None:
    w1, w2, made = made_experts(5)
    biases = draw_biases(E, F, D, w1.dtype) if activation.parameters else None
    named, runner = biases._asdict() if biases else {}, LocalRunner(K, CACHED_DECODE_TOKENS, activation=activation)
    if staged:
        held = HeldExperts(w1, w2, False, **named)
        cache = StagedCache(held, Stage(8, held.specs, CPU), 0, 5, CPU, activation=activation)
        path: Any = StagedExperts(cache, runner, K)
    else:
        path = CachedExperts(ExpertCache(w1, w2, 5, CPU, activation=activation, **named), runner, K)
    for num_tokens in (1, 40, 2, CACHED_DECODE_TOKENS + 1, 1):
        inputs = *routed(made, num_tokens), w1, w2
        torch.testing.assert_close(path(*inputs, biases), plain_experts(*inputs, LAYOUT, None, activation, biases))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("num_bytes", [1, 2 * 3 * D * 2 * F * 4, streaming.FLOATING_BYTES])
def test_quantised_experts_stream_as_they_decode(num_bytes: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FLOATING_BYTES", num_bytes)
    w1, w2, made = made_experts(11)
    parts = stored_parts(kind, w1, w2.repeat(1, 1, 2))
    parts |= {name: parts[name].repeat(1, 2, 1) for name in ("w1", "w1_scales")}
    cache = ExpertCache(**parts, num_slots=4, device=CPU)
    path = CachedExperts(cache, LocalRunner(K, CACHED_DECODE_TOKENS), K)
    tokens, ids, weights = routed(made, 20)
    slots = torch.arange(E, dtype=torch.int32)
    wanted = warp_decode_torch(tokens, ids, weights, DecodeWeights(**parts, slots=slots))
    torch.testing.assert_close(path(tokens, ids, weights, w1, w2), wanted)


def test_a_copy_that_fails_leaves_no_slot_that_is_taken_for_what_it_does_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w1, w2, made = made_experts(9)
    cache = ExpertCache(w1, w2, 4, CPU)
    path = CachedExperts(cache, LocalRunner(K, CACHED_DECODE_TOKENS), K)
    path(*routed(made, 1), w1, w2)
    original, left = cache.copy, iter([True, True, False])

    def copy(visits: Sequence[Visit]) -> None:
        if not next(left):
            raise OSError("the file is gone")
        original(visits)

    monkeypatch.setattr(cache, "copy", copy)
    inputs = routed(made, 30)
    with pytest.raises(OSError, match="the file is gone"):
        path(*inputs, w1, w2)
    check_tables(cache)
    monkeypatch.undo()
    assert torch.equal(path(*inputs, w1, w2), plain_experts(*inputs, w1, w2, LAYOUT, None))
