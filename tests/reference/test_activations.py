"""Every activation, and expert biases, in the reference: the formula on paper, finite differences, TP and EP."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES, draw_biases, on_paper
from reference_cases import GRIDS, dense_formula, make_case
from torch import Tensor

from comet.config import MoEConfig
from comet.kernels.runtime.activation import Activation
from comet.layout import Biases
from comet.reference.layer import reference_experts


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_forward_is_the_formula_and_backward_its_gradient(activation: Activation) -> None:
    generator = torch.Generator().manual_seed(3)
    gate, up, grad = (3 * torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    hidden = on_paper(activation, *leaves)
    torch.testing.assert_close(activation.forward(gate, up), hidden, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(hidden, leaves, grad)
    found = activation.backward(gate, up, grad)
    torch.testing.assert_close(found, (hidden, *wanted), rtol=1e-12, atol=1e-12)
    by_autograd = torch.autograd.grad(activation.forward(*leaves), leaves, grad)
    torch.testing.assert_close(by_autograd, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_gradients_by_finite_differences(activation: Activation) -> None:
    case = make_case(8, num_tokens=5, top_k=2, num_experts=4, hidden=3, ffn=6)
    leaves = [case.tokens, case.weights, case.w1, case.w2, *draw_biases(4, 6, 3, torch.float64)]

    def layer(tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        biases = Biases(b1, b2)
        return reference_experts(tokens, case.ids, weights, w1, w2, ep=2, tp=3, activation=activation, biases=biases)

    assert torch.autograd.gradcheck(layer, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize(("ep", "tp"), GRIDS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_any_ranks_compute_the_dense_formula(activation: Activation, ep: int, tp: int) -> None:
    case, biases = make_case(4), draw_biases(6, 12, 10, torch.float64)
    result = reference_experts(*case.args, ep=ep, tp=tp, activation=activation, biases=biases)
    torch.testing.assert_close(result, dense_formula(case, activation, biases), rtol=1e-12, atol=1e-12)


def test_nan_stays_a_nan() -> None:
    gate = torch.tensor([torch.nan, 1.0])
    for activation in ACTIVATIONS:
        assert activation.forward(gate, torch.ones(2)).isnan().tolist() == [True, False]


def test_a_config_takes_a_name_or_fields() -> None:
    shape = dict(hidden_size=16, ffn_size=16, num_experts=2, top_k=1)
    assert MoEConfig(**shape).activation == Activation("swiglu")
    assert MoEConfig(**shape, activation="geglu").activation == Activation("geglu")
    gpt_oss = MoEConfig(**shape, activation={"name": "clamped_swiglu", "alpha": 1.702, "limit": 7.0})
    assert gpt_oss == MoEConfig(**shape, activation=Activation("clamped_swiglu"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name="gelu"), "activation='gelu' must be one of swiglu, geglu, reglu, clamped_swiglu"),
        (dict(name="geglu", limit=7.0), "limit=7.0 must be left out for activation='geglu', which has none"),
        (dict(name="clamped_swiglu", limit=0.0), "limit=0.0 of activation='clamped_swiglu' must be positive"),
        (dict(name="clamped_swiglu", alpha=float("nan")), "alpha=nan of activation='clamped_swiglu' must be positive"),
    ],
)
def test_bad_activations_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activation(**fields)  # type: ignore[arg-type]


def test_biases_of_another_shape_are_named() -> None:
    case, biases = make_case(4), draw_biases(6, 12, 10, torch.float64)
    with pytest.raises(ValueError, match=r"b1 of shape \(6, 23\)"):
        reference_experts(*case.args, biases=Biases(biases.b1[:, 1:], biases.b2))
