"""Saved tensors are offloaded or computed again; gradients follow the routing of the second forward pass."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from layer_cases import LayerCase, full_weights, oracles_of, rank_inputs
from layer_ranks import build_layer, results
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from comet.comm.collectives import all_to_all_rows
from comet.layer.sharding import local
from comet.moe import MoE


@pytest.mark.parametrize(
    ("world_size", "paths"), [(1, ["twin"]), slow(2, ["twin", "plain", "reference"]), (2, ["fused"])]
)
def test_gradients_are_those_of_the_pass_that_ran_last(world_size: int, paths: list[str]) -> None:
    run_ranks(run_again, world_size, paths, interpret=paths == ["fused"])


def run_again(rank: int, world_size: int, paths: list[str]) -> None:
    """The second forward pass sends one token of each rank elsewhere, as rounding in a router may.

    Where collectives move rows torch refuses that, as they are others: there it is the same pass, ended early.
    """
    case = LayerCase("ep2", world_size, 1, (40, 33)[:world_size])
    for path, use_reentrant in product(paths, (False, True)):
        moe = build_layer(case, rank, path)
        first, other = ([rank_inputs(case, source) for source in range(world_size)] for _ in range(2))
        for inputs in other if path in ("twin", "fused") else ():
            inputs.top_k_ids[3, 0] = next(e for e in range(case.num_experts) if e not in inputs.top_k_ids[3])
        passes = [other[rank].top_k_ids, first[rank].top_k_ids]

        def layer(x: Tensor, weights: Tensor, moe: MoE = moe, passes: list[Tensor] = passes) -> Tensor:
            return moe.routed_experts(x, passes.pop(), weights)

        x, weights = (leaf.requires_grad_() for leaf in (first[rank].tokens, first[rank].top_k_weights))
        y = checkpoint(layer, x, weights, use_reentrant=use_reentrant)
        y.backward(first[rank].grad_output)
        assert not passes
        found = results(moe, y, x, weights)
        wanted = oracles_of(case, other, full_weights(case), case.dtype)[rank]
        for name in ("grad_tokens", "grad_top_k", "grad_w1", "grad_w2"):
            said = f"{path}, {use_reentrant=}, {name}: ".__add__
            torch.testing.assert_close(found[name], getattr(wanted, name), rtol=1e-4, atol=1e-4, msg=said)
        moe.group.workspace.check()
        moe.group.close()


@pytest.mark.parametrize("path", ["twin", "plain"])
def test_tensors_kept_in_a_larger_memory(path: str) -> None:
    """Tensors that autograd saved in two calls come back as slices of one tensor a type, as after offloading."""
    case, pool = LayerCase("one", 1, 1, (40,)), dict[torch.dtype, Tensor]()
    moe, inputs = build_layer(case, 0, path), rank_inputs(case, 0)

    def pack(tensor: Tensor) -> tuple[torch.dtype, int, torch.Size]:
        kept = pool.get(tensor.dtype, tensor.new_zeros(3))
        pool[tensor.dtype] = torch.cat([kept, tensor.detach().flatten()])
        return tensor.dtype, len(kept), tensor.shape

    def unpack(place: tuple[torch.dtype, int, torch.Size]) -> Tensor:
        dtype, start, shape = place
        return pool[dtype][start:][: shape.numel()].view(shape)

    found, rolled = [], inputs.top_k_ids.roll(1, 0)
    for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(pack, unpack)):
        x = inputs.tokens.detach().requires_grad_()
        with hooks:
            outputs = [moe.routed_experts(x, ids, inputs.top_k_weights) for ids in (inputs.top_k_ids, rolled)]
        found.append(torch.autograd.grad(outputs, (x, moe.w1, moe.w2), [inputs.grad_output] * 2))
    for wanted, actual in zip(*found, strict=True):
        assert torch.equal(actual, wanted)


@in_ranks(2)
def test_a_second_backward_pass(rank: int, world_size: int) -> None:
    case = LayerCase("ep2", world_size, 1, (40, 33))
    for path in ("twin", "plain", "reference"):
        moe, inputs = build_layer(case, rank, path), rank_inputs(case, rank)
        x = inputs.tokens.requires_grad_()
        y = moe.routed_experts(x, inputs.top_k_ids, inputs.top_k_weights)
        first, second = (
            torch.autograd.grad(y, (x, moe.w1, moe.w2), inputs.grad_output, retain_graph=True) for _ in range(2)
        )
        for one, other in zip(first, second, strict=True):
            assert torch.equal(local(one), local(other)), path
        (weights_only,) = torch.autograd.grad(y, moe.w2, inputs.grad_output)
        assert torch.equal(local(weights_only), local(first[2])), path
        with pytest.raises(RuntimeError, match="second"):
            torch.autograd.grad(y, moe.w2, inputs.grad_output)
        moe.group.workspace.check()
        moe.group.close()


@in_ranks(2)
def test_rows_go_back_to_where_the_last_pass_had_them_from(rank: int, world_size: int) -> None:
    """Rank 0 sends (1, 2) rows, then (2, 1); rank 1 the other way round. The total stays, the destinations change."""
    counts = [(1, 2), (2, 1)] if rank == 0 else [(2, 1), (1, 2)]

    def exchange(rows: Tensor) -> Tensor:
        both = counts.pop(0)
        return all_to_all_rows(rows, both, both, None)

    rows = torch.zeros(3, 1, requires_grad=True)
    checkpoint(exchange, rows, use_reentrant=False).backward(torch.arange(3.0).view(3, 1) + 10 * rank + 10)
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == ([10, 11, 20] if rank == 0 else [12, 21, 22])
