"""The router's kernels under the interpreter: logits from bfloat16 products, experts and weights, losses, gradients."""

import torch
from ranks import in_ranks
from router_cases import VARIANTS, D, make_router
from router_kernel_cases import (
    MEASURES,
    SELECTS,
    SIZES,
    check_extremes,
    check_logits,
    check_masked_experts,
    check_measure,
    check_measure_extremes,
    check_select,
    check_top_k,
)

import comet.router.router
from comet.kernels.router import measure as kernels
from comet.kernels.router.logits import router_logits


@in_ranks(1, interpret=True)
def test_logits_under_the_interpreter(rank: int, world_size: int) -> None:
    for index, (num_tokens, num_experts, hidden_size) in enumerate(SIZES):
        check_logits(num_tokens, num_experts, hidden_size, (torch.float32, torch.bfloat16)[index % 2], "cpu")
    check_logits(40, 8, 64, torch.float32, "cpu")
    assert router_logits(torch.empty(0, 16, dtype=torch.bfloat16), torch.empty(4, 16)).shape == (0, 4)


@in_ranks(1, interpret=True)
def test_whole_router_under_the_interpreter(rank: int, world_size: int) -> None:
    """Router and statistics by kernels and by plain torch, from tokens to the gradient of the weight."""
    for changes in VARIANTS:
        found = []
        for has_kernels in (False, True):
            comet.router.router.has_kernels = lambda logits, answer=has_kernels: answer
            router = make_router(4, **changes)
            if router.selection_bias is not None:
                router.selection_bias.normal_(std=0.3)
            routing = router(torch.randn(70, D))
            largest = torch.zeros(())
            stats = router.measure(routing.logits, routing.scores, routing.top_k_ids, largest_logit=largest)
            (stats.loss * 10 + routing.top_k_weights.square().sum() + routing.scores.square().sum()).backward()
            parts = (routing.top_k_weights, routing.scores, *stats, router.weight.grad)
            found.append((routing.top_k_ids, *(part.detach() for part in parts)))
            assert not has_kernels or largest == routing.logits.abs().max()
        assert torch.equal(found[0][0], found[1][0]), f"{changes}"
        torch.testing.assert_close(*found)


@in_ranks(1, interpret=True)
def test_selection_under_the_interpreter(rank: int, world_size: int) -> None:
    for num_tokens, num_experts, top_k in ((1, 8, 2), (13, 5, 5), (9, 1, 1), (30, 130, 8), (4, 40, 32)):
        check_top_k(num_tokens, num_experts, top_k, "cpu")
    for seed, (num_tokens, changes) in enumerate(SELECTS):
        check_select(num_tokens, changes, seed, "cpu")
    check_extremes("cpu")
    check_masked_experts("cpu")


@in_ranks(1, interpret=True)
def test_statistics_under_the_interpreter(rank: int, world_size: int) -> None:
    for sizes in MEASURES[:-1]:
        check_measure(*sizes, "cpu")
    kernels.MAX_BLOCKS = 4  # so that 300 tokens are, as 4,200, more than blocks take at once
    check_measure(300, 8, 2, "cpu")
    check_measure_extremes("cpu")
