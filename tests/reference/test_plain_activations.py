"""The plain path and the gathered reference with every activation and with biases, on several gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from activation_cases import ACTIVATIONS, draw_biases
from ranks import run_ranks
from reference_cases import make_case
from torch import Tensor

from comet.layout import Biases, ExpertLayout
from comet.reference.layer import reference_experts, shard_biases, shard_experts
from comet.reference.plain import gather_reference_experts, plain_experts

PATHS = {"plain": plain_experts, "reference": gather_reference_experts}
EXPERTS, FFN, HIDDEN = 4, 12, 6


def gradients(activation_index: int, ep: int, tp: int, rank: int) -> dict[str, list[Tensor]]:
    """Output and gradients of tokens, routing weights, w1, w2, b1 and b2 on this rank, by path."""
    layout = ExpertLayout(num_experts=EXPERTS, top_k=2, ep=ep, tp=tp, rank=rank)
    case = make_case(20 + rank, num_tokens=7 + rank, top_k=2, num_experts=EXPERTS, hidden=HIDDEN, ffn=FFN)
    whole = make_case(5, num_experts=EXPERTS, hidden=HIDDEN, ffn=FFN)
    biases = draw_biases(EXPERTS, FFN, HIDDEN, torch.float64)
    mine = shard_biases(biases, layout)
    assert mine is not None
    experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    shards = *shard_experts(whole.w1, whole.w2, layout), mine.b1, biases.b2[experts]
    found = {}
    for name, path in PATHS.items():
        leaves = [leaf.clone().requires_grad_() for leaf in (case.tokens, case.weights, *shards)]
        tokens, weights, w1, w2, b1, b2 = leaves
        group = dist.group.WORLD if ep * tp > 1 else None
        output = path(tokens, case.ids, weights, w1, w2, layout, group, ACTIVATIONS[activation_index], Biases(b1, b2))
        output.square().sum().div(2).backward()
        found[name] = [output.detach(), *(leaf.grad for leaf in leaves)]
    return found


def run_cases(rank: int, world_size: int, ep: int, tp: int) -> list[dict[str, list[Tensor]]]:
    return [gradients(index, ep, tp, rank) for index in range(len(ACTIVATIONS))]


def expected(activation_index: int, world_size: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Of each rank output and gradients of tokens and routing weights; and the gradients of all weights and biases."""
    whole = make_case(5, num_experts=EXPERTS, hidden=HIDDEN, ffn=FFN)
    leaves = [whole.w1, whole.w2, *draw_biases(EXPERTS, FFN, HIDDEN, torch.float64)]
    w1, w2, b1, b2 = (leaf.requires_grad_() for leaf in leaves)
    by_rank = []
    for rank in range(world_size):
        case = make_case(20 + rank, num_tokens=7 + rank, top_k=2, num_experts=EXPERTS, hidden=HIDDEN, ffn=FFN)
        own = case.tokens.requires_grad_(), case.weights.requires_grad_()
        output = reference_experts(
            own[0], case.ids, own[1], w1, w2, activation=ACTIVATIONS[activation_index], biases=Biases(b1, b2)
        )
        output.square().sum().div(2).backward()
        by_rank.append([output.detach(), *(leaf.grad for leaf in own)])
    return by_rank, [leaf.grad for leaf in (w1, w2, b1, b2)]


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2), (1, 2)])
def test_paths_equal_the_reference(ep: int, tp: int) -> None:
    ranks = run_ranks(run_cases, ep * tp, ep, tp) if ep * tp > 1 else [run_cases(0, 1, 1, 1)]
    for index in range(len(ACTIVATIONS)):
        by_rank, (w1, w2, b1, b2) = expected(index, ep * tp)
        for rank, found in enumerate(ranks):
            layout = ExpertLayout(num_experts=EXPERTS, top_k=2, ep=ep, tp=tp, rank=rank)
            experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
            mine = shard_biases(Biases(b1, b2), layout)
            assert mine is not None
            wanted = [*by_rank[rank], *shard_experts(w1, w2, layout), mine.b1, b2[experts]]
            for path in PATHS:
                torch.testing.assert_close(found[index][path], wanted, rtol=1e-10, atol=1e-11)
