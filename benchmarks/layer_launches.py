"""The launches of one point: which there are, whether they work, and how they are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench_moe import TOLERANCE
from comm_only import combine_alone
from layer_points import Point, Split, prepare, try_launch
from layer_report import PLANS_IN_A_ROW
from points import Ranks, attempt, relative_error
from torch import Tensor
from torch.nn.functional import silu

from comet.kernels.arguments import TileTable
from comet.kernels.group_gemm import GemmConfig, group_gemm, group_gemm_torch
from comet.paths import SymmetricPath
from comet.tuner.timing import Variant

Launch = Callable[[], object]


def checked_launches(point: Point, ranks: Ranks, failures: dict[str, str]) -> dict[str, Launch]:
    """All launches that run and agree with the first split that runs; the others go to ``failures`` (collective)."""
    usable: dict[str, Launch] = {}
    reference: tuple[Split, Tensor] | None = None
    for split in point.paths:
        outputs, failure = try_launch(partial(run_layers, point, split), point, ranks)
        if outputs is not None:
            hidden, output = outputs
            point.hidden.setdefault(split.num_phases, hidden)
            reference = reference or (split, output)
            if ranks.worst(float(not torch.equal(output, reference[1]))):
                failure = f"differs from {reference[0]}"
        if failure:
            failures[str(split)] = failure
        else:
            usable |= zip(split.launches(), layer_launches(point, split), strict=True)
    return usable if reference is None else usable | checked_pieces(point, *reference, ranks, failures)


def checked_pieces(
    point: Point, split: Split, wanted: Tensor, ranks: Ranks, failures: dict[str, str]
) -> dict[str, Launch]:
    """The pieces that run; dispatch and the layer-0 GEMM, then SwiGLU and layer 1, have to give ``wanted (T, D)``."""
    usable: dict[str, Launch] = {}
    path, plan = point.paths[split], point.plans[split.plan]
    pre = point.tokens.new_empty(plan.routed_row_ids.numel(), point.layer.w1.shape[1])
    y = point.tokens.new_empty(pre.shape[0], wanted.shape[1])
    for name, launch in piece_launches(point, split, pre, y).items():
        _, failure = try_launch(launch, point, ranks)
        if failure:
            failures[name] = failure
        else:
            usable[name] = launch

    def error_of_pieces() -> float:
        gate, up = pre.chunk(2, dim=1)
        output = path.ops.layer1(silu(gate) * up, point.layer.w2, plan, point.workspace, path.settings)
        return relative_error((output,), (wanted,))

    if {"dispatch", "gemm0"} <= usable.keys():
        error, failure = try_launch(error_of_pieces, point, ranks)
        worst = ranks.worst(0.0 if error is None else error)
        if worst > TOLERANCE[ranks.dtype]:
            failure = f"differs from the fused layer 0 by {worst:.3g} root mean squares"
        if failure:
            failures["gemm0"] = failure
            del usable["gemm0"]
    return usable


def timed_variants(
    launches: dict[str, Launch], point: Point, ranks: Ranks, failures: dict[str, str]
) -> tuple[dict[str, Variant], Callable[[], None]]:
    """Variants for the timing loop and its barrier, on a GPU as CUDA graphs, without launch costs (collective)."""
    opening = partial(prepare, point)
    if ranks.device.type != "cuda":
        return {name: partial(_call, launch) for name, launch in launches.items()}, opening
    pool = torch.cuda.graph_pool_handle()
    variants: dict[str, Variant] = {}
    for name, launch in launches.items():
        graph, failure = attempt(partial(_record, launch, pool), ranks, point.workspace)
        if graph is None:
            failures[name] = failure
        else:
            variants[name] = partial(_call, graph.replay)
    return variants, _record(opening, pool).replay


def _call(launch: Launch, index: int) -> None:
    """There is one input set, so its number does not matter."""
    launch()


def _record(launch: Launch, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of one launch that ran before; graphs of a pool share the memory of their outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launch()
    return graph


def run_layers(point: Point, split: Split) -> tuple[Tensor, Tensor]:
    """Hidden ``(Q, F/TP)`` and output ``(T, D)`` of one split, layer 1 after layer 0."""
    path, plan, workspace = point.paths[split], point.plans[split.plan], point.workspace
    hidden, _ = path.ops.layer0(point.tokens, point.layer.w1, plan, workspace, path.settings, save_pre=False)
    return hidden, path.ops.layer1(hidden, point.layer.w2, plan, workspace, path.settings)


def layer_launches(point: Point, split: Split) -> tuple[Launch, Launch]:
    """The two fused layers of one split; layer 1 reads ``point.hidden``."""
    path, plan, workspace = point.paths[split], point.plans[split.plan], point.workspace

    def layer0() -> Tensor:
        hidden, _ = path.ops.layer0(point.tokens, point.layer.w1, plan, workspace, path.settings, save_pre=False)
        return hidden

    def layer1() -> Tensor:
        return path.ops.layer1(point.hidden[plan.num_phases], point.layer.w2, plan, workspace, path.settings)

    return layer0, layer1


def plans_in_a_row(path: SymmetricPath, point: Point) -> None:
    """As many plans as make the start of a graph a small part of their time; ranks wait for each other in each."""
    for _ in range(PLANS_IN_A_ROW):
        path.plan(point.ids, point.weights)


def piece_launches(point: Point, split: Split, pre: Tensor, y: Tensor) -> dict[str, Launch]:
    """The plan, and of each layer its communication and its GEMM.

    Args:
        point: The point; ``hidden`` of the split is there.
        split: Whose plan and settings.
        pre: ``(Q, 2F/TP)`` where the layer-0 GEMM puts gate | up.
        y: ``(Q, D)`` where the layer-1 GEMM puts its rows.

    Returns:
        Name to launch: ``gemm0`` reads what ``dispatch`` received.
    """
    path, plan = point.paths[split], point.plans[split.plan]
    layer, workspace, settings = point.layer, point.workspace, path.settings
    hidden = point.hidden[plan.num_phases]
    table = TileTable(
        tiles=plan.segment_tiles,
        num_tiles=plan.tile_starts[-1:],
        row_ids=plan.routed_row_ids,
        counters=plan.counters,
        block_rows=plan.block_rows,
    )
    config = replace(GemmConfig.select(y.dtype), flatten=y.dtype != torch.float32)
    gemm = partial(group_gemm if path.use_kernels else group_gemm_torch, table=table, layout="nk", config=config)
    rows = workspace.recv_rows.local
    return {
        "plan": partial(plans_in_a_row, path, point),
        "dispatch": partial(path.ops.dispatch, point.tokens, plan, workspace, settings),
        "gemm0": partial(gemm, rows, layer.w1, pre, gather=True),
        "gemm1": partial(gemm, hidden, layer.w2, y, gather=False),
        "combine": combine_alone(path, plan, hidden, layer.w2),
    }
