"""The reference layer backwards: finite differences, the dense formula's gradients, and training through it."""

from __future__ import annotations

import math

import pytest
import torch
from reference_cases import GRIDS, dense_formula, make_case
from torch import Tensor

from comet.reference.layer import reference_experts


def test_nan_weight_of_masked_slot_stays_out_of_values_and_gradients() -> None:
    case = make_case(3, masked=0.0)
    case.ids[4, 1] = -1
    expected = dense_formula(case)
    case.weights[4, 1] = math.nan
    inputs = [tensor.requires_grad_() for tensor in (case.tokens, case.weights, case.w1, case.w2)]
    result = reference_experts(*case.args, ep=2, tp=2)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(result.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1][4, 1] == 0


def test_gradients_with_a_capacity_by_finite_differences() -> None:
    case = make_case(8, num_tokens=5, top_k=2, num_experts=4, hidden=3, ffn=6)
    inputs = [tensor.requires_grad_() for tensor in (case.tokens, case.weights, case.w1, case.w2)]

    def layer(tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return reference_experts(tokens, case.ids, weights, w1, w2, expert_capacity=2)

    assert torch.autograd.gradcheck(layer, inputs)


@pytest.mark.parametrize(("ep", "tp"), GRIDS)
def test_gradients_equal_those_of_dense_formula(ep: int, tp: int) -> None:
    case = make_case(9)
    inputs = [tensor.requires_grad_() for tensor in (case.tokens, case.weights, case.w1, case.w2)]
    upstream = torch.randn(13, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(dense_formula(case), inputs, upstream)
    result = torch.autograd.grad(reference_experts(*case.args, ep=ep, tp=tp), inputs, upstream)
    for gradient, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-12)


def test_gradients_keep_the_dtype_of_their_inputs() -> None:
    case = make_case(10).to(torch.bfloat16)
    inputs = [tensor.requires_grad_() for tensor in (case.tokens, case.weights, case.w1, case.w2)]
    gradients = torch.autograd.grad(reference_experts(*case.args, ep=2).sum(), inputs)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
