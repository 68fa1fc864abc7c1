"""The router's kernels under the interpreter: float32 logits from bfloat16 products, and the best ids."""

from __future__ import annotations

import torch
from ranks import run_ranks
from router_kernel_cases import SIZES, check_logits, check_top_k, check_top_k_example

from comet.kernels.router import router_logits


def interpreted(rank: int, world_size: int) -> None:
    for index, (num_tokens, num_experts, hidden_size) in enumerate(SIZES):
        check_logits(num_tokens, num_experts, hidden_size, (torch.float32, torch.bfloat16)[index % 2], "cpu")
    check_logits(40, 8, 64, torch.float32, "cpu")
    for num_tokens, num_experts, top_k in ((1, 8, 2), (13, 5, 5), (9, 1, 1), (30, 130, 8), (4, 40, 32)):
        check_top_k(num_tokens, num_experts, top_k, "cpu")
    check_top_k_example()
    assert router_logits(torch.empty(0, 16, dtype=torch.bfloat16), torch.empty(4, 16)).shape == (0, 4)


def test_kernels_under_the_interpreter() -> None:
    run_ranks(interpreted, 1, interpret=True)
