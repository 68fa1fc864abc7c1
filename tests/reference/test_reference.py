"""The reference layer: worked examples, a dense formula, shards, capacity, and hostile routings."""

from __future__ import annotations

import math

import pytest
import torch
from reference_cases import Case, dense_formula, make_case

from comet.layout import ExpertLayout
from comet.reference.layer import (
    kept_slots,
    rank_partial,
    reference_experts,
    shard_experts,
    sum_partials,
)


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
    torch.testing.assert_close(reference_experts(*case.args, ep=ep, tp=tp), dense_formula(case), rtol=1e-12, atol=1e-12)


def test_worked_example_of_reference_experts() -> None:
    w1 = torch.tensor([[[32.0], [1.0]], [[32.0], [2.0]]])
    w2 = torch.tensor([[[1.0]], [[0.5]]])
    weights = torch.tensor([[0.5, 0.25]])
    assert reference_experts(torch.ones(1, 1), torch.tensor([[0, 1]]), weights, w1, w2).tolist() == [[24.0]]
    assert reference_experts(torch.ones(1, 1), torch.tensor([[1, -1]]), weights, w1, w2).tolist() == [[16.0]]


def test_worked_example_of_kept_slots() -> None:
    kept = kept_slots(torch.tensor([[0, 1], [0, -1], [1, 0]]), 2, 2)
    assert kept.tolist() == [[True, True], [True, False], [True, False]]


def test_worked_example_of_shard_experts() -> None:
    w1 = torch.arange(4 * 12).view(4, 12, 1)
    w2 = torch.arange(4 * 6).view(4, 1, 6)
    layout = ExpertLayout(num_experts=4, top_k=1, ep=2, tp=3, rank=4)
    w1_local, w2_local = shard_experts(w1, w2, layout)
    assert torch.equal(w1_local, w1[2:4][:, [2, 3, 8, 9]])
    assert torch.equal(w2_local, w2[2:4][:, :, [2, 3]])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_no_tokens(id_dtype: torch.dtype) -> None:
    case = make_case(0, num_tokens=0)
    w1, w2 = case.w1.requires_grad_(), case.w2.requires_grad_()
    result = reference_experts(case.tokens, case.ids.to(id_dtype), case.weights, w1, w2, ep=2, tp=2, expert_capacity=1)
    assert result.shape == (0, 10)
    result.sum().backward()
    assert torch.equal(w1.grad, torch.zeros_like(w1))
    assert torch.equal(w2.grad, torch.zeros_like(w2))


def test_all_tokens_to_one_expert() -> None:
    case = make_case(1)
    case = case.with_ids(torch.full_like(case.ids, -1).index_fill(1, torch.tensor([1]), 4))
    torch.testing.assert_close(reference_experts(*case.args, ep=3, tp=2), dense_formula(case), rtol=1e-12, atol=1e-12)


def test_all_slots_masked_gives_zero_and_ignores_bad_rows() -> None:
    case = make_case(2)
    case.tokens.fill_(math.nan)
    case.weights.fill_(math.nan)
    result = reference_experts(*case.with_ids(torch.full_like(case.ids, -1)).args, ep=2)
    assert torch.equal(result, torch.zeros_like(result))


def test_one_bad_token_stays_alone() -> None:
    case = make_case(4, masked=0.0)
    clean = reference_experts(*case.args, ep=2)
    case.tokens[6] = math.inf
    dirty = reference_experts(*case.args, ep=2)
    others = torch.arange(13) != 6
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[6].isfinite().all()


def test_same_expert_twice_counts_twice() -> None:
    case = make_case(5, top_k=2)
    case = case.with_ids(torch.full_like(case.ids, 3))
    torch.testing.assert_close(reference_experts(*case.args), dense_formula(case), rtol=1e-12, atol=1e-12)


def test_tokens_do_not_depend_on_each_other_or_on_memory_layout() -> None:
    case = make_case(6)
    whole = reference_experts(*case.args, ep=2)
    strided = [tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in case.args]
    assert not strided[3].is_contiguous()
    torch.testing.assert_close(reference_experts(*strided, ep=2), whole, rtol=1e-12, atol=1e-12)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    shuffled = reference_experts(case.tokens[order], case.ids[order], case.weights[order], case.w1, case.w2, ep=2)
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-12, atol=1e-12)


def test_rank_partials_add_up_to_the_layer() -> None:
    case = make_case(12).to(torch.float32)
    partials = []
    for rank in range(6):
        layout = ExpertLayout(num_experts=6, top_k=3, ep=3, tp=2, rank=rank)
        w1_local, w2_local = shard_experts(case.w1, case.w2, layout)
        partial = rank_partial(
            case.tokens, case.ids, case.weights, w1_local, w2_local, first_expert=layout.first_expert
        )
        owned = ((case.ids >= 2 * (rank // 2)) & (case.ids < 2 * (rank // 2) + 2)).any(dim=1)
        assert torch.equal(partial[~owned], torch.zeros_like(partial[~owned]))
        partials.append(partial)
    assert torch.equal(sum_partials(partials), reference_experts(*case.args, ep=3, tp=2))


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
    survivors = case.with_ids(case.ids.masked_fill(~torch.tensor(expected), -1))
    result = reference_experts(*case.args, ep=2, expert_capacity=capacity)
    torch.testing.assert_close(result, dense_formula(survivors), rtol=1e-12, atol=1e-12)


def with_changes(case: Case, **changes: object) -> dict:
    names = ("tokens", "top_k_ids", "top_k_weights", "w1", "w2")
    return dict(zip(names, case.args, strict=True)) | changes


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
    case = make_case(0).to(torch.float32)
    with pytest.raises(ValueError, match=message):
        reference_experts(**with_changes(case, **changes))
