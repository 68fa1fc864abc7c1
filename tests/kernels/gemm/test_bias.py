"""Gradients that expert biases add, under the interpreter."""

from __future__ import annotations

import pytest
import torch
from bias_cases import check_bias_gradient, check_bias_products
from gemm_cases import make_rows
from ranks import run_ranks

from comet.kernels.gemm.bias import bias_gradient_torch

COUNTS = ([[0, 3, 40]], [[16, 0, 0, 33]], [[1]])


def interpreted(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for seed, counts in enumerate(COUNTS):
        rows = make_rows(counts, 16, "cpu", seed)
        for width in (16, 272):
            for weighted in (False, True):
                check_bias_gradient(rows, width, dtype, 10 * seed, "cpu", weighted=weighted)
            check_bias_products(rows, width, dtype, 10 * seed, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_match_their_twins(dtype: torch.dtype) -> None:
    run_ranks(interpreted, 1, dtype, interpret=True, timeout=300)


def test_example() -> None:
    rows, out = torch.tensor([[1.0, 2], [3, 4], [torch.nan, torch.nan]]), torch.empty(1, 2)
    segments = torch.tensor([0]), torch.tensor([2])
    bias_gradient_torch(rows, out, segments, None)
    assert out.tolist() == [[4, 6]]
    routing = torch.tensor([0, 1, -1]), torch.tensor([0, 0, -1]), torch.tensor([[1.0], [10.0]])
    bias_gradient_torch(rows, out, segments, routing)
    assert out.tolist() == [[31, 42]]
