"""What the fused launches are handed: configurations, and the layer's plan and symmetric memory as they read them."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.base import SymmTensor
from comet.config import require
from comet.kernels.layer.triton.dispatch import DispatchLists
from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.plan.metadata import PlanConfig, PoolTensors, RoutingPool
from comet.kernels.runtime.arguments import CombineLists, GradBuffer, SymmBuffer, TileTable, power_of_2
from comet.kernels.runtime.recorder import Recorder
from comet.layer.plan import NUM_COUNTERS, Launch, Plan, PlanRules
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout
from comet.schedule.settings import LayerSettings
from comet.utils.graphs import is_capturing


def plan_config(layout: ExpertLayout, rules: PlanRules) -> PlanConfig:
    """What the plan's kernels are compiled for."""
    return PlanConfig(
        top_k=layout.top_k,
        experts_local=layout.experts_local,
        ep=layout.ep,
        tp=layout.tp,
        block_rows=rules.block_rows,
        expert_capacity=rules.expert_capacity,
    )


def routing_pool(layout: ExpertLayout, workspace: Workspace) -> RoutingPool:
    """Where ids and weights of all ranks arrive."""
    tensors = PoolTensors(
        ids=workspace.ids.local,
        id_pointers=workspace.ids.pointers,
        weights=workspace.weights.local,
        weight_pointers=workspace.weights.pointers,
        flags=workspace.ids_flags.local,
        flag_pointers=workspace.ids_flags.pointers,
        epoch=workspace.epoch,
        fault=workspace.fault,
    )
    return RoutingPool(tensors=tensors, rank=layout.rank, timeout_ns=workspace.timeout_ns)


def dispatch_config(settings: LayerSettings, rows: Tensor, packed: int | None = None) -> DispatchGemmConfig:
    """Of layer 0, whose received rows are ``rows (R, D)``, or of ``packed`` columns each."""
    tile = settings.tile
    return DispatchGemmConfig(
        comm_blocks=settings.comm_blocks,
        block_f=tile.block_f,
        block_k=tile.block_k,
        push_cols=move_cols(rows, 1024) if packed is None else min(512, power_of_2(packed)),
        flatten=rows.dtype != torch.float32,
        num_stages=tile.num_stages,
        activation=settings.activation,
    )


def combine_config(settings: LayerSettings, out: Tensor) -> GemmCombineConfig:
    """Of layer 1, or of layer 0's gradients, whose result is ``out (T, D)``."""
    tile = settings.tile
    return GemmCombineConfig(
        comm_blocks=settings.comm_blocks,
        num_panels=settings.num_panels,
        block_n=tile.block_n,
        block_k=tile.block_k,
        move_cols=move_cols(out, 512),
        flatten=out.dtype != torch.float32,
        num_stages=tile.num_stages,
        reserved_sms=settings.reserved_sms,
    )


def move_cols(rows: Tensor, most: int) -> int:
    """Columns a block moves at once: a power of two, fewer in 32 bits."""
    most = most // 4 if rows.dtype == torch.float32 else most
    return min(most, power_of_2(rows.shape[1]))


def recv_symm(workspace: Workspace, columns: int | None = None) -> SymmBuffer:
    """Where tokens arrive, or rows of so many columns."""
    rows = workspace.recv_rows if columns is None else workspace.recv_rows.with_columns(columns)
    return _symm(workspace, rows, workspace.recv_flags)


def combine_symm(workspace: Workspace) -> SymmBuffer:
    """Where partial sums arrive."""
    return _symm(workspace, workspace.combine_rows, workspace.combine_flags)


def _symm(workspace: Workspace, rows: SymmTensor, flags: SymmTensor) -> SymmBuffer:
    return SymmBuffer(
        rows=rows.local,
        row_pointers=rows.pointers,
        flags=flags.local,
        flag_pointers=flags.pointers,
        epoch=workspace.epoch,
        fault=workspace.fault,
        rank=rows.rank,
        max_tokens=workspace.max_tokens,
        timeout_ns=workspace.timeout_ns,
        recorder=recorder_of_launch(workspace),
    )


def recorder_of_launch(workspace: Workspace) -> Recorder | None:
    """Where a launch records, if it does.

    Raises:
        ValueError: If a CUDA graph is being captured meanwhile.
    """
    recorder = workspace.recorder
    require(
        recorder is None or not is_capturing(recorder.events.device),
        "a CUDA graph of a layer must not be captured while it is recorded, as its replays would go on recording: "
        "inside record, call the layer without graphs",
    )
    return recorder


def dispatch_lists(plan: Plan) -> DispatchLists:
    """What this rank sends, by comm blocks or warps; the counters of the chunks are for layer 0."""
    return DispatchLists(
        token_ids=plan.send_token_ids,
        counts=plan.send_counts,
        recv_counts=plan.recv_counts,
        pushed=plan.counters[NUM_COUNTERS:],
    )


def combine_lists(plan: Plan, *, weighted: bool, grads: GradBuffer | None = None) -> CombineLists:
    """How routed rows become token rows."""
    return CombineLists(
        row_slots=plan.row_slots,
        row_weights=plan.row_weights if weighted else None,
        send_rows=plan.send_rows,
        recv_counts=plan.recv_counts,
        grads=grads,
    )


def tile_table(plan: Plan, launch: Launch) -> TileTable:
    """The tiles by expert, which reads each weight once; for layer 0 by phase.

    Example: 2048 tokens on each of 4 ranks, 8 of 256 experts each: ``expected_tokens_per_expert`` is 8192 *
    8 / 256 = 256.
    """
    layout = plan.layout
    return TileTable(
        tiles=plan.tiles if launch == Launch.DISPATCH_GEMM else plan.segment_tiles,
        num_tiles=plan.tile_starts[-1:],
        row_ids=plan.routed_row_ids,
        counters=plan.counters_of(launch),
        block_rows=plan.block_rows,
        segments=(plan.segment_starts, plan.segment_counts),
        expected_tokens_per_expert=plan.num_tokens * layout.world_size * layout.top_k / layout.num_experts,
    )
