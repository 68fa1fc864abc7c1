"""Triton and CUDA C++ side by side in block FP8 in ``bench_layers.py``: what both are handed, compared and reported.

No kernel in CUDA C++ runs here: under the interpreter its twin in Triton stands in for it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import fp8_compare
import layer_compare
import pytest
import torch
import torch.distributed as dist
from compare_cases import CPU, HalfRanks, cuda_stood_in_for, opened, same
from fp8_compare import fp8_layer0_kernels, fp8_layer1_kernels, quantize_weights
from layer_compare import LAYER0, LAYER1, compared_launches, compared_rows, rows_of_experts
from points import Ranks
from ranks import run_ranks
from torch import Tensor

import comet.fused
from comet.config import MoEConfig, ParallelConfig
from comet.kernels import fp8_dispatch_gemm_cuda, fp8_gemm_combine_cuda
from comet.kernels.arguments import Scaled
from comet.kernels.dispatch_gemm import DispatchGemmConfig
from comet.kernels.fp8_dispatch_gemm import fp8_dispatch_gemm
from comet.kernels.gemm_combine import gemm_combine
from comet.quantize import FP8
from comet.tuner.timing import Timing

MODEL = MoEConfig(num_experts=4, top_k=2, hidden_size=384, ffn_size=128)
NAMES = [f"fp8_{name}" for name in (*LAYER0, *LAYER1)]


@pytest.mark.parametrize(("hidden_size", "num_panels"), [(128, 1), (384, 2), (1152, 4)])
def test_kernels_are_handed_what_the_layer_hands_them(hidden_size: int, num_panels: int) -> None:
    calls: list[tuple[Any, ...]] = []
    packed: list[tuple[Any, ...]] = []
    note = lambda *arguments: calls.append(arguments)  # noqa: E731
    with ExitStack() as stack:
        config = replace(MODEL, hidden_size=hidden_size)
        point = stack.enter_context(opened(config, HalfRanks(0, CPU, None), ParallelConfig()))
        stack.enter_context(cuda_stood_in_for({fp8_dispatch_gemm_cuda: note, fp8_gemm_combine_cuda: note}))
        for module in (comet.fused, fp8_compare):
            for name in ("fp8_dispatch_gemm", "gemm_combine"):
                stack.enter_context(patch.object(module, name, note))
            stack.enter_context(patch.object(module, "pack_rows", lambda *arguments: packed.append(arguments)))
        (path,), (plan,) = point.paths.values(), point.plans.values()
        w1, w2 = quantize_weights(point)
        given = plan, point.workspace, path.settings
        hidden = comet.fused.layer0_fp8(point.tokens, FP8(elements=w1.elements, scales=w1.scales), *given)
        comet.fused.layer1_fp8(hidden, FP8(elements=w2.elements, scales=w2.scales), *given)
        rows = Scaled(elements=hidden.elements, scales=hidden.scales.T)
        results0 = [kernel() for kernel in fp8_layer0_kernels(point, path, plan, w1)]
        results1 = [kernel() for kernel in fp8_layer1_kernels(point, path, plan, rows, w2)]
    wanted0, wanted1, triton0, cuda0, alone, triton1, cuda1 = calls
    assert len(packed) == 3, "by the layer, in Triton and in CUDA C++, and not for the GEMM alone"
    assert same(packed[0], packed[1])
    assert same(packed[0], packed[2])
    for result, call in zip(results0, (triton0, cuda0, alone), strict=True):
        assert result is call[1]
        assert [tuple(part.shape) for part in (result.elements, result.scales)] == [
            tuple(part.shape) for part in (wanted0[1].elements, wanted0[1].scales)
        ]
        assert same(call[0], wanted0[0])
    *rest, config0 = wanted0[2:]
    wire, sends, table = rest
    assert same(triton0[2:], (wire, sends, replace(table, segments=None), config0))
    assert same(cuda0[2:], tuple(rest))
    assert alone[2].epoch.tolist() == [0]
    assert alone[3].counts.tolist() == [0]
    assert same(alone[2:], (replace(wire, epoch=alone[2].epoch), replace(sends, counts=alone[3].counts), table))
    for result, call in zip(results1, (triton1, cuda1), strict=True):
        assert result is call[3]
        assert [tuple(part.shape) for part in call[2:4]] == [tuple(part.shape) for part in wanted1[2:4]]
        assert same(call[:2], wanted1[:2])
    wire, returns, table, config1 = wanted1[4:]
    assert config1.num_panels == num_panels
    assert same(triton1[4:], (wire, returns, replace(table, segments=None), config1))
    assert same(cuda1[4:], (wire, returns, table, num_panels))


def interpreted(rank: int, world_size: int, trouble: str) -> dict[str, Any]:
    """Both layers in Triton, and with the arguments of CUDA C++ once more, of which rank 1 may change a number."""
    given: list[str] = []
    change = bool(trouble) and rank == 1

    def layer0(w1: Scaled, hidden: Scaled, wire: Any, sends: Any, table: Any) -> None:
        given.append("alone" if int(wire.epoch) == 0 else "layer 0")
        config = DispatchGemmConfig(push_cols=128)
        fp8_dispatch_gemm(w1, hidden, wire, sends, replace(table, segments=None), config)
        starts, counts = table.segments
        mine = rows_of_experts(starts, counts, len(hidden.elements))
        hidden.elements.view(torch.uint8)[~mine] = 0x7F  # which no one may compare, or read
        hidden.scales[:, ~mine] = torch.nan
        if change and mine.any():
            row = int(mine.nonzero()[-1])
            if trouble == "scale":
                hidden.scales[0, row] *= 1 + 2**-20
            if trouble == "sign":
                hidden.elements.view(torch.uint8)[row, 5] ^= 0x80

    def layer1(
        a: Scaled, b: Scaled, y: Tensor, out: Tensor, wire: Any, returns: Any, table: Any, num_panels: int
    ) -> None:
        given.append("layer 1")
        config = replace(layer_compare.combine_config(path.settings, num_panels, out), block_k=128)
        gemm_combine(a, b, y, out, wire, returns, replace(table, segments=None), config)
        if change and trouble == "output" and len(out):
            out[-1, -1] += 1

    ranks, failures = HalfRanks(rank, CPU, dist.group.WORLD), dict[str, str]()
    with (
        opened(MODEL, ranks, ParallelConfig(ep=world_size)) as point,
        cuda_stood_in_for({fp8_dispatch_gemm_cuda: layer0, fp8_gemm_combine_cuda: layer1}),
    ):
        (path,) = point.paths.values()
        path.use_kernels, path.ops = True, comet.fused
        point.plans.update({key: path.plan(point.ids, point.weights) for key in point.plans})
        launches = compared_launches(point, ranks, failures)
    in_fp8 = {name: why for name, why in failures.items() if name.startswith("fp8_")}
    return {"launches": [name for name in launches if name in NAMES], "failures": in_fp8, "given": given}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "wrong"),
    [
        ("", []),
        ("scale", ["fp8_layer0_cuda", "fp8_layer0_cuda_gemm"]),
        ("sign", ["fp8_layer0_cuda", "fp8_layer0_cuda_gemm"]),
        ("output", ["fp8_layer1_cuda"]),
    ],
)
def test_both_layers_are_compared_bit_for_bit(trouble: str, wrong: list[str]) -> None:
    for found in run_ranks(interpreted, 2, trouble, interpret=True, timeout=240):
        assert {name: why[:12] for name, why in found["failures"].items()} == dict.fromkeys(wrong, "differs from")
        assert found["launches"] == [name for name in NAMES if name not in wrong]
        assert found["given"] == ["layer 0", "alone", "layer 1"] * 2  # without rows, then with them


def test_widths_that_are_no_whole_blocks_have_no_launches_in_fp8() -> None:
    config, failures = replace(MODEL, ffn_size=160), dict[str, str]()
    with opened(config, Ranks(0, CPU, None), ParallelConfig()) as point:
        assert not any(name.startswith("fp8") for name in compared_launches(point, Ranks(0, CPU, None), failures))
        [row] = compared_rows(point, {}, failures)
    assert row["elements"] == "float32"
    assert not any(name.startswith("fp8") for name in failures)


def test_a_kernel_refuses_what_it_cannot_take() -> None:
    with opened(MODEL, Ranks(0, CPU, None), ParallelConfig()) as point:
        (path,), (plan,) = point.paths.values(), point.plans.values()
        w1, w2 = quantize_weights(point)
        for kernel in fp8_layer0_kernels(point, path, plan, w1)[2:]:
            with pytest.raises(ValueError, match=r"w1=\(4, 256, 384\) in FP8 must be of a kind that the kernel takes"):
                kernel()
        rows = quantize_rows_of(plan.routed_row_ids.numel())
        with pytest.raises(ValueError, match=r"w2=\(4, 384, 128\) in FP8 must be of a kind that the kernel takes"):
            fp8_layer1_kernels(point, path, plan, rows, w2)[1]()


def quantize_rows_of(num_rows: int) -> Scaled:
    """Hidden rows of any content."""
    elements = torch.zeros(num_rows, MODEL.ffn_size, dtype=torch.float8_e4m3fn)
    return Scaled(elements=elements, scales=torch.ones(1, num_rows))


def test_each_kind_of_elements_has_a_row_with_its_own_times_and_failures() -> None:
    times = dict(layer0_triton=3.0, layer0_cuda=2.0, fp8_layer0_triton=1.5, fp8_layer0_cuda=0.5, fp8_layer1_cuda=4.0)
    timings = {name: Timing(ms, ms, ms) for name, ms in times.items()} | {"plan": Timing(9, 9, 9)}
    failures = {"layer1_cuda": "one", "fp8_layer1_triton": "other"}
    with opened(MODEL, HalfRanks(0, CPU, None), ParallelConfig()) as point:
        plain, in_fp8 = compared_rows(point, timings, failures)
    assert (plain["elements"], plain["ratio0"], plain["failures"]) == ("float16", 1.5, "layer1_cuda: one")
    assert (in_fp8["elements"], in_fp8["ratio0"], in_fp8["failures"]) == ("fp8", 3.0, "layer1_triton: other")
    assert (plain["layer1_cuda_ms"], in_fp8["layer1_cuda_ms"]) == (None, 4.0)
    assert set(in_fp8["quantiles"]) == {"layer0_triton", "layer0_cuda", "layer1_cuda"}


def test_weights_that_cannot_be_quantised_are_a_failure_of_the_row() -> None:
    failures: dict[str, str] = {}
    refuse = patch.object(layer_compare, "quantize_weights", side_effect=RuntimeError("no memory"))
    with opened(MODEL, Ranks(0, CPU, None), ParallelConfig()) as point, refuse:
        compared_launches(point, Ranks(0, CPU, None), failures)
        _, in_fp8 = compared_rows(point, {}, failures)
    assert in_fp8["failures"] == "weights: RuntimeError: no memory"
