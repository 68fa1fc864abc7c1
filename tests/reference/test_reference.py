"""The reference layer: worked examples, a dense formula, activations, shards, capacity, gradients, rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES, draw_biases, on_paper
from torch import Tensor

from comet.config import MoEConfig
from comet.kernels.runtime.activation import SWIGLU, Activation, ActivationName
from comet.layout import Biases
from comet.reference.layer import kept_slots, reference_experts, run_expert, sum_partials

GRIDS = [(1, 1), (2, 1), (3, 1), (6, 1), (1, 2), (1, 4), (2, 3), (3, 2)]


@dataclass(frozen=True)
class Case:
    tokens: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w2: Tensor

    @property
    def args(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    def to(self, dtype: torch.dtype) -> Case:
        weights = self.weights.to(torch.promote_types(dtype, torch.float32))
        return Case(self.tokens.to(dtype), self.ids, weights, self.w1.to(dtype), self.w2.to(dtype))


def make_case(
    seed: int,
    num_tokens: int = 13,
    top_k: int = 3,
    num_experts: int = 6,
    hidden: int = 10,
    ffn: int = 12,
    masked: float = 0.2,
) -> Case:
    """Random float64 case; every slot is masked with probability ``masked``, ids of a token are distinct."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    ids = order[:, :top_k].int()
    ids[torch.rand(num_tokens, top_k, generator=generator) < masked] = -1
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    w1, w2 = normal(num_experts, 2 * ffn, hidden), normal(num_experts, hidden, ffn)
    return Case(normal(num_tokens, hidden), ids, weights, w1 / hidden**0.5, w2 / ffn**0.5)


def dense_formula(case: Case, activation: Activation = SWIGLU, biases: Biases | None = None) -> Tensor:
    """The layer as one would write it on paper: no ranks, no rounding, every expert on every token."""
    b1, b2 = (0, 0) if biases is None else biases
    pre = torch.einsum("td,efd->tef", case.tokens, case.w1) + b1
    outputs = torch.einsum("tef,edf->ted", on_paper(activation, *pre.chunk(2, dim=-1)), case.w2) + b2
    mixture = torch.zeros(case.tokens.shape[0], case.w1.shape[0], dtype=case.weights.dtype)
    held = case.ids >= 0
    mixture.scatter_add_(1, case.ids.clamp(min=0).long(), case.weights.where(held, 0.0))
    return torch.einsum("te,ted->td", mixture, outputs)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_equal_dense_formula(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    ep, tp = draw(1, 4), draw(1, 3)
    num_experts = ep * draw(1, 4)
    sizes = {"num_tokens": draw(0, 30), "top_k": draw(1, num_experts), "num_experts": num_experts}
    print(f"seed {seed}: ep={ep}, tp={tp}, {sizes}")
    case = make_case(seed, **sizes, hidden=draw(1, 9), ffn=tp * draw(1, 5), masked=0.3)
    case = replace(case, ids=case.ids.remainder(draw(1, num_experts)).where(case.ids >= 0, -1))  # some name one twice
    torch.testing.assert_close(reference_experts(*case.args, ep=ep, tp=tp), dense_formula(case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_no_tokens(id_dtype: torch.dtype) -> None:
    case = make_case(0, num_tokens=0)
    w1, w2 = case.w1.requires_grad_(), case.w2.requires_grad_()
    result = reference_experts(case.tokens, case.ids.to(id_dtype), case.weights, w1, w2, ep=2, tp=2, expert_capacity=1)
    assert result.shape == (0, 10)
    result.sum().backward()
    assert torch.equal(w1.grad, torch.zeros_like(w1))
    assert torch.equal(w2.grad, torch.zeros_like(w2))


def test_all_slots_masked_gives_zero_and_ignores_bad_rows() -> None:
    case = make_case(2)
    case.tokens.fill_(math.nan)
    case.weights.fill_(math.nan)
    result = reference_experts(*replace(case, ids=torch.full_like(case.ids, -1)).args, ep=2)
    assert torch.equal(result, torch.zeros_like(result))


def test_one_bad_token_stays_alone() -> None:
    case = make_case(4, masked=0.0)
    clean = reference_experts(*case.args, ep=2)
    case.tokens[6] = math.inf
    dirty = reference_experts(*case.args, ep=2)
    others = torch.arange(13) != 6
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[6].isfinite().all()


def test_tokens_do_not_depend_on_each_other_or_on_memory_layout() -> None:
    case = make_case(6)
    whole = reference_experts(*case.args, ep=2)
    strided = [tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in case.args]
    assert not strided[3].is_contiguous()
    torch.testing.assert_close(reference_experts(*strided, ep=2), whole, rtol=1e-12, atol=1e-12)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    shuffled = reference_experts(case.tokens[order], case.ids[order], case.weights[order], case.w1, case.w2, ep=2)
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_kept_slots_equal_a_walk_in_token_slot_order(seed: int) -> None:
    capacity = seed % 5
    print(f"seed {seed}, capacity {capacity}")
    case = make_case(seed, num_tokens=25, masked=0.3)
    taken = [0] * 6
    expected = []
    for row in case.ids.tolist():
        keep = []
        for expert in row:
            keep.append(expert >= 0 and taken[expert] < capacity)
            if expert >= 0:
                taken[expert] += 1
        expected.append(keep)
    kept = kept_slots(case.ids, 6, capacity)
    assert kept.tolist() == expected
    dropped = sum(max(count - capacity, 0) for count in taken)
    assert ((case.ids >= 0).sum() - kept.sum()).item() == dropped
    survivors = replace(case, ids=case.ids.masked_fill(~torch.tensor(expected), -1))
    result = reference_experts(*case.args, ep=2, expert_capacity=capacity)
    torch.testing.assert_close(result, dense_formula(survivors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 4}, r"ep=4 must divide num_experts=6"),
        ({"ep": 0}, r"ep=0 must divide num_experts=6"),
        ({"tp": 5}, r"tp=5 must divide ffn_size=12"),
        ({"expert_capacity": -1}, r"expert_capacity=-1 must be at least 0"),
        ({"tokens": torch.zeros(13)}, r"tokens of shape \(13,\) must be \(T, D\)"),
        ({"w2": torch.zeros(10, 12)}, r"w2 of shape \(10, 12\) must be \(E, D, F\)"),
        ({"w2": torch.zeros(6, 12, 10)}, r"w2 of shape \(6, 12, 10\) must be \(E, D, F\) = \(E, 10, F\) with D=10"),
        ({"w1": torch.zeros(6, 12, 10)}, r"w1 of shape \(6, 12, 10\) must be \(E, 2F, D\) = \(6, 24, 10\)"),
        ({"top_k_ids": torch.zeros(12, 3).int()}, r"top_k_ids of shape \(12, 3\) must be \(T, K\) = \(13, K\) with T"),
        ({"top_k_weights": torch.zeros(13, 2)}, r"top_k_weights of shape \(13, 2\) must be \(T, K\) = \(13, 3\)"),
        ({"tokens": torch.zeros(13, 10).long()}, r"tokens of dtype torch.int64 must be floating"),
        ({"w1": torch.zeros(6, 24, 10).half()}, r"w1 of dtype torch.float16 must be torch.float32"),
        ({"top_k_weights": torch.zeros(13, 3).half()}, r"top_k_weights of dtype torch.float16 must be torch.float32"),
        ({"top_k_ids": torch.zeros(13, 3)}, r"top_k_ids of dtype torch.float32 must be torch.int32 or torch.int64"),
        ({"top_k_ids": torch.full((13, 3), 6)}, r"top_k_ids contain 6; every id must be -1 \(masked\) or in \[0, num"),
        ({"top_k_ids": torch.full((13, 3), -2)}, r"top_k_ids contain -2; every id must be -1"),
    ],
)
def test_errors_name_field_value_and_rule(changes: dict, message: str) -> None:
    names = ("tokens", "top_k_ids", "top_k_weights", "w1", "w2")
    given = dict(zip(names, make_case(0).to(torch.float32).args, strict=True))
    with pytest.raises(ValueError, match=message):
        reference_experts(**given | changes)


# ---- backwards


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


def test_gradients_keep_the_dtype_of_their_inputs() -> None:
    case = make_case(10).to(torch.bfloat16)
    inputs = [tensor.requires_grad_() for tensor in (case.tokens, case.weights, case.w1, case.w2)]
    gradients = torch.autograd.grad(reference_experts(*case.args, ep=2).sum(), inputs)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]


# ---- where it rounds and in which order it sums, down to the last bit


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


# ---- activations and biases ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("activation", "capacity"), [*((each, None) for each in ACTIVATIONS), (SWIGLU, 2)])
def test_gradients_by_finite_differences(activation: Activation, capacity: int | None) -> None:
    case = make_case(8, num_tokens=5, top_k=2, num_experts=4, hidden=3, ffn=6)
    leaves = [case.tokens, case.weights, case.w1, case.w2, *draw_biases(4, 6, 3, torch.float64)]

    def layer(tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        settings = dict(ep=2, tp=3, expert_capacity=capacity, activation=activation, biases=Biases(b1, b2))
        return reference_experts(tokens, case.ids, weights, w1, w2, **settings)

    assert torch.autograd.gradcheck(layer, [leaf.requires_grad_() for leaf in leaves], fast_mode=True)


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
        (dict(name="gelu"), f"activation='gelu' must be one of {', '.join(get_args(ActivationName))}"),
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
