"""The limits for gradients of all weights: right arithmetic is within, small mistakes are beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stress_cases import Stress, StressCase, backward_cases
from stress_numbers import UNITS, FullWeights, expected, gradient_units, stress_inputs, wrong_gradient
from stress_ranks import wrong_results
from torch import Tensor
from torch.nn.functional import silu

CPU = torch.device("cpu")
ONE = StressCase("one rank", 1, 1, (60,), 4, 2, 48, 32, dtype=torch.float16, seed=8)


def inputs_of(case: StressCase) -> tuple[list, FullWeights]:
    return [stress_inputs(case, rank, 0, CPU) for rank in range(case.world_size)], FullWeights.draw(case, CPU)


def as_the_layer_rounds(case: StressCase, wrong_rows: int = 0) -> dict[str, Tensor]:
    """Gradients of one rank's weights; ``wrong_rows`` of each expert are multiplied with their neighbour's row."""
    inputs, weights = inputs_of(case)
    ids, x, g, routing = (
        torch.cat([getattr(of_rank, name) for of_rank in inputs])
        for name in ("top_k_ids", "tokens", "grad_output", "top_k_weights")
    )
    dtype, grad_w1, grad_w2 = case.dtype, torch.zeros_like(weights.w1), torch.zeros_like(weights.w2)
    grad_routing = torch.zeros_like(routing)
    for expert, (w1, w2) in enumerate(zip(weights.w1, weights.w2, strict=True)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        weight = routing[tokens, slots][:, None]
        gate, up = ((x[tokens] @ matrix.T).float() for matrix in w1)
        grad, hidden = (g[tokens] @ w2).float(), (silu(gate) * up).to(dtype).float()
        grad_routing[tokens, slots] = (grad * hidden).sum(dim=1)
        grad, hidden = weight * grad, (weight * hidden).to(dtype)
        slope = gate.sigmoid() * (1 + gate * (1 - gate.sigmoid()))
        pre = torch.stack([grad * up * slope, grad * silu(gate)]).to(dtype)
        order = torch.arange(tokens.numel())
        order[: wrong_rows % (1 + tokens.numel())] -= 1
        grad_w1[expert] = (pre.float().transpose(1, 2) @ x[tokens][order].float()).to(dtype)
        grad_w2[expert] = (g[tokens][order].float().T @ hidden.float()).to(dtype)
    return {"grad_top_k_weights": grad_routing, "grad_w1": grad_w1, "grad_w2": grad_w2}


def wrong(case: StressCase, found: dict[str, Tensor]) -> list[str]:
    """What the limits say of gradients of one rank, and that the stress tool says the same."""
    inputs, weights = inputs_of(case)
    exact, units = expected(case, inputs, weights, torch.float64), gradient_units(case, inputs, weights, 0)
    said = [f"{name}: {each}" for name in found for each in wrong_gradient(found[name], exact[name][0], units[name])]
    results = {name: tensors[0] for name, tensors in expected(case, inputs, weights, case.dtype).items()} | found
    assert wrong_results(replace(case, inputs=(0,)), 0, [results], {0: inputs}, weights) == [
        f"rank 0, call 0: {each}" for each in said
    ]
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_arithmetic_is_within_and_not_far(dtype: torch.dtype) -> None:
    most = 0.0
    for case in backward_cases(Stress(43, 1, "twin", "cpu", 1), dtype, 40):
        found = as_the_layer_rounds(case)
        assert wrong(case, found) == [], case
        exact, units = expected(case, *inputs_of(case), torch.float64), gradient_units(case, *inputs_of(case), 0)
        errors = [(found[name].double() - exact[name][0])[unit > 0] / unit[unit > 0] for name, unit in units.items()]
        most = max(most, *(float(error.abs().max()) for error in errors if error.numel()), 0.0)
    print(f"{dtype}: {most:.2f} units")
    assert UNITS / 4 < most < UNITS


@pytest.mark.parametrize(("dtype", "mistake"), [(torch.float32, 1e-4), (torch.float16, 1e-2)])
def test_small_mistakes_are_beyond(dtype: torch.dtype, mistake: float) -> None:
    """A wrong row of each expert, one element that is 2 % too large, and all of them a little."""
    case = replace(ONE, dtype=dtype)
    right, shifted = as_the_layer_rounds(case), as_the_layer_rounds(case, wrong_rows=1)
    for name, tensor in right.items():
        one = tensor.flatten().clone()
        one[one.abs().argsort()[-one.numel() // 4]] *= 1.05
        for found in (tensor * (1 + mistake), one.view_as(tensor), shifted[name]):
            assert torch.equal(found, tensor) or {
                each.split(":")[0] for each in wrong(case, right | {name: found})
            } == {name}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-7])
def test_what_no_expert_has_computed_has_gradient_zero(value: float) -> None:
    """Weights of an expert without rows, and routing weights of masked slots."""
    case = replace(ONE, routing="one")
    empty, right = (case.seed % case.num_experts + 1) % case.num_experts, as_the_layer_rounds(case)
    assert wrong(case, right) == []
    for name, tensor in right.items():
        place = 5 if name == "grad_top_k_weights" else empty * tensor[0].numel() + 5
        spoilt = tensor.flatten().clone()
        spoilt[place] = value
        (said,) = wrong(case, right | {name: spoilt.view_as(tensor)})
        assert f"worst at element {place} of shape " in said
