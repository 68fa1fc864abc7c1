"""Triton and CUDA C++ side by side in ``bench_layers.py``: what both are handed, what is compared, and its report.

No kernel in CUDA C++ runs here: under the interpreter its twin in Triton stands in, and elsewhere the torch twins do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_layers
import layer_compare
import pytest
import torch
import torch.distributed as dist
from bench_layers import Measured, measure_point, report
from compare_cases import CPU, HalfRanks, cuda_stood_in_for, opened, same
from late import stopped
from layer_compare import COLUMNS, LAYER0, LAYER1, compared_launches, compared_row, rows_of_experts, what_cuda_lacks
from layer_points import Point, Split
from points import Ranks
from ranks import run_ranks
from report import append_csv
from torch import Tensor

import comet.fused
from comet import twin
from comet.config import MoEConfig, ParallelConfig
from comet.kernels import dispatch_gemm_cuda, gemm_combine_cuda
from comet.kernels.dispatch_gemm import DispatchGemmConfig, dispatch_gemm
from comet.kernels.gemm_combine import gemm_combine
from comet.tuner.timing import Timing

MODEL = MoEConfig(num_experts=4, top_k=2, hidden_size=128, ffn_size=32)
SPLIT = Split(16, 4, 2)


@pytest.mark.parametrize(
    ("hidden_size", "ffn_size", "num_panels"), [(128, 32, 1), (208, 4096, 1), (384, 144, 2), (1024, 48, 4)]
)
def test_kernels_are_handed_what_the_layer_hands_them(hidden_size: int, ffn_size: int, num_panels: int) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=hidden_size, ffn_size=ffn_size)
    calls: list[tuple[Any, ...]] = []
    note = lambda *arguments: calls.append(arguments)  # noqa: E731
    with (
        opened(config, HalfRanks(0, CPU, None), ParallelConfig()) as point,
        cuda_stood_in_for({dispatch_gemm_cuda: note, gemm_combine_cuda: note}),
    ):
        (split, path), plan = next(iter(point.paths.items())), next(iter(point.plans.values()))
        path.ops = comet.fused
        hidden = point.tokens.new_zeros(plan.routed_row_ids.numel(), ffn_size)
        with patch.object(comet.fused, "dispatch_gemm", note), patch.object(comet.fused, "gemm_combine", note):
            comet.fused.layer0(point.tokens, point.layer.w1, plan, point.workspace, path.settings, save_pre=False)
            comet.fused.layer1(hidden, point.layer.w2, plan, point.workspace, path.settings)
            layer0 = layer_compare.layer0_kernels(point, path, plan)
            assert layer0["layer0_triton"]() is calls[-1][2]
        with patch.object(layer_compare, "gemm_combine", note):
            layer1 = layer_compare.layer1_kernels(point, path, plan, hidden)
            assert layer1["layer1_triton"]() is calls[-1][3]
        assert [layer0[name]() is calls[-1][2] for name in LAYER0[1:]] == [True, True]
        assert layer1["layer1_cuda"]() is calls[-1][3]
    assert split.num_panels == num_panels
    wanted0, wanted1, triton0, triton1, cuda0, alone, cuda1 = calls
    assert [tuple(call[2].shape) for call in (triton0, cuda0, alone)] == [tuple(wanted0[2].shape)] * 3
    assert [[tuple(result.shape) for result in call[2:4]] for call in (triton1, cuda1)] == [
        [tuple(result.shape) for result in wanted1[2:4]]
    ] * 2
    for found, wanted in ((triton0, wanted0), (cuda0, wanted0), (triton1, wanted1), (cuda1, wanted1)):
        assert same(found[:2], wanted[:2])
    *rest, config0 = wanted0[3:]
    assert same(triton0[3:], (*rest, replace(config0, beside=False)))
    assert same(cuda0[3:], tuple(rest))
    pre, wire, sends, table = rest
    assert alone[4].epoch.tolist() == [0]
    assert alone[5].counts.tolist() == [0]
    assert same(alone[3:], (pre, replace(wire, epoch=alone[4].epoch), replace(sends, counts=alone[5].counts), table))
    wire, returns, table, config1 = wanted1[4:]
    assert config1.beside
    assert same(triton1[4:], (wire, returns, replace(table, segments=None), config1))
    assert same(cuda1[4:], (wire, returns, table, num_panels))


def interpreted(rank: int, world_size: int, other: int) -> dict[str, Any]:
    """Both layers in Triton; with the arguments of CUDA C++ once more, off by ``other`` in places that do not count."""
    given: list[str] = []

    def layer0(x: Tensor, w1: Tensor, hidden: Tensor, pre: None, wire: Any, sends: Any, table: Any) -> None:
        given.append("alone" if int(wire.epoch) == 0 else "layer 0")
        tile = path.settings.tile
        config = DispatchGemmConfig(block_f=tile.block_f, block_k=tile.block_k, push_cols=128)
        dispatch_gemm(x, w1, hidden, pre, wire, sends, table, config)
        starts, counts = table.segments
        hidden[~rows_of_experts(starts, counts, len(hidden))] += other

    def layer1(
        a: Tensor, b: Tensor, y: Tensor, out: Tensor, wire: Any, returns: Any, table: Any, num_panels: int
    ) -> None:
        given.append("layer 1")
        config = layer_compare.combine_config(path.settings, num_panels, out)
        gemm_combine(a, b, y, out, wire, returns, replace(table, segments=None), replace(config, beside=False))

    ranks, failures = HalfRanks(rank, CPU, dist.group.WORLD), dict[str, str]()
    with (
        opened(MODEL, ranks, ParallelConfig(ep=world_size)) as point,
        cuda_stood_in_for({dispatch_gemm_cuda: layer0, gemm_combine_cuda: layer1}),
    ):
        (path,) = point.paths.values()
        path.use_kernels, path.ops = True, comet.fused
        point.plans.update({key: path.plan(point.ids, point.weights) for key in point.plans})
        launches = compared_launches(point, ranks, failures)
    return {"launches": list(launches), "failures": failures, "given": given}


def test_both_layers_agree_under_the_interpreter() -> None:
    for found in run_ranks(interpreted, 2, 1, interpret=True):
        assert found["failures"] == {}
        assert found["launches"] == [*LAYER0, *LAYER1]
        assert found["given"] == ["layer 0", "alone", "layer 1"] * 2  # without rows, then with them


def with_twins(rank: int, world_size: int, trouble: dict[str, str]) -> Measured:
    """A measured point in which torch twins take the places of the kernels; ``trouble`` has what is wrong with some."""

    def kernel(name: str, layer: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if trouble.get(name) == "raises":
                raise RuntimeError(f"rank {rank} gave up")
            with stopped(rank, point.workspace.comm) if trouble.get(name) == "stops" else nullcontext():
                return layer() + (1e-3 if trouble.get(name) == "differs" and rank == 1 else 0)

        return run

    def layer0(point: Point, path: Any, plan: Any) -> dict[str, Any]:
        handed = point.tokens, point.layer.w1, plan, point.workspace, path.settings
        return {name: kernel(name, lambda: twin.layer0(*handed, save_pre=False)[0]) for name in LAYER0}

    def layer1(point: Point, path: Any, plan: Any, hidden: Tensor) -> dict[str, Any]:
        handed = hidden, point.layer.w2, plan, point.workspace, path.settings
        return {name: kernel(name, lambda: twin.layer1(*handed)) for name in LAYER1}

    ranks = Ranks(rank, CPU, dist.group.WORLD if world_size > 1 else None)
    with (
        opened(MODEL, ranks, ParallelConfig(ep=world_size)) as point,
        patch.object(layer_compare, "layer0_kernels", layer0),
        patch.object(layer_compare, "layer1_kernels", layer1),
    ):
        return measure_point(point, ranks, rounds=1, compare=True)


@pytest.mark.parametrize(
    ("trouble", "missing"),
    [
        ({}, {}),
        ({"layer0_cuda": "differs"}, {"layer0_cuda": "differs from layer0_triton"}),
        ({"layer0_cuda_gemm": "differs"}, {"layer0_cuda_gemm": "differs from layer0_triton"}),
        ({"layer0_triton": "raises"}, {"layer0_triton": "RuntimeError: rank 0 gave up"}),
        ({"layer1_cuda": "stops"}, {"layer1_cuda": "CommTimeoutError: rank 0 waited 1.0 s for rank 1"}),
        ({"layer1_triton": "raises", "layer1_cuda": "differs"}, {"layer1_triton": "RuntimeError: rank 0 gave up"}),
        (dict.fromkeys(LAYER0, "raises"), dict.fromkeys(LAYER0, "RuntimeError: rank 0") | dict.fromkeys(LAYER1, "")),
    ],
)
def test_what_fails_or_differs_is_named_and_not_timed(trouble: dict[str, str], missing: dict[str, str]) -> None:
    found = run_ranks(with_twins, 2, trouble)
    for splits, (row,) in found:
        assert [split["failures"] for split in splits] == [""]
        assert {name for name in (*LAYER0, *LAYER1) if row[f"{name}_ms"] is None} == set(missing)
        assert set(row["quantiles"]) == {*LAYER0, *LAYER1} - set(missing)
        assert (row["ratio0"] is None) == bool({"layer0_triton", "layer0_cuda"} & set(missing))
        assert (row["ratio1"] is None) == bool({"layer1_triton", "layer1_cuda"} & set(missing))
    failures = found[0].compared[0]["failures"]
    wanted = [f"{name}: {why}" for name, why in missing.items() if why]
    assert len(failures.split("; ")) == max(len(wanted), 1)
    assert all(start in failures for start in wanted)


def test_a_kernel_that_cannot_be_captured_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_variants = bench_layers.timed_variants

    def without_one(launches: Any, point: Point, ranks: Ranks, failures: dict[str, str]) -> Any:
        failures["layer1_cuda"] = "RuntimeError: not in a graph"
        return timed_variants({n: launch for n, launch in launches.items() if n != "layer1_cuda"}, point, ranks, {})

    monkeypatch.setattr(bench_layers, "timed_variants", without_one)
    (split,), (row,) = with_twins(0, 1, {})
    assert split["failures"] == ""
    assert row["failures"] == "layer1_cuda: RuntimeError: not in a graph"
    assert row["layer1_cuda_ms"] is None
    assert row["layer1_triton_ms"] > 0


def test_a_kernel_refuses_what_it_cannot_take() -> None:
    launched = lambda *_: pytest.fail("launched")  # noqa: E731
    with (
        opened(MODEL, Ranks(0, CPU, None), ParallelConfig()) as point,
        cuda_stood_in_for({dispatch_gemm_cuda: launched, gemm_combine_cuda: launched}),
    ):
        (path,), (plan,) = point.paths.values(), point.plans.values()
        hidden = point.tokens.new_zeros(plan.routed_row_ids.numel(), MODEL.ffn_size)
        layer0 = layer_compare.layer0_kernels(point, path, plan)
        for name in LAYER0[1:]:
            with pytest.raises(ValueError, match=r"w1=\(4, 64, 128\) of torch.float32 must be of a kind that"):
                layer0[name]()
        with pytest.raises(ValueError, match=r"w2=\(4, 128, 32\) of torch.float32 must be of a kind that"):
            layer_compare.layer1_kernels(point, path, plan, hidden)["layer1_cuda"]()


def test_rows_of_experts_example() -> None:
    starts, counts = torch.tensor([0, 4, 6]), torch.tensor([3, 1])
    assert rows_of_experts(starts, counts, 8).int().tolist() == [1, 1, 1, 0, 1, 0, 0, 0]


def lacking(rank: int, world_size: int, first_without: int) -> str:
    with patch.object(layer_compare, "is_available", lambda _: rank < first_without):
        return what_cuda_lacks(Ranks(rank, CPU, dist.group.WORLD))


def test_all_ranks_need_the_kernels() -> None:
    assert run_ranks(lacking, 2, 2) == ["", ""]
    first, second = run_ranks(lacking, 2, 1)
    assert first == "not on every rank"
    assert second == (layer_compare.what_is_missing() or "cpu is no GPU of sm_90")
    assert all(run_ranks(lacking, 2, 0))


def test_the_report_has_a_table_and_a_csv_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = dict(layer0_triton=3.0, layer0_cuda=2.0, layer0_cuda_gemm=1.5, layer1_triton=1.0)
    timings = {name: Timing(ms, ms, ms) for name, ms in times.items()} | {"plan": Timing(9, 9, 9)}
    row = compared_row(SPLIT, timings, {"layer1_cuda": "differs from layer1_triton"})
    assert (row["ratio0"], row["ratio1"], row["layer1_cuda_ms"]) == (1.5, None, None)
    assert set(row["quantiles"]) == set(times)
    keys = {"model": "tiny", "tokens": 64, "ep": 1, "tp": 1, "routing": "uniform"}
    compared = [keys | row, keys | {"failures": "point: no"}]
    append_csv(tmp_path / "compare.csv", compared, COLUMNS)
    with (tmp_path / "compare.csv").open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS
    assert [line["layer0_cuda_gemm_ms"] for line in read] == ["1.5", ""]
    report(Measured([keys | {"failures": "point: no"}], compared), {}, tmp_path)
    *lines, last = capsys.readouterr().out.splitlines()
    columns = ["model", "tokens", *(f"{name}_ms" for name in LAYER0), "ratio0", "layer1_triton_ms", "failures"]
    assert lines[2].split() == columns
    assert lines[3].split()[:7] == ["tiny", "64", "3.000", "2.000", "1.500", "1.500", "1.000"]
    assert "compared" not in json.loads(last)
    assert json.loads((tmp_path / "bench_layers.json").read_text())["compared"] == json.loads(json.dumps(compared))
