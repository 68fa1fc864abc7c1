"""Activation checkpointing: a forward pass that runs again may meet another routing, and the gradients are its own."""

from __future__ import annotations

import pytest
import torch
from layer_cases import LayerCase, full_weights, rank_inputs, shard
from layer_ranks import build_layer
from ranks import in_ranks, run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from comet.comm.collectives import all_to_all_rows
from comet.layer.sharding import local
from comet.reference.layer import reference_experts


def compare_recomputed(rank: int, world_size: int, path: str, use_reentrant: bool) -> None:
    """The second forward pass sends one token of each rank elsewhere, as rounding in a router may.

    Where collectives move rows torch refuses that, as they are others: there it is the same pass, ended early.
    """
    case = LayerCase("ep2", world_size, 1, (40, 33)[:world_size])
    moe = build_layer(case, rank, path)
    all_inputs = [rank_inputs(case, source) for source in range(world_size)]
    other_ids = []
    for inputs in all_inputs:
        ids = inputs.top_k_ids.clone()
        if path in ("twin", "fused"):
            ids[3, 0] = next(e for e in range(case.num_experts) if e not in ids[3])
        other_ids.append(ids)
    inputs, passes = all_inputs[rank], []

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        passes.append(1)
        return moe.routed_experts(x, inputs.top_k_ids if len(passes) == 1 else other_ids[rank], weights)

    x, weights = inputs.tokens.clone().requires_grad_(), inputs.top_k_weights.clone().requires_grad_()
    checkpoint(layer, x, weights, use_reentrant=use_reentrant).backward(inputs.grad_output)
    assert len(passes) == 2
    w1, w2 = (weight.clone().requires_grad_() for weight in full_weights(case))
    expected = []
    for source, given in enumerate(all_inputs):
        leaves = given.tokens.clone().requires_grad_(), given.top_k_weights.clone().requires_grad_()
        y = reference_experts(leaves[0], other_ids[source], leaves[1], w1.flatten(1, 2), w2, ep=case.ep, tp=case.tp)
        y.backward(given.grad_output)
        expected.append(leaves)
    assert w1.grad is not None
    assert w2.grad is not None
    found = (x.grad, weights.grad, local(moe.w1.grad), local(moe.w2.grad))
    wanted = (*(leaf.grad for leaf in expected[rank]), *shard(case, rank, w1.grad, w2.grad))
    for name, one, other in zip(("tokens", "top_k_weights", "w1", "w2"), found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    moe.group.workspace.check()
    moe.group.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("path", "world_size"), [("twin", 1), ("twin", 2), ("fused", 2), ("plain", 2), ("reference", 2)]
)
def test_gradients_are_those_of_the_pass_that_ran_last(path: str, world_size: int, use_reentrant: bool) -> None:
    run_ranks(compare_recomputed, world_size, path, use_reentrant, interpret=path == "fused", timeout=300)


@pytest.mark.parametrize("path", ["twin", "plain", "reference"])
@in_ranks(2)
def test_a_second_backward_pass(rank: int, world_size: int, path: str) -> None:
    """A second backward pass over a graph that was kept gives the same gradients."""
    case = LayerCase("ep2", world_size, 1, (40, 33))
    moe, inputs = build_layer(case, rank, path), rank_inputs(case, rank)
    x = inputs.tokens.requires_grad_()
    y = moe.routed_experts(x, inputs.top_k_ids, inputs.top_k_weights)
    first, second = (
        torch.autograd.grad(y, (x, moe.w1, moe.w2), inputs.grad_output, retain_graph=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(local(one), local(other))
    (weights_only,) = torch.autograd.grad(y, moe.w2, inputs.grad_output)
    assert torch.equal(local(weights_only), local(first[2]))
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(y, moe.w2, inputs.grad_output)
    moe.group.workspace.check()
    moe.group.close()


@in_ranks(2)
def test_rows_go_back_to_where_the_last_pass_had_them_from(rank: int, world_size: int) -> None:
    """As many rows in all, but to other ranks: rank 0 sends (1, 2), then (2, 1), and rank 1 the other way round."""
    counts = [(1, 2), (2, 1)] if rank == 0 else [(2, 1), (1, 2)]

    def exchange(rows: Tensor) -> Tensor:
        both = counts.pop(0)
        return all_to_all_rows(rows, both, both, None)

    rows = torch.zeros(3, 1, requires_grad=True)
    checkpoint(exchange, rows, use_reentrant=False).backward(torch.arange(3.0).view(3, 1) + 10 * rank + 10)
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == ([10, 11, 20] if rank == 0 else [12, 21, 22])
