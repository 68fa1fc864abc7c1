"""Weight gradients of several runs as one product."""

from types import SimpleNamespace

import torch
from layer_cases import LayerCase
from layer_ranks import build_layer
from torch import Tensor

from comet.layer.rails.merged_wgrad import MergedWgrad, RunOperands, merged_bytes


def plan(starts: list[int], counts: list[int], num_rows: int) -> SimpleNamespace:
    """The fields of a plan that are read."""
    ints = dict(dtype=torch.int32)
    return SimpleNamespace(
        segment_starts=torch.tensor(starts, **ints),
        segment_counts=torch.tensor(counts, **ints),
        routed_row_ids=torch.zeros(num_rows, **ints),
    )


def operands(values: list[float]) -> RunOperands:
    return RunOperands(*(torch.tensor(values)[:, None] for _ in range(4)))


def test_worked_example_of_the_places() -> None:
    nan = float("nan")
    merged = MergedWgrad(None, [plan([0, 4, 8], [2, 1], 8), plan([0, 4, 8], [1, 3], 8)])  # type: ignore[arg-type, list-item]
    merged.add(operands([10, 11, nan, nan, 12, nan, nan, nan]))
    merged.add(operands([20, nan, nan, nan, 21, 22, 23, nan]))
    assert merged._starts.tolist() == [0, 3, 7]
    assert merged._counts.tolist() == [3, 4]
    assert all(each[:7, 0].tolist() == [10, 11, 20, 12, 21, 22, 23] for each in merged._merged)


def test_bytes_are_those_of_the_example() -> None:
    w1, w2 = torch.zeros(1, 64, 64), torch.zeros(1, 64, 32)
    assert merged_bytes([plan([0], [], 40), plan([0], [], 60)], w1, w2) == 89600  # type: ignore[list-item]


def test_products_are_those_of_each_run_added_up() -> None:
    torch.manual_seed(5)
    backend = build_layer(LayerCase("alone", 1, 1, (40,), 4, 2), 0, "twin").experts.backend
    plans, parts, runs = [], [], []
    for _ in range(3):
        ids = torch.rand(40, 4).argsort(1)[:, :2].to(torch.int32)
        plans.append(backend.plan(ids, torch.rand(40, 2)))
        rows = plans[-1].routed_row_ids.numel()
        runs.append(RunOperands(*(torch.randn(rows, columns) for columns in (64, 32, 32, 32))))
        pairs = (runs[-1].grad_pre, runs[-1].rows), (runs[-1].grad_rows, runs[-1].weighted_hidden)
        parts.append([backend.fc2_wgrad(*pair, plans[-1]) for pair in pairs])
    merged = MergedWgrad(backend, plans)
    for run in runs:
        merged.add(run)
    for found, wanted in zip(merged.gradients(), zip(*parts, strict=True), strict=True):
        total: Tensor = sum(wanted[1:], wanted[0])
        torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-5)
