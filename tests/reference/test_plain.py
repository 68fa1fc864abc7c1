"""The plain path and the gathered reference on several gloo ranks, against the reference in one process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from comet.comm.collectives import all_gather_stacked, all_to_all_rows
from comet.layout import ExpertLayout
from comet.reference.layer import reference_experts, shard_experts
from comet.reference.plain import gather_reference_experts, grouped_matmul, make_exchange, plain_experts

PATHS = {"plain": plain_experts, "reference": gather_reference_experts}
HIDDEN, FFN, EXPERTS = 16, 32, 8
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


@dataclass(frozen=True)
class Case:
    tokens: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    w1: Tensor
    w2: Tensor


def layout_of(case: Case, ep: int, tp: int, rank: int) -> ExpertLayout:
    return ExpertLayout(num_experts=EXPERTS, top_k=case.ids[0].shape[1], ep=ep, tp=tp, rank=rank)


def make_case(kind: str, world_size: int, dtype: torch.dtype, seed: int) -> Case:
    print(f"case {kind} world_size={world_size} dtype={dtype} seed={seed}")
    generator = torch.Generator().manual_seed(seed)
    top_k = 3
    counts = [int(torch.randint(0, 24, (), generator=generator)) for _ in range(world_size)]
    if kind == "empty_rank":
        counts[-1] = 0
    if kind == "all_empty":
        counts = [0] * world_size
    wide = torch.promote_types(dtype, torch.float32)
    ids = [torch.rand(n, EXPERTS, generator=generator).topk(top_k).indices.int() for n in counts]
    weights = [torch.rand(n, top_k, generator=generator, dtype=wide) for n in counts]
    if kind == "one_expert":
        ids = [torch.full_like(rank_ids, EXPERTS - 1) for rank_ids in ids]  # every slot of every token
    if kind == "masked":
        for rank_ids, rank_weights in zip(ids, weights, strict=True):
            mask = torch.rand(rank_ids.shape, generator=generator) < 0.4
            rank_ids[mask], rank_weights[mask] = -1, float("nan")
    if kind == "all_masked":
        ids = [torch.full_like(rank_ids, -1) for rank_ids in ids]
    tokens = [torch.randn(HIDDEN, n, generator=generator, dtype=dtype).T for n in counts]  # non-contiguous
    w1 = torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=generator, dtype=dtype) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, FFN, generator=generator, dtype=dtype) / FFN**0.5
    return Case(tokens, ids, weights, w1, w2)


def run_path(rank: int, world_size: int, path: str, case: Case, ep: int, tp: int) -> list[Tensor]:
    """Output and gradients of tokens, weights, w1 and w2 on this rank, for the loss sum(y * y) / 2."""
    layout = layout_of(case, ep, tp, rank)
    w1, w2 = (weight.clone().requires_grad_() for weight in shard_experts(case.w1, case.w2, layout))
    tokens, weights = (tensor.clone().requires_grad_() for tensor in (case.tokens[rank], case.weights[rank]))
    group = dist.group.WORLD if world_size > 1 else None
    output = PATHS[path](tokens, case.ids[rank], weights, w1, w2, layout, group)
    assert output.dtype == tokens.dtype
    assert output.shape == tokens.shape
    (output.float() if output.dtype == torch.bfloat16 else output).square().sum().div(2).backward()
    return [output.detach(), *(leaf.grad for leaf in (tokens, weights, w1, w2))]


def run_cases(rank: int, world_size: int, cases: list[dict[str, Any]], ep: int, tp: int) -> list[dict[str, Any]]:
    return [{path: run_path(rank, world_size, path, Case(**case), ep, tp) for path in PATHS} for case in cases]


def expected(case: Case, ep: int, tp: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """The same five tensors of every rank from one process that holds all tokens, computed in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    world_size = len(case.tokens)
    tokens = torch.cat(case.tokens).to(dtype).requires_grad_()
    weights = torch.cat(case.weights).to(wide).requires_grad_()
    w1, w2 = case.w1.to(dtype).requires_grad_(), case.w2.to(dtype).requires_grad_()
    output = reference_experts(tokens, torch.cat(case.ids), weights, w1, w2, ep=ep, tp=tp)
    output.to(wide).square().sum().div(2).backward()
    sizes = [len(rank_tokens) for rank_tokens in case.tokens]
    rows = zip(*(tensor.split(sizes) for tensor in (output.detach(), tokens.grad, weights.grad)), strict=True)
    shards = (shard_experts(w1.grad, w2.grad, layout_of(case, ep, tp, rank)) for rank in range(world_size))
    return [[*row, *shard] for row, shard in zip(rows, shards, strict=True)]


@pytest.mark.parametrize(("ep", "tp"), LAYOUTS)
def test_output_and_gradients_equal_the_reference(ep: int, tp: int) -> None:
    world_size = ep * tp
    kinds = ["uniform", "empty_rank", "all_empty", "one_expert", "masked", "all_masked"]
    cases = [make_case(kind, world_size, torch.float64, 100 * world_size + i) for i, kind in enumerate(kinds)]
    results = run_ranks(run_cases, world_size, [asdict(case) for case in cases], ep, tp)
    for kind, case, *ranks in zip(kinds, cases, *results, strict=True):
        exact = expected(case, ep, tp, torch.float64)
        for rank, got in enumerate(ranks):
            for path, tensors in got.items():
                for name, actual, wanted in zip(
                    ("y", "d tokens", "d weights", "d w1", "d w2"), tensors, exact[rank], strict=True
                ):
                    message = f"{kind}, {path}, rank {rank}, {name}"
                    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, t=message: t + m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_the_same_dtype(dtype: torch.dtype) -> None:
    """At most twice the error of the reference in the same dtype, both against float64."""
    case = make_case("uniform", 4, dtype, 7)
    ranks = run_ranks(run_cases, 4, [asdict(case)], 2, 2)
    exact, same = expected(case, 2, 2, torch.float64), expected(case, 2, 2, dtype)
    for rank in range(4):
        for path, tensors in ranks[rank][0].items():
            for index, actual in enumerate(tensors):
                wanted = exact[rank][index]
                allowed = 2 * (same[rank][index].double() - wanted).norm()
                # bf16 pre-activations are rounded once more on the plain path than in the reference
                allowed *= 2 if path == "plain" and dtype == torch.bfloat16 else 1
                error = (actual.double() - wanted).norm()
                assert error <= allowed + 1e-6 * wanted.norm(), (
                    f"rank {rank}, {path}, tensor {index}: {error} > {allowed}"
                )


def gathered_equals_reference(rank: int, world_size: int, fields: dict[str, Any]) -> bool:
    case = Case(**fields)
    layout = layout_of(case, 2, 2, rank)
    w1, w2 = shard_experts(case.w1, case.w2, layout)
    output = gather_reference_experts(
        case.tokens[rank], case.ids[rank], case.weights[rank], w1, w2, layout, dist.group.WORLD
    )
    return torch.equal(
        output, reference_experts(case.tokens[rank], case.ids[rank], case.weights[rank], case.w1, case.w2, ep=2, tp=2)
    )


def test_gathered_reference_is_bitwise_the_reference() -> None:
    assert run_ranks(gathered_equals_reference, 4, asdict(make_case("masked", 4, torch.float32, 3))) == [True] * 4


def exchange_example(rank: int, world_size: int) -> dict[str, object]:
    layout = ExpertLayout(num_experts=4, top_k=2, ep=2, tp=1, rank=rank)
    ids = [torch.tensor([[3, 0], [1, -1]]), torch.empty(0, 2, dtype=torch.int64)][rank].int()
    exchange = make_exchange(ids, layout, dist.group.WORLD)
    fields = ("send_entries", "send_counts", "recv_counts", "recv_order", "expert_counts", "expert_ends")
    values = {name: getattr(exchange, name) for name in fields}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def test_exchange_example() -> None:
    first, second = run_ranks(exchange_example, 2)
    assert first["send_entries"] == [1, 2, 0]
    assert first["send_counts"] == (2, 1)
    assert first["recv_counts"] == (2, 0)
    assert first["expert_counts"] == (1, 1)
    assert first["expert_ends"] == [1, 2]
    assert second["recv_counts"] == (1, 0)
    assert second["expert_counts"] == (0, 1)
    assert second["send_entries"] == []


def test_grouped_matmul_example() -> None:
    rows, weights = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[10.0]], [[100.0]]])
    assert grouped_matmul(rows, weights, (1, 2), torch.tensor([1, 3]).int()).tolist() == [[10.0], [200.0], [300.0]]


def collectives_example(rank: int, world_size: int) -> tuple[list, ...]:
    rows = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0]]][rank], requires_grad=True)
    sends, receives = [((1, 2), (1, 1)), ((1, 0), (2, 0))][rank]
    received = all_to_all_rows(rows, sends, receives, None)
    (received * torch.tensor([10.0, 20.0])[:, None]).sum().backward()
    tensor = torch.tensor([rank + 1.0], requires_grad=True)
    stacked = all_gather_stacked(tensor, None)
    stacked.backward(torch.tensor([[[3.0], [4.0]], [[5.0], [6.0]]][rank]))
    return received.tolist(), rows.grad.tolist(), stacked.tolist(), tensor.grad.tolist()


def test_collectives_examples() -> None:
    first, second = run_ranks(collectives_example, 2)
    assert first == ([[1.0], [4.0]], [[10.0], [10.0], [20.0]], [[1.0], [2.0]], [8.0])
    assert second == ([[2.0], [3.0]], [[20.0]], [[1.0], [2.0]], [10.0])


def message_of_bad_ids(rank: int, world_size: int) -> str:
    layout = ExpertLayout(num_experts=4, top_k=1, ep=2, tp=1, rank=rank)
    try:
        make_exchange(torch.tensor([[0], [9 if rank == 1 else 1]]), layout, None)
    except ValueError as error:
        return str(error)
    return ""


def test_bad_ids_are_reported_on_every_rank() -> None:
    first, second = run_ranks(message_of_bad_ids, 2)
    rule = r"every id must be -1 (masked) or in [0, num_experts=4)"
    assert first == f"top_k_ids of rank 1 contain 1 bad ids; {rule}"
    assert second == f"top_k_ids of rank 1 contain 9; {rule}"


def message_of_frozen(rank: int, world_size: int, path: str, wanted: list[tuple[str, ...]]) -> str:
    """What a forward pass says whose leaves ``wanted[rank]`` want gradients; without words, the backward pass ends."""
    case = make_case("uniform", world_size, torch.float64, 5)
    layout = layout_of(case, world_size, 1, rank)
    w1, w2 = shard_experts(case.w1, case.w2, layout)
    leaves = {"tokens": case.tokens[rank], "weights": case.weights[rank], "w1": w1, "w2": w2}
    leaves = {name: leaf.clone().requires_grad_(name in wanted[rank]) for name, leaf in leaves.items()}
    tokens, *rest = leaves.values()
    try:
        output = PATHS[path](tokens, case.ids[rank], *rest, layout, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    output.sum().backward()
    assert all((leaf.grad is not None) == (name in wanted[rank]) for name, leaf in leaves.items())
    return ""


ALL = ("tokens", "weights", "w1", "w2")
ROWS = "requires_grad=[True, False] of tokens, w1 or w2 on ranks 0 to 1 must be equal on all ranks"
TOKENS = "requires_grad=[True, False] of tokens on ranks 0 to 1 must be equal on all ranks"


@pytest.mark.parametrize(
    ("path", "wanted", "message"),
    [
        ("plain", [ALL, ("weights", "w1", "w2")], TOKENS),
        ("plain", [("w1",), ("weights",)], ROWS),
        ("plain", [("w2",), ()], ROWS),
        ("plain", [("w1", "weights"), ("w2",)], ""),  # the same messages in the backward pass
        ("reference", [("w1", "tokens"), ("tokens",)], "requires_grad=[True, False] of w1 on ranks 0 to 1"),
        ("reference", [("w1", "w2"), ("w1",)], "requires_grad=[True, False] of w2 on ranks 0 to 1"),
        ("reference", [ALL, ("w1", "w2")], ""),
    ],
)
def test_all_ranks_raise_where_one_would_wait_in_the_backward_pass(
    path: str, wanted: list[tuple[str, ...]], message: str
) -> None:
    said = run_ranks(message_of_frozen, 2, path, wanted)
    assert said[0] == said[1]
    assert said[0].startswith(message)
    assert bool(said[0]) == bool(message)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(16)}, r"tokens of shape \(16,\) must be \(T, D\)"),
        ({"ids": torch.zeros(2, 1).int()}, r"top_k_ids of shape \(2, 1\) must be \(T, K\) = \(2, 2\)"),
        ({"weights": torch.zeros(1, 2)}, r"top_k_weights of shape \(1, 2\) must be \(T, K\) = \(2, 2\)"),
        ({"ids": torch.zeros(2, 2)}, r"top_k_ids of dtype torch.float32 must be torch.int32 or torch.int64"),
        ({"w1": torch.zeros(4, 32, 16)}, r"w1 of shape \(4, 32, 16\) must be \(e, 2F, D\) = \(4, 64, 16\)"),
        (
            {"w2": torch.zeros(3, 16, 32)},
            r"w2 of shape \(3, 16, 32\) must be \(e, D, F\) = \(4, 16, F\) with e=4 of num",
        ),
        ({"w2": torch.zeros(4, 16, 32).double()}, r"w2 of dtype torch.float64 must be torch.float32"),
        ({"ids": torch.full((2, 2), 4).int()}, r"top_k_ids .*contain 4; every id must be -1 \(masked\) or in \[0, "),
    ],
)
def test_errors_name_field_value_and_rule(path: str, change: dict[str, Tensor], message: str) -> None:
    layout = ExpertLayout(num_experts=4, top_k=2, ep=1, tp=1, rank=0)
    inputs = {
        "tokens": torch.zeros(2, 16),
        "ids": torch.zeros(2, 2).int(),
        "weights": torch.zeros(2, 2),
        "w1": torch.zeros(4, 64, 16),
        "w2": torch.zeros(4, 16, 32),
    }
    with pytest.raises(ValueError, match=message):
        PATHS[path](*(inputs | change).values(), layout, None)


def wrong_group(rank: int, world_size: int) -> list[str]:
    messages = []
    for ep, claimed in ((4, rank), (2, 1 - rank)):
        layout = ExpertLayout(num_experts=4, top_k=1, ep=ep, tp=1, rank=claimed)
        try:
            make_exchange(torch.tensor([[0]]), layout, None)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_group_must_be_the_layouts() -> None:
    first, _ = run_ranks(wrong_group, 2)
    assert first[0] == "process_group of 2 ranks must have ep x tp = 4 of the layout"
    assert first[1] == "rank=1 of the layout must be this process's rank 0 in process_group"
