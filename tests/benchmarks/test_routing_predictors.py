"""Predictors of experts and ways to share slots, judged on traces whose answers can be worked out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from training_cases import MODEL, make_model

from comet.config import MoEConfig

from lib.drafts.misses import DRAFTS, drafting_rows, fetched_per_token
from lib.drafts.pictures import routing_facts
from lib.drafts.quality import record_routing
from lib.routing.predictors import (
    history,
    hit_curves,
    judged,
    once_each,
    pool_hits,
    predictor_rows,
    sharing_rows,
    unequal_slots,
)
from lib.routing.traces import Trace, made_trace, replay, replayed_hits
from suites.speculation import tables_of


def trace_of(steps: list, num_experts: int, **guesses: Tensor) -> Trace:
    ids = torch.tensor(steps)
    return Trace(ids=ids, weights=torch.ones(ids.shape), num_experts=num_experts, **guesses)


def bits(*experts: int) -> Tensor:
    return torch.zeros(1, 1, 8, dtype=torch.bool).index_fill(2, torch.tensor(experts), True)


def test_the_examples_of_the_docs() -> None:
    named, used, held = torch.tensor([[[2, 3, 4, 5, 6, 7]]]), bits(1, 3, 7), bits(0, 1, 2)
    at_4 = {"recall@4": 1 / 2, "precision@4": 1 / 4}
    assert judged(named, 6, used, held) == {"recall": 1, "precision": 2 / 5, **at_4}
    assert judged(named, 3, used, held) == {"recall": 1 / 2, "precision": 1 / 2, **at_4}
    assert set(judged(named, 6, used, bits(*range(8))).values()) == {None}, "everything has a slot"
    steps = [[[0], [5]], [[1], [6]], [[0], [7]], [[0], [7]]]
    found = history(trace_of(steps, 8))
    assert [[each for each in row if each >= 0] for row in found[:, 1].tolist()] == [[], [], [5], [5, 7]]
    assert (found[:, 0] == -1).all()
    assert once_each(torch.tensor([[4, 2, 4, -1, 2]])).tolist() == [[4, 2, -1, -1, -1]]
    assert hit_curves(trace_of([[[2]], [[0]], [[2]]], 4), 3) == [[0, 0, 2, 3, 3]]
    curves = [[0, 0, 2, 3, 3], [0, 4, 5, 5, 5]]
    assert [unequal_slots(curves, size, 1) for size in (1, 2, 3)] == [[1, 1], [3, 1], [4, 2]]
    assert unequal_slots(curves, 4, 1) == [4, 4], "nobody has more slots than experts"
    assert pool_hits(trace_of([[[0], [1]], [[0], [1]], [[0], [0]]], 2), 2) == [0, 2, 1]


def test_what_drafts_fetch() -> None:
    ids = [[0, 1], [0, 2], [0, 1], [0, 2]]
    assert fetched_per_token(ids, 2, 1, 1, 1.0) == 5 / 4, "the example of the docs"
    assert fetched_per_token(ids, 2, 1, 0, 1.0) == 5 / 4, "0 and 1, and one in each step behind"
    assert fetched_per_token(ids, 3, 1, 1, 1.0) == 3 / 4, "everything once"
    assert fetched_per_token(ids, 3, 1, 1, 0.0) == 3 / 3, "three rounds of one token each"
    rows = drafting_rows(trace_of([[step] for step in ids], 4), [2, 3], 1, 1.0)
    assert [(row["slots"], row["drafts"]) for row in rows] == [
        (size, drafts) for size in (2, 3) for drafts in DRAFTS[:3]
    ]
    assert rows[0]["x_fewer"] == 1


def test_history_adds_up_what_followed_each_expert() -> None:
    """Layer 0 needs {0, 1}, {0, 2}, {0, 1}, layer 1 {3, 4}, {4, 2} and then another. Before the third step 3 followed 0
    and 1 once each, 4 followed 0 twice and 1 once, 2 followed 0 once: 4 (3), 3 (2), 2 (1)."""
    found = history(trace_of([[[0, 1], [3, 4]], [[2, 0], [4, 2]], [[0, 1], [6, 7]]], 8))
    assert found[2, 1].tolist() == [4, 3, 2, -1, -1, -1, -1, -1]
    assert found[1, 1].tolist() == [3, 4, -1, -1, -1, -1, -1, -1]


def test_predictors_count_what_has_no_slot() -> None:
    """Three layers, E = 4, K = 1, one slot: layer 2 needs 0, 1, 1, 2 and holds none, 0, 1, 1: 0, 1 and 2 are missing.

    The next router names 0, 1, 3, 1: 0 and 1 are right, 3 is wrong, and 1 has a slot in the fourth step: recall 2 / 3,
    precision 2 / 3. The router in two names 3, 0, 1, 2; 0 and 1 have slots: 1 / 3 and 1 / 2. Layer 1 always needs 0, so
    history names nothing, 0, 0 and 1, and behind these 1 in the third and 0 in the fourth step: without a slot is 0 in
    both, which is wrong. The union names what the three name: all three are right, and 3, 3 and 0 are wrong."""
    guesses = {
        "guessed": torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, 0, 3], [-1, 0, 1]])[..., None],
        "guessed_in_two": torch.tensor([[-1, -1, 3], [-1, -1, 0], [-1, -1, 1], [-1, -1, 2]])[..., None],
    }
    trace = trace_of([[[0], [0], [last]] for last in (0, 1, 1, 2)], 4, **guesses)
    rows = predictor_rows(trace, [1])
    assert {row["missing"] for row in rows} == {3 / 4}
    assert {
        (row["predictor"], row["recall"], row["precision"], row["recall@4"], row["precision@4"]) for row in rows
    } == {
        ("next router", 2 / 3, 2 / 3, 2 / 3, 2 / 3),
        ("router in two", 1 / 3, 1 / 2, 1 / 3, 1 / 2),
        ("history", 0, 0, 0, 0),
        ("union", 1, 1 / 2, 1, 1 / 2),
    }
    assert predictor_rows(replace(trace, guessed_in_two=None), [1]) == []
    facts = routing_facts(trace, [0.25, 1.0])
    assert facts["predictors"] == rows, "nothing is missing where all experts have slots"
    printed = tables_of({"drafts": {"modes": []}, "top_r": [], "routing": facts, "fetched": []})
    assert [table.partition("\n")[0] for table in printed] == [
        "experts that are named before their layer and have no slot",
        "hits, by who shares the slots",
    ]
    assert printed[0].splitlines()[1].split() == [
        *("slots", "predictor", "missing", "recall", "precision", "recall@4", "precision@4")
    ]


def test_who_shares_slots() -> None:
    """Two layers with two slots each, K = 1, sixteen steps: layer 0 needs 0, 1, 2, 0, 1, 2, ... and layer 1 always 0.

    With two slots each, layer 0 never hits and layer 1 does: half of all. The first half says that three and one are
    better, with which all of the second half hits; so does the pool of four."""
    trace = trace_of([[[step % 3], [0]] for step in range(16)], 4)
    assert sharing_rows(trace, [2]) == [{"slots": 2, "per layer": 0.5, "unequal": 1.0, "pool": 1.0, "chosen": [3, 1]}]
    held = list(replay(trace, torch.tensor([[3, 1]]), "lru"))[-1]
    assert held.sum(2).tolist() == [[3, 1]]


@pytest.mark.parametrize("slots", [3, 6, 10])
def test_a_pool_of_one_layer_holds_what_was_used_last(slots: int) -> None:
    config = MoEConfig(num_experts=16, top_k=3, hidden_size=32, ffn_size=32)
    ids = made_trace(config, 1, 200, 0.4).sort().values  # of one step the lower stays longer, for all three
    trace = Trace(ids=ids, weights=torch.ones(ids.shape), num_experts=16)
    wanted = replayed_hits(trace, [slots], "lru")[0]
    assert sum(pool_hits(trace, slots)) / ids.numel() == pytest.approx(wanted)
    more = hit_curves(trace, 200)[0][slots] - round(wanted * ids.numel())
    assert 0 <= more <= slots, "by those that are there at first"


def test_routers_are_asked_one_and_two_layers_ahead() -> None:
    model, group = make_model(replace(MODEL, num_layers=3), max_tokens=64)
    routers = [layer.router for layer in model.moe_layers()]
    for router in routers:
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(4))
    asked: list[list[Tensor]] = [[] for _ in routers]
    hooks = [
        router.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0]))
        for router, kept in zip(routers, asked, strict=True)
    ]
    with torch.no_grad():
        trace = record_routing(model, [torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(3))])
        for hook in hooks:
            hook.remove()
        for layer, (router, inputs) in enumerate(zip(routers, asked, strict=True)):
            *others, one_before, own = [torch.full_like(trace.ids[:, 0], -1)] * (2 - layer) + [
                router(tokens).top_k_ids.long() for tokens in inputs
            ]
            assert torch.equal(trace.ids[:, layer], own)
            assert torch.equal(trace.guessed[:, layer], one_before)
            assert torch.equal(trace.guessed_in_two[:, layer], others[-1])
    assert not torch.equal(trace.guessed[:, 2], trace.guessed_in_two[:, 2]), "or nothing is tested"
    group.close()
