"""The limit for gradients of routing weights: right arithmetic is within it, small mistakes are beyond it."""

from __future__ import annotations

import pytest
import torch
from layer_cases import MASKED
from stress_cases import Stress, StressCase, backward_cases
from stress_numbers import FullWeights, expected, stress_inputs, units_of_weight_gradients
from stress_ranks import wrong_results
from torch import Tensor
from torch.nn.functional import silu
from weight_gradients import MANY, UNITS, unit_of_rows, weight_gradient_units, wrong_weight_gradients

CPU = torch.device("cpu")
RELATIVE = {torch.float32: 1e-4, torch.float16: 1e-2}


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_worked_example() -> None:
    one = wide(1)[:, None]
    unit = unit_of_rows(one, one, wide(32, 1).view(2, 1, 1), wide(0.5).view(1, 1), torch.float16)
    torch.testing.assert_close(unit, wide(1 / 64), rtol=1e-5, atol=0)
    exact = wide(16).view(1, 1)
    assert UNITS == 7
    assert wrong_weight_gradients(exact + 6.9 / 64, exact, unit[None]) == []
    wrong = wrong_weight_gradients(exact - 7.1 / 64, exact, unit[None])
    assert wrong == [
        "1 of 1 are more than 7 units off, worst at element 0 of shape (1, 1): 15.8890625 instead of 16.0, "
        "unit 1.563e-02"
    ]
    w1, w2 = wide(32, 32, 1, 1).view(2, 2, 1), wide(0.5, -0.5).view(1, 2)
    assert not (silu(one @ w1[0].T) * (one @ w1[1].T) @ w2.T).any(), "y is 0, and so is plain torch's error"
    torch.testing.assert_close(unit_of_rows(one, one, w1, w2, torch.float16), wide(2**0.5 / 64), rtol=1e-5, atol=0)


def as_the_layer_rounds(case: StressCase, inputs: list, weights: FullWeights) -> list[Tensor]:
    """Gradients of all ranks' routing weights, without y, in the layer's dtype."""
    found = []
    for of_rank in inputs:
        gradients = torch.zeros(of_rank.top_k_ids.shape)
        for expert, (w1, w2) in enumerate(zip(weights.w1, weights.w2, strict=True)):
            tokens, slots = (of_rank.top_k_ids == expert).nonzero(as_tuple=True)
            gate, up = ((of_rank.tokens[tokens] @ matrix.T).float() for matrix in w1)
            hidden = (silu(gate) * up).to(case.dtype).float()
            gradients[tokens, slots] = ((of_rank.grad_output[tokens] @ w2).float() * hidden).sum(dim=1)
        found.append(gradients)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_arithmetic_is_within_and_a_relative_mistake_beyond(dtype: torch.dtype) -> None:
    worst, mean_square, missed = 0.0, 0.0, 0
    for case in backward_cases(Stress(41, 2, "twin", "cpu", 1), dtype, 60):
        inputs = [stress_inputs(case, rank, 0, CPU) for rank in range(2)]
        weights = FullWeights.draw(case, CPU)
        found = torch.cat(as_the_layer_rounds(case, inputs, weights))
        exact = torch.cat(expected(case, inputs, weights, torch.float64)["grad_top_k_weights"])
        units = torch.cat([units_of_weight_gradients(case, inputs, weights, rank) for rank in range(2)])
        used = units > 0
        assert wrong_weight_gradients(found, exact, units) == [], case
        if not used.any():
            continue
        errors = ((found.double() - exact) / units)[used].abs()
        worst = max(worst, float(errors.max()))
        if dtype != torch.bfloat16:
            missed += errors.numel() >= MANY and not wrong_weight_gradients(found * (1 + RELATIVE[dtype]), exact, units)
        if errors.numel() >= MANY:
            mean_square = max(mean_square, float(errors.square().mean()))
    print(f"{dtype}: worst {worst:.2f} units, largest square mean {mean_square:.3f}, missed {missed}")
    assert worst < UNITS / 2, "units that are far too small would still do elsewhere"
    assert mean_square < 1 / 2
    assert missed == 0


@pytest.mark.parametrize("dtype", RELATIVE)
def test_the_stress_tool_finds_a_gradient_that_is_a_little_too_large(dtype: torch.dtype) -> None:
    case = StressCase("one rank", 1, 1, (60,), 4, 2, 48, 32, dtype=dtype, seed=8)
    inputs, weights = [stress_inputs(case, 0, 0, CPU)], FullWeights.draw(case, CPU)
    results = {name: tensors[0] for name, tensors in expected(case, inputs, weights, dtype).items()}
    results["grad_top_k_weights"] = as_the_layer_rounds(case, inputs, weights)[0]
    assert wrong_results(case, 0, [results], {0: inputs}, weights) == []
    results["grad_top_k_weights"] = results["grad_top_k_weights"] * (1 + RELATIVE[dtype])
    wrong = wrong_results(case, 0, [results], {0: inputs}, weights)
    assert wrong, "a mistake in all numbers"
    assert all(line.startswith("rank 0, call 0: grad_top_k_weights: ") for line in wrong), wrong


def test_errors_too_small_for_each_number_show_in_their_mean() -> None:
    units, exact = torch.ones(MANY, 1, dtype=torch.float64), torch.zeros(MANY, 1, dtype=torch.float64)
    assert wrong_weight_gradients(exact + 0.99, exact, units) == []
    assert wrong_weight_gradients(exact + 1.1, exact, units) == [
        "errors of 64 numbers have a square mean of 1.21 units, 1 is allowed"
    ]
    assert wrong_weight_gradients(exact[1:] + 1.1, exact[1:], units[1:]) == [], "few numbers have no mean"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-30])
def test_a_slot_without_an_expert_has_gradient_zero(value: float) -> None:
    ids = torch.tensor([[0, MASKED], [MASKED, 1]])
    x, g = torch.ones(2, 3), torch.ones(2, 3)
    weights = (torch.ones(2, 2, 4, 3, dtype=torch.float64), torch.ones(2, 3, 4, dtype=torch.float64))
    units = weight_gradient_units(x, ids, g, weights, torch.float32)
    assert ((units > 0) == (ids >= 0)).all()
    exact = torch.zeros(2, 2, dtype=torch.float64)
    assert wrong_weight_gradients(exact, exact, units) == []
    actual = exact.clone()
    actual[0, 1] = value
    (wrong,) = wrong_weight_gradients(actual, exact, units)
    assert wrong.startswith("1 of 4 are more than 7 units off, worst at element 1 of shape (2, 2): ")


def test_no_gradients_are_right() -> None:
    nothing = torch.zeros(0, 3, dtype=torch.float64)
    assert wrong_weight_gradients(nothing, nothing, nothing) == []


def test_a_dropped_slot_has_no_unit() -> None:
    case = StressCase("two", 2, 1, (1, 2), 2, 1, 16, 16, routing="one", capacity_factor=0.5, max_tokens=2)
    inputs, weights = [stress_inputs(case, rank, 0, CPU) for rank in range(2)], FullWeights.draw(case, CPU)
    units = [units_of_weight_gradients(case, inputs, weights, rank) for rank in range(2)]
    assert (units[0] > 0).all()
    assert not units[1].any(), "the expert was full with the token of rank 0"
