"""Gradients that expert biases add, on a GPU."""

from __future__ import annotations

import pytest
import torch
from bias_cases import check_bias_gradient, check_bias_products
from gemm_cases import make_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("counts", [[[0, 3, 700, 128]], [[1]], [[5000, 0]]])
def test_kernels_match_their_twins(dtype: torch.dtype, counts: list[list[int]]) -> None:
    rows = make_rows(counts, 128, "cuda", len(counts[0]))
    for width in (16, 720, 2880):
        for weighted in (False, True):
            check_bias_gradient(rows, width, dtype, width, "cuda", weighted=weighted)
        check_bias_products(rows, width, dtype, width, "cuda")
