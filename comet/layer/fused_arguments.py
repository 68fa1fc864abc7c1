"""What the fused launches are handed, of settings, plan and workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.base import SymmTensor
from comet.config import require
from comet.kernels.layer.triton.dispatch import Sends
from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arguments import GradWire, Returns, TileTable, Wire, power_of_2
from comet.kernels.runtime.recorder import Recorder
from comet.layer.plan import COUNTERS_PER_LAUNCH, NUM_COUNTERS, Plan
from comet.layer.workspace import Workspace
from comet.schedule.settings import LayerSettings
from comet.utils.graphs import is_capturing


def dispatch_config(settings: LayerSettings, x: Tensor, *, save_pre: bool) -> DispatchGemmConfig:
    """Of layer 0. Flattened, the epilogue's shared memory adds to the ring's: storing gate | up costs a stage."""
    tile = settings.tile
    return DispatchGemmConfig(
        comm_blocks=settings.comm_blocks,
        by_source=settings.layer0.num_phases > 2,
        block_f=tile.block_f,
        block_k=tile.block_k,
        group_tiles=settings.layer0.group_tiles,
        push_cols=move_cols(x, 1024),
        flatten=x.dtype != torch.float32,
        num_stages=min(tile.num_stages, 3) if save_pre else tile.num_stages,
        beside=settings.beside,
    )


def combine_config(settings: LayerSettings, num_panels: int, out: Tensor) -> GemmCombineConfig:
    """Of layer 1, or of layer 0's gradients, whose result is ``out (T, D)``."""
    tile = settings.tile
    return GemmCombineConfig(
        comm_blocks=settings.comm_blocks,
        num_panels=num_panels,
        block_n=tile.block_n,
        block_k=tile.block_k,
        group_tiles=settings.layer1.group_tiles,
        move_cols=move_cols(out, 256 if settings.beside and out.element_size() == 2 else 512),
        flatten=out.dtype != torch.float32,
        num_stages=min(tile.num_stages, 3) if settings.beside else tile.num_stages,
        beside=settings.beside,
        cuda_kernels=settings.cuda_kernels,
        spare_multiprocessors=settings.spare_multiprocessors,
    )


def move_cols(rows: Tensor, most: int) -> int:
    """Columns a block moves at once: a power of two, fewer in 32 bits."""
    most = most // 4 if rows.dtype == torch.float32 else most
    return min(most, power_of_2(rows.shape[1]))


def recv_wire(workspace: Workspace) -> Wire:
    """Where tokens arrive."""
    return make_wire(workspace, workspace.recv_rows, workspace.recv_flags)


def combine_wire(workspace: Workspace) -> Wire:
    """Where partial sums arrive."""
    return make_wire(workspace, workspace.combine_rows, workspace.combine_flags)


def make_wire(workspace: Workspace, rows: SymmTensor, flags: SymmTensor) -> Wire:
    """Rows of the pool with their flags."""
    return Wire(
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
        ValueError: If a CUDA graph is being captured, and not for the recorder alone.
    """
    recorder = workspace.recorder
    require(
        recorder is None or workspace.recorder_in_graph == is_capturing(recorder.events.device),
        "a CUDA graph of a layer must not be captured while it is recorded, as its replays would go on recording: "
        "inside record, call the layer without graphs",
    )
    return recorder


def sends_of(plan: Plan) -> Sends:
    """What this rank sends, by comm blocks or warps; the counters of the chunks are for layer 0."""
    return Sends(
        token_ids=plan.send_token_ids,
        counts=plan.send_counts,
        recv_counts=plan.recv_counts,
        pushed=plan.counters[NUM_COUNTERS:],
    )


def returns_of(plan: Plan, *, weighted: bool, grads: GradWire | None = None) -> Returns:
    """How routed rows become token rows."""
    return Returns(
        row_slots=plan.row_slots,
        row_weights=plan.row_weights if weighted else None,
        send_rows=plan.send_rows,
        recv_counts=plan.recv_counts,
        grads=grads,
    )


def table_of(plan: Plan, *, launch: int) -> TileTable:
    """The tiles by expert, which reads each weight once, with the counters of one of the plan's launches.

    Launch 0 is layer 0, whose tiles go by phase instead, 1 is layer 1, 2 and 3 are their backward.

    Example: 2048 tokens on each of 4 ranks, 8 of 256 experts each: ``even_rows`` is 8192 * 8 / 256 = 256.
    """
    layout = plan.layout
    first = launch * COUNTERS_PER_LAUNCH
    return TileTable(
        tiles=plan.segment_tiles if launch else plan.tiles,
        num_tiles=plan.tile_starts[-1:],
        row_ids=plan.routed_row_ids,
        counters=plan.counters[first : first + COUNTERS_PER_LAUNCH],
        block_rows=plan.block_rows,
        segments=(plan.segment_starts, plan.segment_counts),
        even_rows=plan.num_tokens * layout.world_size * layout.top_k / layout.num_experts,
    )
