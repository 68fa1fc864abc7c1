"""The shared expert: one expert of weight one."""

from __future__ import annotations

import pytest
import torch

from comet.layer.shared_expert import SharedExpert
from comet.reference.layer import reference_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_expert_is_one_expert_of_weight_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shared = SharedExpert(16, 48, dtype=dtype)
    assert shared.w1.shape == (96, 16)
    assert shared.w2.shape == (16, 48)
    tokens = torch.randn(9, 16, dtype=dtype)
    ids, weights = torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1, dtype=dtype)
    expected = reference_experts(tokens, ids, weights, shared.w1[None], shared.w2[None])
    torch.testing.assert_close(shared(tokens), expected)


def test_shared_expert_gradients_edges_and_errors() -> None:
    shared = SharedExpert(16, 16, dtype=torch.float64)
    tokens = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(shared, (tokens,))
    assert shared(torch.empty(0, 16, dtype=torch.float64)).shape == (0, 16)
    with pytest.raises(ValueError, match=r"tokens of shape \(3, 8\) must be \(T, D\) with D = hidden_size=16"):
        shared(torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"shared_ffn_size=0 must be positive"):
        SharedExpert(16, 0)
    with pytest.raises(ValueError, match=r"hidden_size=-1 must be positive"):
        SharedExpert(-1, 16)
