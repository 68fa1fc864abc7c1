"""The pieces of the layer on kernels; the same functions as ``comet.layer.twin.layer``.

Triton kernels, compiled or interpreted, but for larger layers: see ``comet.kernels.runtime.nvrtc``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from comet.kernels.gemm.activation import swiglu_backward as launch_swiglu_backward
from comet.kernels.gemm.fp8 import pack_rows
from comet.kernels.gemm.gather_rows import gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig
from comet.kernels.gemm.wgrad import group_gemm_wgrad
from comet.kernels.gemm.wgrad_cuda import TICKETS, group_gemm_wgrad_cuda, runs_cuda
from comet.kernels.layer.triton.dispatch import DispatchConfig
from comet.kernels.layer.triton.dispatch import dispatch as launch_dispatch
from comet.kernels.layer.triton.dispatch_gemm import dispatch_gemm
from comet.kernels.layer.triton.fp8_dispatch_gemm import fp8_dispatch_gemm
from comet.kernels.layer.triton.gemm_combine import gemm_combine
from comet.kernels.layer.triton.grad_hidden import GradHiddenConfig
from comet.kernels.layer.triton.grad_hidden import grad_hidden as launch_grad_hidden
from comet.kernels.runtime.arguments import GradWire, Scaled, aligned, power_of_2
from comet.kernels.runtime.primitives import barrier_kernel
from comet.layer.fused_arguments import (
    combine_config,
    combine_wire,
    dispatch_config,
    make_wire,
    move_cols,
    recv_wire,
    returns_of,
    sends_of,
    table_of,
)
from comet.layer.plan import Plan
from comet.layer.workspace import Workspace
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.quantization.packed import packed_columns
from comet.schedule.settings import LayerSettings


def layer0(
    x: Tensor, w1: Tensor, plan: Plan, workspace: Workspace, settings: LayerSettings, *, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """Dispatch || grouped GEMM || SwiGLU in one launch; see ``comet.layer.twin.layer.layer0``."""
    x = aligned(x)
    rows, ffn = plan.routed_row_ids.numel(), w1.shape[1] // 2
    hidden = x.new_empty(rows, ffn)
    pre = x.new_empty(rows, 2 * ffn) if save_pre else None
    config = dispatch_config(settings, x, save_pre=save_pre)
    table = table_of(plan, launch=0)
    dispatch_gemm(x, w1, hidden, pre, recv_wire(workspace), sends_of(plan), table, config)
    return hidden, pre


def layer1(hidden: Tensor, w2: Tensor, plan: Plan, workspace: Workspace, settings: LayerSettings) -> Tensor:
    """Grouped GEMM || weighted top-k reduce || combine; see ``comet.layer.twin.layer.layer1``.

    One launch, or two beside each other: see ``comet.kernels.layer.triton.gemm_combine``.
    """
    y = hidden.new_empty(hidden.shape[0], w2.shape[1])
    out = hidden.new_empty(plan.num_tokens, w2.shape[1])
    config = combine_config(settings, settings.layer1.num_panels, out)
    table = table_of(plan, launch=1)
    gemm_combine(hidden, w2, y, out, combine_wire(workspace), returns_of(plan, weighted=True), table, config)
    return out


def layer0_fp8(x: Tensor, w1: FP8, plan: Plan, workspace: Workspace, settings: LayerSettings) -> FP8:
    """Quantise, then dispatch || grouped GEMM || SwiGLU in one launch; see ``comet.layer.twin.layer.layer0_fp8``."""
    x = aligned(x)
    rows, ffn = plan.routed_row_ids.numel(), w1.elements.shape[1] // 2
    landing = workspace.recv_rows.with_columns(packed_columns(x.shape[1], x.dtype))
    first = plan.layout.rank * plan.max_tokens
    own = landing.local[first : first + plan.num_tokens]
    pack_rows(x, own.view(torch.int32))
    elements = x.new_empty(rows, ffn, dtype=w1.elements.dtype)
    scales = x.new_empty(ffn // FP8_BLOCK, rows, dtype=torch.float32)
    config = replace(dispatch_config(settings, x, save_pre=False), push_cols=min(512, power_of_2(own.shape[1])))
    table = table_of(plan, launch=0)
    wire = make_wire(workspace, landing, workspace.recv_flags)
    wire = replace(wire, rows=wire.rows.view(torch.int32))
    weights, hidden = Scaled(elements=w1.elements, scales=w1.scales), Scaled(elements=elements, scales=scales)
    fp8_dispatch_gemm(weights, hidden, wire, sends_of(plan), table, config)
    return FP8(elements=elements, scales=scales.T, block_rows=1, trusted=True)


def layer1_fp8(hidden: FP8, w2: FP8, plan: Plan, workspace: Workspace, settings: LayerSettings) -> Tensor:
    """See the twin's ``layer1_fp8``; in Triton no comm block runs beside its tiles, which leave no registers."""
    dtype, hidden_size = workspace.shape.dtype, w2.elements.shape[1]
    y = torch.empty(hidden.elements.shape[0], hidden_size, dtype=dtype, device=hidden.elements.device)
    out = y.new_empty(plan.num_tokens, hidden_size)
    config = combine_config(replace(settings, beside=True), settings.layer1.num_panels, out)
    config = replace(config, block_k=FP8_BLOCK, num_stages=settings.tile.num_stages, beside=settings.beside)
    wire, returns, table = combine_wire(workspace), returns_of(plan, weighted=True), table_of(plan, launch=1)
    rows = Scaled(elements=hidden.elements, scales=hidden.scales.T)
    weights = Scaled(elements=w2.elements, scales=w2.scales)
    gemm_combine(rows, weights, y, out, wire, returns, table, config)
    return out


def dispatch(rows: Tensor, plan: Plan, workspace: Workspace, settings: LayerSettings) -> Tensor:
    """Dispatch alone; see ``comet.layer.twin.layer.dispatch``."""
    config = DispatchConfig(push_cols=move_cols(rows, 1024))
    landing = workspace.recv_rows.with_columns(rows.shape[1])
    wire = make_wire(workspace, landing, workspace.recv_flags)
    launch_dispatch(rows, wire, sends_of(plan), table_of(plan, launch=2).counters, config)
    return landing.local


def combine(y: Tensor, plan: Plan, workspace: Workspace, settings: LayerSettings, *, weighted: bool) -> Tensor:
    """Reduce routed rows ``y (Q, D)`` and send the sums home; see ``comet.layer.twin.layer.combine``.

    The launch of layer 1 with no tile to multiply: what remains of it is the combine.
    """
    out = y.new_empty(plan.num_tokens, y.shape[1])
    config = replace(combine_config(replace(settings, beside=False), 1, out), flatten=False)
    table = replace(table_of(plan, launch=1), num_tiles=plan.tile_starts.new_zeros(1))
    gemm_combine(y, y[None], y, out, combine_wire(workspace), returns_of(plan, weighted=weighted), table, config)
    return out


def routed_rows(rows: Tensor, row_ids: Tensor, plan: Plan) -> Tensor:
    """See ``comet.layer.twin.layer.routed_rows``; rows of no tile are undefined."""
    out = rows.new_empty(row_ids.numel(), rows.shape[1])
    gather_rows(rows, out, row_ids, table_of(plan, launch=2))
    return out


def grad_hidden(
    grad_y: Tensor, w2: Tensor, plan: Plan, workspace: Workspace, settings: LayerSettings
) -> tuple[Tensor, Tensor]:
    """Dispatch, then grouped GEMM, or both in one launch; see ``comet.layer.twin.layer.grad_hidden``."""
    grad_y = aligned(grad_y)
    num_rows = plan.routed_row_ids.numel()
    grads, out = grad_y.new_empty(num_rows, w2.shape[1]), grad_y.new_empty(num_rows, w2.shape[2])
    config = GradHiddenConfig(
        beside=settings.beside,
        dispatch=DispatchConfig(push_cols=move_cols(grad_y, 1024)),
        gemm=GemmConfig.select(out.dtype),
    )
    table = table_of(plan, launch=2)
    launch_grad_hidden(grad_y, w2, grads, out, recv_wire(workspace), sends_of(plan), table, plan.tiles, config)
    return grads, out


def swiglu_backward(pre: Tensor, grad: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """See ``comet.layer.twin.layer.swiglu_backward``; routed rows of no tile are undefined."""
    grad_pre, weighted_hidden = torch.empty_like(pre), torch.empty_like(grad)
    row_grads = torch.zeros_like(plan.row_weights)
    table = table_of(plan, launch=2)
    launch_swiglu_backward(pre, grad, plan.routed_slots, plan.row_weights, table, grad_pre, weighted_hidden, row_grads)
    return grad_pre, weighted_hidden, row_grads


def grad_weight(left: Tensor, right: Tensor, plan: Plan, *, launch: int) -> Tensor:
    """A GEMM contracted over rows; see ``comet.layer.twin.layer.grad_weight``."""
    out = left.new_empty(plan.layout.experts_local, left.shape[1], right.shape[1])
    segments = plan.segment_starts, plan.segment_counts
    if runs_cuda(left, right, out):
        group_gemm_wgrad_cuda(left, right, out, *segments, table_of(plan, launch=launch).counters[TICKETS:])
    else:
        group_gemm_wgrad(left, right, out, *segments, config=GemmConfig.select(left.dtype))
    return out


def grad_tokens(
    grad_pre: Tensor, w1: Tensor, row_grads: Tensor, plan: Plan, workspace: Workspace, settings: LayerSettings
) -> tuple[Tensor, Tensor]:
    """Grouped GEMM || reduce || combine of the gradients, launched as layer 1 is; see the twin's ``grad_tokens``."""
    y = grad_pre.new_empty(grad_pre.shape[0], w1.shape[2])
    out = grad_pre.new_empty(plan.num_tokens, w1.shape[2])
    grads = GradWire(
        row_grads=row_grads,
        landing=workspace.combine_grads.local,
        landing_pointers=workspace.combine_grads.pointers,
        out=row_grads.new_empty(plan.num_tokens, plan.layout.top_k),
    )
    config = combine_config(settings, settings.layer0_backward.num_panels, out)
    table = table_of(plan, launch=3)
    wire, returns = combine_wire(workspace), returns_of(plan, weighted=False, grads=grads)
    gemm_combine(grad_pre, w1, y, out, wire, returns, table, config, b_is_kn=True)
    return out, grads.out


def barrier(workspace: Workspace) -> None:
    """Advance the epoch on the device once every rank has arrived, in stream order."""
    flags = workspace.barrier_flags
    workspace.comm.in_flight = True
    barrier_kernel[(1,)](
        flags.pointers, workspace.epoch, workspace.fault, flags.rank, len(flags.peers), workspace.timeout_ns,
        W_BLOCK=power_of_2(len(flags.peers)), INTERPRET=triton.knobs.runtime.interpret,
    )  # fmt: skip
