"""The model of a layer over nodes: its example, its limits, and the choices that measurements confirmed."""

from dataclasses import replace

import pytest
import torch

from comet.config import MoEConfig, ParallelConfig
from comet.schedule.choice import Problem
from comet.schedule.network import (
    Rates,
    Runs,
    best_runs,
    expected_rows,
    layer_times,
    node_tokens,
    row_bytes,
    training_times,
)

TWO_NODES = ParallelConfig(ep=2, node_size=1)


def problem(hidden_size: int, ffn_size: int, num_experts: int, top_k: int) -> Problem:
    moe = MoEConfig(hidden_size=hidden_size, ffn_size=ffn_size, num_experts=num_experts, top_k=top_k)
    return Problem(moe, TWO_NODES, 8192, torch.bfloat16)


MIXTRAL, QWEN3, DEEPSEEK = problem(4096, 14336, 8, 2), problem(2048, 768, 128, 8), problem(7168, 2048, 128, 8)


def test_worked_example_of_a_pass() -> None:
    rows = 8192 * 8 / 2
    tflops = rows * 6 * 2048 * 768 / 4e9  # own tokens take 4 ms
    sent = expected_rows(QWEN3.moe, TWO_NODES, 8192) * row_bytes(QWEN3.moe, 2, trains=False)
    rates = Rates(tflops=tflops, network_gbs=sent / 4e6, run_ms=0.0)  # each leg takes 2 ms
    times = layer_times(QWEN3, rates, Runs(1, is_split=True))
    assert times.layer == pytest.approx(8)
    assert (times.gemm, times.network, times.nvlink) == pytest.approx((8, 4, 0))
    assert times.bound == "gemm"
    assert (times.in_node, times.hidden) == pytest.approx((8, 1))
    assert layer_times(QWEN3, rates, Runs(0, is_split=False)).layer == pytest.approx(12)
    slow = layer_times(QWEN3, replace(rates, network_gbs=rates.network_gbs / 4), Runs(1, is_split=True))
    assert (slow.layer, slow.in_node, slow.network) == pytest.approx((20, 8, 16)), "guests at 8, their sums at 20"
    assert slow.hidden == pytest.approx(1 / 4)


@pytest.mark.parametrize("case", [MIXTRAL, QWEN3, DEEPSEEK])
@pytest.mark.parametrize(
    "runs", [Runs(parts, split) for parts in (1, 2, 4) for split in (True, False)] + [Runs(0, False)]
)
def test_no_pass_is_shorter_than_what_bounds_it(case: Problem, runs: Runs) -> None:
    for nodes, network_gbs in ((2, 50.0), (4, 5.0), (4, 500.0)):
        parallel = replace(TWO_NODES, ep=nodes)
        times = layer_times(replace(case, parallel=parallel), Rates(network_gbs=network_gbs), runs)
        assert times.layer >= max(times.gemm, times.network) * (1 - 1e-9)


def test_guests_are_computed_in_the_parts_that_were_measured_best() -> None:
    """``benchmarks/results/nodes.md`` has the table."""
    cases = (MIXTRAL, QWEN3, DEEPSEEK)
    assert [best_runs(case, Rates()) for case in cases] == [Runs(parts, is_split=True) for parts in (1, 2, 1)]
    assert [node_tokens(case) for case in cases] == [8192] * 3


@pytest.mark.parametrize("case", [MIXTRAL, QWEN3, DEEPSEEK])
def test_few_tokens_are_one_run_where_guests_of_all_nodes_have_memory(case: Problem) -> None:
    few, one = replace(case, num_tokens=2000), Runs(0, is_split=False)
    assert best_runs(few, Rates()) == one
    assert node_tokens(few) == 2 * 2048
    assert best_runs(few, Rates(), joins=False).parts
    eight = replace(few, parallel=replace(TWO_NODES, ep=8))
    assert best_runs(eight, Rates()).parts, "three of seven slots have memory"
    assert node_tokens(eight) == 2000


def test_launched_passes_are_faster_on_the_path_that_was_measured_faster() -> None:
    """Milliseconds with a backward pass over a link of 21 GB/s, inside nodes and plain, of the same table."""
    phi, qwen2 = problem(4096, 6400, 16, 2), problem(2048, 1408, 60, 4)
    measured = [
        (QWEN3, 2048, 10.9, 9.82), (QWEN3, 8192, 12.4, 33.6), (DEEPSEEK, 2048, 25.6, 35.9), (DEEPSEEK, 8192, 47.6, 131),
        (MIXTRAL, 2048, 14.2, 12.9), (MIXTRAL, 8192, 33.4, 44.5), (phi, 8192, 20.1, 28.7), (qwen2, 2048, 10.0, 6.27),
        (qwen2, 8192, 9.69, 19.7), (phi, 2048, 8.83, 8.88),
    ]  # fmt: skip
    for case, num_tokens, inside_ms, plain_ms in measured:
        inside, plain = training_times(replace(case, num_tokens=num_tokens), Rates(network_gbs=21.0))
        assert plain == pytest.approx(plain_ms, rel=0.1)
        if abs(inside_ms - plain_ms) > 0.1:
            assert (inside < plain) == (inside_ms < plain_ms), (case, num_tokens)
