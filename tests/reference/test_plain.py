"""The plain path and the gathered reference on several gloo ranks: examples, masked slots, and what is refused.

That they are right is for ``layer/test_moe.py``, which runs all paths.
"""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from layer_cases import LayerCase, full_weights, rank_inputs, shard
from ranks import in_ranks
from torch import Tensor

from comet.layout import ExpertLayout, RoutedTokens
from comet.reference.layer import reference_experts
from comet.reference.plain import gather_reference_experts, make_exchange, plain_experts

PATHS = {"plain": plain_experts, "reference": gather_reference_experts}


@in_ranks(4)
def test_gathered_reference_is_bitwise_the_reference_and_masked_slots_may_be_nan(rank: int, world_size: int) -> None:
    """Routing weights of masked slots are NaN, which reaches neither outputs nor gradients."""
    case = LayerCase("masked", 2, 2, (9, 4, 0, 7), routing="masked")
    inputs, full = rank_inputs(case, rank), full_weights(case)
    masked = inputs.top_k_ids < 0
    routed = inputs.tokens, inputs.top_k_ids, inputs.top_k_weights.masked_fill(masked, float("nan"))
    wanted = reference_experts(*routed, full[0].flatten(1, 2), full[1], ep=2, tp=2)
    w1, w2 = shard(case, rank, *full)
    for path, run in PATHS.items():
        leaves = [each.clone().requires_grad_() for each in (routed[0], routed[2], w1.flatten(1, 2), w2)]
        layout = ExpertLayout.create(case.config, case.parallel, rank)
        y = run(RoutedTokens(leaves[0], routed[1], leaves[1]), *leaves[2:], layout, dist.group.WORLD)
        torch.testing.assert_close(y, wanted, rtol=0 if path == "reference" else 1e-5, atol=1e-5 * (path == "plain"))
        y.square().sum().backward()
        assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
        assert not leaves[1].grad[masked].any()


ALL = ("tokens", "weights", "w1", "w2")
ROWS = "requires_grad=[True, False] of tokens, w1 or w2 on ranks 0 to 1 must be equal on all ranks"
TOKENS = "requires_grad=[True, False] of tokens on ranks 0 to 1 must be equal on all ranks"


@in_ranks(2)
def test_all_ranks_raise_where_one_would_wait_in_the_backward_pass(rank: int, world_size: int) -> None:
    """Leaves ``wanted[rank]`` want gradients; without a message, the backward pass ends."""
    case = LayerCase("frozen", world_size, 1, (5, 8))
    inputs, (w1, w2) = rank_inputs(case, rank), shard(case, rank, *full_weights(case))
    drawn = {"tokens": inputs.tokens, "weights": inputs.top_k_weights, "w1": w1.flatten(1, 2), "w2": w2}
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    for path, wanted, message in (
        ("plain", [ALL, ("weights", "w1", "w2")], TOKENS),
        ("plain", [("w1",), ("weights",)], ROWS),
        ("plain", [("w2",), ()], ROWS),
        ("plain", [("w1", "weights"), ("w2",)], ""),  # the same messages in the backward pass
        ("reference", [("w1", "tokens"), ("tokens",)], "requires_grad=[True, False] of w1 on ranks 0 to 1"),
        ("reference", [("w1", "w2"), ("w1",)], "requires_grad=[True, False] of w2 on ranks 0 to 1"),
        ("reference", [ALL, ("w1", "w2")], ""),
    ):
        leaves = {name: leaf.clone().requires_grad_(name in wanted[rank]) for name, leaf in drawn.items()}
        tokens, factors, *weights = leaves.values()
        with pytest.raises(ValueError, match=f"^{re.escape(message)}") if message else nullcontext():
            output = PATHS[path](RoutedTokens(tokens, inputs.top_k_ids, factors), *weights, layout, dist.group.WORLD)
        if not message:
            output.sum().backward()
            assert all((leaf.grad is not None) == (name in wanted[rank]) for name, leaf in leaves.items())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(16)}, r"tokens of shape \(16,\) must be \(T, D\)"),
        ({"ids": torch.zeros(2, 1).int()}, r"top_k_ids of shape \(2, 1\) must be \(T, K\) = \(2, 2\)"),
        ({"weights": torch.zeros(1, 2)}, r"top_k_weights of shape \(1, 2\) must be \(T, K\) = \(2, 2\)"),
        ({"ids": torch.zeros(2, 2)}, r"top_k_ids of dtype torch.float32 must be torch.int32 or torch.int64"),
        ({"ids": torch.full((2, 2), 4).int()}, r"top_k_ids .*contain 4; every id must be -1 \(masked\) or in \[0, "),
    ],
)
def test_errors_name_field_value_and_rule(path: str, change: dict[str, Tensor], message: str) -> None:
    layout = ExpertLayout(num_experts=4, top_k=2, ep=1, tp=1, rank=0)
    inputs = {
        "tokens": torch.zeros(2, 16),
        "ids": torch.zeros(2, 2).int(),
        "weights": torch.zeros(2, 2),
        "w1": torch.zeros(4, 64, 16),
        "w2": torch.zeros(4, 16, 32),
    }
    tokens, ids, factors, *weights = (inputs | change).values()
    with pytest.raises(ValueError, match=message):
        PATHS[path](RoutedTokens(tokens, ids, factors), *weights, layout, None)


@in_ranks(2)
def test_group_must_be_the_layouts(rank: int, world_size: int) -> None:
    for ep, claimed, message in (
        (4, rank, "process_group of 2 ranks must have ep x tp = 4 of the layout"),
        (2, 1 - rank, f"rank={1 - rank} of the layout must be this process's rank {rank} in process_group"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            make_exchange(torch.tensor([[0]]), ExpertLayout(num_experts=4, top_k=1, ep=ep, tp=1, rank=claimed), None)
