"""Where the reference layer rounds and in which order it sums, down to the last bit."""

from __future__ import annotations

import pytest
import torch
from reference_cases import dense_formula, make_case
from torch import Tensor

from comet.reference.layer import reference_experts, run_expert, sum_partials


def integer_experts(up_and_down: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    """Experts with D = F = 1 whose output for token 1 is exactly ``32 * up * down`` (silu(32) is 32 in float32)."""
    w1 = torch.tensor([[[32.0], [up]] for up, _ in up_and_down])
    w2 = torch.tensor([[[down]] for _, down in up_and_down])
    return w1.half(), w2.half()


def test_partials_are_rounded_per_rank_and_summed_in_float32() -> None:
    # Outputs 1 and 1, weights 1025.5 and 1023.5; float16 steps by 1 above 1024, by 0.5 below, by 2 above 2048.
    w1, w2 = integer_experts([(1.0, 2**-5), (1.0, 2**-5)])
    args = (torch.ones(1, 1).half(), torch.tensor([[0, 1]]), torch.tensor([[1025.5, 1023.5]]), w1, w2)
    assert reference_experts(*args).item() == 2048.0  # 2049, half way, goes to even 2048
    assert reference_experts(*args, ep=2).item() == 2050.0  # 1026 + 1023.5 = 2049.5 goes to 2050


def test_outputs_and_partials_of_tensor_parallel_ranks_are_rounded() -> None:
    # One expert with F = 2 and hidden (32, 32), one column per rank.
    token, ids = torch.ones(1, 1).half(), torch.tensor([[0]])
    w1 = torch.tensor([[[32.0], [32.0], [1.0], [1.0]]]).half()

    def run(weight: float, column_0: float, column_1: float, tp: int) -> float:
        w2 = torch.tensor([[[column_0, column_1]]]).half()
        return reference_experts(token, ids, torch.tensor([[weight]]), w1, w2, tp=tp).item()

    # The output 1 + 2^-11 is half way to the next float16 and goes to 1; split, the 2^-11 lives until the final sum.
    assert run(1.5, 2**-5, 2**-16, tp=1) == 1.5
    assert run(1.5, 2**-5, 2**-16, tp=2) == 1.5 + 2**-10
    # 1025.5 * 3 = 3076.5 goes to 3076 (steps of 2); split, 1025.5 goes to 1026 and 2051 to 2052.
    assert run(1025.5, 2**-5, 2**-4, tp=1) == 3076.0
    assert run(1025.5, 2**-5, 2**-4, tp=2) == 3078.0


def test_hidden_is_rounded_but_pre_activations_are_not() -> None:
    # Float16 steps by 2^-5 at 32 and by 2 at 3072: a rounded gate would lose its 2^-6 and give 3072.
    token = torch.ones(1, 2).half()
    w1 = torch.tensor([[32.0, 2**-6], [96.0, 0.0]]).half()
    w2 = torch.tensor([[1.0], [0.0]]).half()
    assert run_expert(token, w1, w2)[0, 0].item() == 3074.0  # (32 + 2^-6) * 96 = 3073.5
    # Hidden is (3073.5, 3072); rounded it is (3074, 3072), and the difference shows in the output.
    w1 = torch.tensor([[32.0, 2**-6], [32.0, 0.0], [96.0, 0.0], [96.0, 0.0]]).half()
    w2 = torch.tensor([[1.0, -1.0], [0.0, 0.0]]).half()
    assert run_expert(token, w1, w2)[0, 0].item() == 2.0


def test_slots_are_summed_in_slot_order() -> None:
    # Outputs 1; in float32 (2^24 + 1) + 1 = 2^24, but (1 + 1) + 2^24 = 2^24 + 2.
    w1, w2 = (weight.float() for weight in integer_experts([(1.0, 2**-5)] * 3))
    token, ids = torch.ones(1, 1), torch.tensor([[0, 1, 2]])
    big_first, big_last = torch.tensor([[2.0**24, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 2.0**24]])
    assert reference_experts(token, ids, big_first, w1, w2).item() == 2.0**24
    assert reference_experts(token, ids, big_last, w1, w2).item() == 2.0**24 + 2
    ids = torch.tensor([[2, 1, 0]])  # the order is that of the slots, not of the experts
    assert reference_experts(token, ids, big_first, w1, w2).item() == 2.0**24


def test_partials_are_summed_in_rank_order() -> None:
    parts = [torch.tensor([[value]]) for value in (2.0**24, 1.0, 1.0)]
    assert sum_partials(parts).item() == 2.0**24
    assert sum_partials(parts[::-1]).item() == 2.0**24 + 2
    halves = [torch.tensor([[value]], dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    assert sum_partials(halves).item() == 2050.0  # in float16 each 1 would be lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_error_against_float64_is_within_twice_plain_torch(dtype: torch.dtype, ep: int, tp: int) -> None:
    case = make_case(5, num_tokens=64, hidden=32, ffn=64).to(dtype)
    exact = dense_formula(case.to(torch.float64))
    plain = torch.zeros_like(case.tokens)
    for token, row in enumerate(case.ids.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                gate, up = (case.w1[expert] @ case.tokens[token]).chunk(2)
                output = case.w2[expert] @ (torch.nn.functional.silu(gate) * up)
                plain[token] += case.weights[token, slot].to(dtype) * output
    result = reference_experts(*case.args, ep=ep, tp=tp)
    error, bound = (result.double() - exact).abs().max().item(), 2 * (plain.double() - exact).abs().max().item()
    print(f"max error {error:.3e}, bound {bound:.3e}")
    assert result.dtype == dtype
    assert 0 < error <= bound
