"""The two implementations of each layer side by side: its kernels in Triton and its kernel in CUDA C++, at any size.

``comet.fused`` takes one of them by the size of the layer. Here both are launched, with the arguments that it would
hand them, on the plan of the point's first split: in 16 bits, and in block FP8 where the widths are whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from bench_moe import describe
from fp8 import fits
from fp8_compare import fp8_layer0_kernels, fp8_layer1_kernels, quantize_weights
from layer_points import Point, Split, try_launch
from layer_report import KEYS, TABLE_KEYS
from points import Ranks, attempt
from report import Row
from torch import Tensor

from comet.config import require
from comet.fused_arguments import combine_config, combine_wire, recv_wire, returns_of, sends_of, table_of
from comet.kernels import dispatch_gemm_cuda as layer0_cuda
from comet.kernels import gemm_combine_cuda as layer1_cuda
from comet.kernels.arguments import Scaled, Wire
from comet.kernels.dispatch import Sends
from comet.kernels.gemm_combine import gemm_combine
from comet.kernels.nvrtc import is_available, what_is_missing
from comet.paths import SymmetricPath
from comet.plan import Plan
from comet.tuner.timing import Timing

Result = Tensor | Scaled
Kernel = Callable[[], Result]
Layer0 = Callable[[Point, SymmetricPath, Plan], Mapping[str, Kernel]]
Layer1 = Callable[[Point, SymmetricPath, Plan, Any], Mapping[str, Kernel]]

LAYER0 = ("layer0_triton", "layer0_cuda", "layer0_cuda_gemm")
LAYER1 = ("layer1_triton", "layer1_cuda")
FIGURES = (*(f"{name}_ms" for name in LAYER0), "ratio0", *(f"{name}_ms" for name in LAYER1), "ratio1", "failures")
COLUMNS = (*KEYS, "elements", *Split._fields, *FIGURES)
TABLE = (*TABLE_KEYS, "elements", *FIGURES)
IN_FP8 = "fp8_"  # begins the names of launches in FP8


def what_cuda_lacks(ranks: Ranks) -> str:
    """Why the kernels in CUDA C++ do not run on all ranks, in words; empty if they do (collective)."""
    lacking = "" if is_available(ranks.device) else what_is_missing() or f"{ranks.device} is no GPU of sm_90"
    return (lacking or "not on every rank") if ranks.worst(float(bool(lacking))) else ""


def compared_launches(point: Point, ranks: Ranks, failures: dict[str, str]) -> dict[str, Kernel]:
    """The launches of ``LAYER0`` and ``LAYER1`` that run and agree bit for bit; the others go to ``failures``.

    Those in FP8, where there are any, likewise, under names that begin with ``IN_FP8`` (collective).
    """
    usable = launches_of(point, ranks, failures, layer0_kernels, layer1_kernels)
    if not fits(point.layer.config, point.layer.layout):
        return usable
    weights, failure = attempt(partial(quantize_weights, point), ranks, point.workspace)
    in_fp8: dict[str, Kernel] = {}
    fp8_failures = {"weights": failure} if weights is None else {}
    if weights is not None:
        w1, w2 = weights

        def layer0(point: Point, path: SymmetricPath, plan: Plan) -> dict[str, Kernel]:
            return dict(zip(LAYER0, fp8_layer0_kernels(point, path, plan, w1), strict=True))

        def layer1(point: Point, path: SymmetricPath, plan: Plan, hidden: Scaled) -> dict[str, Kernel]:
            return dict(zip(LAYER1, fp8_layer1_kernels(point, path, plan, hidden, w2), strict=True))

        in_fp8 = launches_of(point, ranks, fp8_failures, layer0, layer1)
    failures |= {IN_FP8 + name: why for name, why in fp8_failures.items()}
    return usable | {IN_FP8 + name: kernel for name, kernel in in_fp8.items()}


def launches_of(
    point: Point, ranks: Ranks, failures: dict[str, str], layer0: Layer0, layer1: Layer1
) -> dict[str, Kernel]:
    """``compared_launches`` for one kind of elements.

    Of layer 0 rows of experts are compared: others are undefined. Layer 1 reads what layer 0 has found (collective).
    """
    split, path = next(iter(point.paths.items()))
    plan = point.plans[split.plan]
    compile_kernels(point, path, ranks, layer0, layer1)
    mine = rows_of_experts(plan.segment_starts, plan.segment_counts, plan.routed_row_ids.numel())
    usable, hidden = equal_kernels(layer0(point, path, plan), mine, point, ranks, failures)
    if hidden is None:
        return usable
    all_rows = torch.ones_like(point.tokens[:, 0], dtype=torch.bool)
    more, _ = equal_kernels(layer1(point, path, plan, hidden), all_rows, point, ranks, failures)
    return usable | more


def rows_of_experts(starts: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """Which of the routed rows belong to an expert; the others are the padding of segments, and what no segment has.

    Example: ``starts [0, 4, 6]``, ``counts [3, 1]``, 8 rows: ``[1, 1, 1, 0, 1, 0, 0, 0]``.

    Args:
        starts: ``(e + 1,)`` int32 first row of each segment.
        counts: ``(e,)`` int32 valid rows of each.
        num_rows: Q.

    Returns:
        ``(Q,)`` bool.
    """
    mine = torch.zeros(num_rows, dtype=torch.bool, device=starts.device)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=False):
        mine[start : start + count] = True
    return mine


def equal_kernels(
    kernels: Mapping[str, Kernel], rows: Tensor, point: Point, ranks: Ranks, failures: dict[str, str]
) -> tuple[dict[str, Kernel], Result | None]:
    """Launch kernels one by one and compare them with the first that runs (collective).

    Args:
        kernels: By name; all are to give the same.
        rows: ``(N,)`` bool, which rows of their results count.
        point: Whose pool they use.
        ranks: All of them.
        failures: Gets those that do not run, or differ on any rank.

    Returns:
        The other kernels, and the result of the first; ``None`` if there is none.
    """
    usable: dict[str, Kernel] = {}
    first: tuple[str, Result] | None = None
    for name, kernel in kernels.items():
        result, failure = try_launch(kernel, point, ranks)
        if result is not None:
            first = first or (name, result)
            if ranks.worst(float(not same_rows(result, first[1], rows))):
                failure = f"differs from {first[0]}"
        if failure:
            failures[name] = failure
        else:
            usable[name] = kernel
    return usable, None if first is None else first[1]


def same_rows(one: Result, other: Result, rows: Tensor) -> bool:
    """Whether these rows of two results have equal numbers; in FP8 the same bits, elements and scales."""
    if isinstance(one, Scaled) and isinstance(other, Scaled):
        bits = ((each.elements.view(torch.uint8), each.scales.T) for each in (one, other))
        return all(torch.equal(a[rows], b[rows]) for a, b in zip(*bits, strict=True))
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one[rows], other[rows])


def compile_kernels(point: Point, path: SymmetricPath, ranks: Ranks, layer0: Layer0, layer1: Layer1) -> None:
    """Launch each kernel once on a plan without rows, as ``layer_points.compile_kernels``, which compiles others."""
    plan = path.plan(torch.full_like(point.ids, -1), point.weights)

    def launch_all(kernels: Mapping[str, Kernel]) -> list[Result]:
        results = []
        for kernel in kernels.values():
            plan.counters.zero_()
            results.append(attempt(kernel, ranks, point.workspace)[0])
        return [result for result in results if result is not None]

    for hidden in launch_all(layer0(point, path, plan))[:1]:
        launch_all(layer1(point, path, plan, hidden))


def layer0_kernels(point: Point, path: SymmetricPath, plan: Plan) -> dict[str, Kernel]:
    """Layer 0 in Triton, in CUDA C++, and in CUDA C++ with nothing to send and all arrived: what is left is its GEMM.

    The last reads the rows that a launch before has received.
    """
    x, w1, workspace = point.tokens, point.layer.w1, path.workspace
    wire, sends, table = recv_wire(workspace), sends_of(plan), table_of(plan, launch=0)

    def in_triton() -> Tensor:
        settings = replace(path.settings, beside=False)  # which only keeps its layer 0 from CUDA C++
        hidden, _ = path.ops.layer0(x, w1, plan, workspace, settings, save_pre=False)
        return hidden

    def in_cuda(wire: Wire, sends: Sends) -> Tensor:
        require(
            layer0_cuda.can_run(x, w1, sends, table),
            f"w1={tuple(w1.shape)} of {w1.dtype} must be of a kind that the kernel takes",
        )
        hidden = x.new_empty(plan.routed_row_ids.numel(), w1.shape[1] // 2)
        layer0_cuda.dispatch_gemm_cuda(x, w1, hidden, None, wire, sends, table)
        return hidden

    arrived = replace(wire, epoch=torch.zeros_like(wire.epoch))
    nothing = replace(sends, counts=torch.zeros_like(sends.counts))
    launches = in_triton, partial(in_cuda, wire, sends), partial(in_cuda, arrived, nothing)
    return dict(zip(LAYER0, launches, strict=True))


def layer1_kernels(point: Point, path: SymmetricPath, plan: Plan, hidden: Tensor) -> dict[str, Kernel]:
    """Layer 1 in Triton and in CUDA C++, both of ``hidden (Q, F/TP)``."""
    w2, workspace = point.layer.w2, path.workspace
    wire, returns, table = combine_wire(workspace), returns_of(plan, weighted=True), table_of(plan, launch=1)
    settings = replace(path.settings, beside=True)

    def results() -> tuple[Tensor, Tensor]:
        return hidden.new_empty(hidden.shape[0], w2.shape[1]), hidden.new_empty(plan.num_tokens, w2.shape[1])

    def in_triton() -> Tensor:
        y, out = results()
        config = combine_config(settings, settings.layer1.num_panels, out)
        gemm_combine(hidden, w2, y, out, wire, returns, replace(table, segments=None), config)
        return out

    def in_cuda() -> Tensor:
        require(
            layer1_cuda.can_run(hidden, w2, wire, returns, table),
            f"w2={tuple(w2.shape)} of {w2.dtype} must be of a kind that the kernel takes",
        )
        y, out = results()
        layer1_cuda.gemm_combine_cuda(hidden, w2, y, out, wire, returns, table, settings.layer1.num_panels)
        return out

    return dict(zip(LAYER1, (in_triton, in_cuda), strict=True))


def compared_rows(point: Point, timings: Mapping[str, Timing], failures: Mapping[str, str]) -> list[Row]:
    """The ``compared_row`` of the pool's type and, where there are launches in it, that of FP8.

    Args:
        point: The point; its first split.
        timings: Under the names of ``compared_launches``; others are left alone.
        failures: Under the same names.
    """
    kinds = {str(point.tokens.dtype).removeprefix("torch."): ""}
    if fits(point.layer.config, point.layer.layout):
        kinds["fp8"] = IN_FP8

    def of_kind(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        mine = (name for name in values if name.startswith(IN_FP8) == bool(prefix))
        return {name.removeprefix(prefix): values[name] for name in mine}

    split = next(iter(point.paths))
    return [
        {"elements": elements} | compared_row(split, of_kind(timings, prefix), of_kind(failures, prefix))
        for elements, prefix in kinds.items()
    ]


def compared_row(split: Split, timings: Mapping[str, Timing], failures: Mapping[str, str]) -> Row:
    """Times of both kernels of each layer, and how many times as long the one in Triton takes.

    Example: layer 0 in Triton 3 ms, in CUDA C++ 2: ``ratio0`` is 1.5.

    Args:
        split: Whose plan and settings.
        timings: Under the names of ``LAYER0`` and ``LAYER1``, those that were timed; others are left alone.
        failures: Under the same names.

    Returns:
        The row, without ``KEYS``; ``None`` where something was not timed.
    """
    found = {name: timings.get(name) for name in (*LAYER0, *LAYER1)}
    times = {name: None if timing is None else timing.median_ms for name, timing in found.items()}
    row: Row = split._asdict() | {f"{name}_ms": value for name, value in times.items()}
    for ratio, (in_triton, in_cuda, *_) in (("ratio0", LAYER0), ("ratio1", LAYER1)):
        triton, cuda = times[in_triton], times[in_cuda]
        row[ratio] = None if triton is None or cuda is None else triton / cuda
    quantiles = {name: asdict(timing) for name, timing in found.items() if timing is not None}
    return row | {"failures": describe(dict(failures)), "quantiles": quantiles}
