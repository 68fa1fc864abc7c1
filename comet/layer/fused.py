"""The layer by kernels: one launch for each of layer 0, layer 1 and their gradients, two for the plan.

Triton kernels, compiled or interpreted, but for larger layers (``comet.kernels.runtime.nvrtc``). Below the backend
stands what the launches are handed, of settings, plan and pool.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
import triton
from torch import Tensor

from comet.comm.base import SymmTensor
from comet.config import require
from comet.kernels.gemm.activation import activation_backward
from comet.kernels.gemm.bias import add_bias_products, bias_gradient
from comet.kernels.gemm.fp8 import pack_rows
from comet.kernels.gemm.gather_rows import gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig
from comet.kernels.gemm.wgrad import group_gemm_wgrad
from comet.kernels.gemm.wgrad_cuda import TICKETS, group_gemm_wgrad_cuda, runs_cuda
from comet.kernels.layer.triton.dispatch import COMM_BLOCKS, DispatchConfig, Sends
from comet.kernels.layer.triton.dispatch import dispatch as launch_dispatch
from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig, dispatch_gemm
from comet.kernels.layer.triton.fp8_dispatch_gemm import fp8_dispatch_gemm
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig, gemm_combine
from comet.kernels.layer.triton.grad_hidden import GradHiddenConfig, grad_hidden
from comet.kernels.plan.metadata import PlanConfig, PlanScratch, RoutingPool, exchange, place_plan
from comet.kernels.runtime.arguments import GradWire, Returns, Scaled, TileTable, Wire, aligned, power_of_2
from comet.kernels.runtime.buffers import allocate, cut
from comet.kernels.runtime.primitives import barrier_kernel
from comet.kernels.runtime.recorder import Recorder
from comet.layer.backend import ActivationGradients, Backend
from comet.layer.plan import NUM_COUNTERS, Launch, Plan, PlanRules, plan_shapes
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.quantization.packed import packed_columns
from comet.schedule.settings import LayerSettings
from comet.utils.graphs import is_capturing


class Fused(Backend):
    """The layer by kernels, on GPUs and in Triton's interpreter."""

    # Made once: a call has no time for it.

    @cached_property
    def _dispatch_gemm_configs(self) -> tuple[DispatchGemmConfig, DispatchGemmConfig]:
        """Of a call without and with a backward pass to come."""
        rows = self.workspace.recv_rows.local
        settings = self.settings
        return dispatch_config(settings, rows, save_pre=False), dispatch_config(settings, rows, save_pre=True)

    @cached_property
    def _gemm_combine_config(self) -> GemmCombineConfig:
        settings, rows = self.settings, self.workspace.combine_rows.local
        return with_biases(settings, combine_config(settings, settings.layer1.num_panels, rows))

    @cached_property
    def _gemm_combine_fp8_config(self) -> GemmCombineConfig:
        """In Triton no comm block runs beside its tiles, which leave no registers."""
        settings, rows = self.settings, self.workspace.combine_rows.local
        config = combine_config(replace(settings, comm_blocks=0), settings.layer1.num_panels, rows)
        stages, comm_blocks = settings.tile.num_stages, settings.comm_blocks
        return with_biases(settings, replace(config, block_k=FP8_BLOCK, num_stages=stages, comm_blocks=comm_blocks))

    @cached_property
    def _dgrad_combine_config(self) -> GemmCombineConfig:
        settings, rows = self.settings, self.workspace.combine_rows.local
        return combine_config(settings, settings.layer0_backward.num_panels, rows)

    def _exchange(self, ids: Tensor, weights: Tensor, *, trains: bool = False, in_halves: bool = False) -> _PendingPlan:
        """``trains`` is not sent: a rank alone in its backward pass meets the barrier's deadline."""
        pending = _PendingPlan(self, ids, weights, in_halves=in_halves)
        self.workspace.comm.in_flight = True
        pending.exchange("send" if in_halves else "all")
        return pending

    def dispatch_gemm(
        self, x: Tensor, w1: Tensor, plan: Plan, b1: Tensor | None = None, *, save_pre_activation: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One launch."""
        x = aligned(x)
        rows, ffn = plan.routed_row_ids.numel(), w1.shape[1] // 2
        hidden = x.new_empty(rows, ffn)
        pre = x.new_empty(rows, 2 * ffn) if save_pre_activation else None
        wire, table = recv_wire(self.workspace), tile_table(plan, Launch.DISPATCH_GEMM)
        config = self._dispatch_gemm_configs[save_pre_activation]
        dispatch_gemm(x, w1, hidden, pre, wire, sends_of(plan), table, config, b1)
        return hidden, pre

    def gemm_combine(self, hidden: Tensor, w2: Tensor, plan: Plan, b2: Tensor | None = None) -> Tensor:
        """One launch, or two beside each other (``comet.kernels.layer.triton.gemm_combine``)."""
        y = hidden.new_empty(hidden.shape[0], w2.shape[1])
        out = hidden.new_empty(plan.num_tokens, w2.shape[1])
        wire, returns = combine_wire(self.workspace), returns_of(plan, weighted=True)
        config, table = self._gemm_combine_config, tile_table(plan, Launch.GEMM_COMBINE)
        gemm_combine(hidden, w2, y, out, wire, returns, table, config, bias=b2)
        return out

    def dispatch_gemm_fp8(self, x: Tensor, w1: FP8, plan: Plan, b1: Tensor | None = None) -> FP8:
        """A launch that quantises, and one for the rest."""
        x, workspace, settings = aligned(x), self.workspace, self.settings
        rows, ffn = plan.routed_row_ids.numel(), w1.elements.shape[1] // 2
        landing = workspace.recv_rows.with_columns(packed_columns(x.shape[1], x.dtype))
        own = landing.local[plan.own_rows]
        pack_rows(x, own.view(torch.int32))
        elements = x.new_empty(rows, ffn, dtype=w1.elements.dtype)
        scales = x.new_empty(ffn // FP8_BLOCK, rows, dtype=torch.float32)
        config = replace(dispatch_config(settings, x, save_pre=False), push_cols=min(512, power_of_2(own.shape[1])))
        table = tile_table(plan, Launch.DISPATCH_GEMM)
        wire = make_wire(workspace, landing, workspace.recv_flags)
        wire = replace(wire, rows=wire.rows.view(torch.int32))
        weights, hidden = Scaled(elements=w1.elements, scales=w1.scales), Scaled(elements=elements, scales=scales)
        fp8_dispatch_gemm(weights, hidden, wire, sends_of(plan), table, config, b1)
        return FP8(elements=elements, scales=scales.T, block_rows=1, trusted=True)

    def gemm_combine_fp8(self, hidden: FP8, w2: FP8, plan: Plan, b2: Tensor | None = None) -> Tensor:
        """One launch, or two beside each other (``comet.kernels.layer.triton.gemm_combine``)."""
        dtype, hidden_size = self.workspace.shape.dtype, w2.elements.shape[1]
        y = torch.empty(hidden.elements.shape[0], hidden_size, dtype=dtype, device=hidden.elements.device)
        out = y.new_empty(plan.num_tokens, hidden_size)
        wire, returns = combine_wire(self.workspace), returns_of(plan, weighted=True)
        rows = Scaled(elements=hidden.elements, scales=hidden.scales.T)
        weights = Scaled(elements=w2.elements, scales=w2.scales)
        config, table = self._gemm_combine_fp8_config, tile_table(plan, Launch.GEMM_COMBINE)
        gemm_combine(rows, weights, y, out, wire, returns, table, config, bias=b2)
        return out

    def barrier(self) -> None:
        """On the device, in stream order."""
        workspace, flags = self.workspace, self.workspace.barrier_flags
        workspace.comm.in_flight = True
        barrier_kernel[(1,)](
            flags.pointers, workspace.epoch, workspace.fault, flags.rank, len(flags.peers), workspace.timeout_ns,
            W_BLOCK=power_of_2(len(flags.peers)), INTERPRET=triton.knobs.runtime.interpret,
        )  # fmt: skip

    def dispatch_dgrad(self, grad_output: Tensor, w2: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """A launch each for dispatch and GEMM, or one for both."""
        grad_output, num_rows = aligned(grad_output), plan.routed_row_ids.numel()
        grads, out = grad_output.new_empty(num_rows, w2.shape[1]), grad_output.new_empty(num_rows, w2.shape[2])
        config = GradHiddenConfig(
            colocated=not self.settings.comm_blocks,
            dispatch=DispatchConfig(push_cols=move_cols(grad_output, 1024)),
            gemm=GemmConfig.select(out.dtype),
        )
        wire, table = recv_wire(self.workspace), tile_table(plan, Launch.DISPATCH_DGRAD)
        grad_hidden(grad_output, w2, grads, out, wire, sends_of(plan), table, plan.tiles, config)
        return grads, out

    def activation_backward(self, pre_activation: Tensor, grad_hidden: Tensor, plan: Plan) -> ActivationGradients:
        """Routed rows of no tile are undefined."""
        grad_pre, weighted_hidden = torch.empty_like(pre_activation), torch.empty_like(grad_hidden)
        row_grads, table = torch.zeros_like(plan.row_weights), tile_table(plan, Launch.DISPATCH_DGRAD)
        rows, results = (plan.routed_slots, plan.row_weights, table), (grad_pre, weighted_hidden, row_grads)
        activation_backward(pre_activation, grad_hidden, *rows, *results, self.settings.activation)
        return ActivationGradients(grad_pre, weighted_hidden, row_grads)

    def bias_backward(
        self, grad_pre: Tensor, grad_rows: Tensor, b2: Tensor | None, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """A launch for each bias, and one for the routing weights."""
        experts, segments = plan.layout.experts_local, (plan.segment_starts, plan.segment_counts)
        b1_grad, b2_grad = (
            grad_pre.new_empty(experts, grad_pre.shape[1]),
            grad_rows.new_empty(experts, grad_rows.shape[1]),
        )
        bias_gradient(grad_pre, b1_grad, segments, None)
        bias_gradient(grad_rows, b2_grad, segments, (plan.routed_row_ids, plan.routed_slots, plan.row_weights))
        if b2 is not None:
            table = tile_table(plan, Launch.DISPATCH_DGRAD)
            add_bias_products(grad_rows, b2, plan.routed_slots, table, grad_row_weights)
        return b1_grad, b2_grad

    def dgrad_combine(
        self, grad_pre: Tensor, w1: Tensor, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Launched as layer 1 is."""
        workspace = self.workspace
        y = grad_pre.new_empty(grad_pre.shape[0], w1.shape[2])
        out = grad_pre.new_empty(plan.num_tokens, w1.shape[2])
        grads = GradWire(
            row_grads=grad_row_weights,
            landing=workspace.combine_grads.local,
            landing_pointers=workspace.combine_grads.pointers,
            out=grad_row_weights.new_empty(plan.num_tokens, plan.layout.top_k),
        )
        wire, returns = combine_wire(workspace), returns_of(plan, weighted=False, grads=grads)
        config, table = self._dgrad_combine_config, tile_table(plan, Launch.DGRAD_COMBINE)
        gemm_combine(grad_pre, w1, y, out, wire, returns, table, config, b_is_kn=True)
        return out, grads.out

    def fc1_wgrad(self, grad_pre: Tensor, received: Tensor, plan: Plan) -> Tensor:
        """A gather, then a GEMM contracted over rows."""
        rows = received.new_empty(plan.routed_row_ids.numel(), received.shape[1])
        gather_rows(received, rows, plan.routed_row_ids, tile_table(plan, Launch.DGRAD_COMBINE))
        return wgrad(grad_pre, rows, plan, Launch.DGRAD_COMBINE)

    def fc2_wgrad(self, grad_rows: Tensor, weighted_hidden: Tensor, plan: Plan) -> Tensor:
        """A GEMM contracted over rows."""
        return wgrad(grad_rows, weighted_hidden, plan, Launch.DISPATCH_DGRAD)

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        """One launch."""
        config = DispatchConfig(push_cols=move_cols(rows, 1024))
        landing = self.workspace.recv_rows.with_columns(rows.shape[1])
        wire = make_wire(self.workspace, landing, self.workspace.recv_flags)
        launch_dispatch(rows, wire, sends_of(plan), plan.counters_of(Launch.DISPATCH_DGRAD), config)
        return landing.local

    def combine(self, y: Tensor, plan: Plan, *, weighted: bool) -> Tensor:
        """The launch of layer 1 with no tile to multiply: what remains of it is the combine."""
        out = y.new_empty(plan.num_tokens, y.shape[1])
        settings = replace(self.settings, comm_blocks=self.settings.comm_blocks or COMM_BLOCKS)
        config = replace(combine_config(settings, 1, out), flatten=False, cuda_kernels=False)
        table = replace(tile_table(plan, Launch.GEMM_COMBINE), num_tiles=plan.tile_starts.new_zeros(1))
        gemm_combine(
            y, y[None], y, out, combine_wire(self.workspace), returns_of(plan, weighted=weighted), table, config
        )
        return out


class _PendingPlan:
    """A plan whose tensors kernels are filling; ids and weights ``(T, K)`` are this rank's."""

    def __init__(self, backend: Fused, ids: Tensor, weights: Tensor, *, in_halves: bool) -> None:
        layout, workspace, rules = backend.layout, backend.workspace, backend.rules
        self.layout, self.rules, self.routing, self.in_halves = layout, rules, (ids, weights), in_halves
        self.config, self.pool = plan_config(layout, rules), routing_pool(layout, workspace)
        self.scratch = PlanScratch.allocate(self.pool, self.config)
        shapes = plan_shapes(layout, workspace.max_tokens, rules)
        self.memory = allocate(shapes, ids.device)
        self.tensors = cut(self.memory, shapes)
        self.tensors["row_weights"] = self.tensors["row_weights"].view(torch.float32)

    def exchange(self, part: Literal["send", "count", "all"]) -> None:
        """Send ids and weights to all ranks, count what all ranks sent, or both in one launch."""
        exchange(*self.routing, self.pool, self.config, self.scratch, self.tensors["counters"], part=part)

    def finish(self) -> Plan:
        """Launch the rest."""
        if self.in_halves:
            self.exchange("count")
        placed = {name: tensor for name, tensor in self.tensors.items() if name != "counters"}
        place_plan(self.pool, self.config, self.scratch, placed)
        tensors = self.tensors | {"memory": self.memory}
        return Plan.create(self.layout, self.routing[0].shape[0], self.pool.max_tokens, self.rules, tensors)


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
    return RoutingPool(
        ids=workspace.ids.local,
        id_pointers=workspace.ids.pointers,
        weights=workspace.weights.local,
        weight_pointers=workspace.weights.pointers,
        flags=workspace.ids_flags.local,
        flag_pointers=workspace.ids_flags.pointers,
        epoch=workspace.epoch,
        fault=workspace.fault,
        rank=layout.rank,
        timeout_ns=workspace.timeout_ns,
    )


def wgrad(left: Tensor, right: Tensor, plan: Plan, launch: Launch) -> Tensor:
    """Gradient ``(e, M', N')`` of a weight: the outer products of routed rows ``(Q, M')`` and ``(Q, N')``, added up.

    ``launch`` is the one it comes behind, whose counters it shares.
    """
    out = left.new_empty(plan.layout.experts_local, left.shape[1], right.shape[1])
    segments = plan.segment_starts, plan.segment_counts
    if runs_cuda(left, right, out):
        group_gemm_wgrad_cuda(left, right, out, *segments, plan.counters_of(launch)[TICKETS:])
    else:
        group_gemm_wgrad(left, right, out, *segments, config=GemmConfig.select(left.dtype))
    return out


def dispatch_config(settings: LayerSettings, x: Tensor, *, save_pre: bool) -> DispatchGemmConfig:
    """Of layer 0. Flattened, the epilogue's shared memory adds to the ring's: storing gate | up costs a stage."""
    tile = settings.tile
    return DispatchGemmConfig(
        comm_blocks=settings.comm_blocks,
        block_f=tile.block_f,
        block_k=tile.block_k,
        push_cols=move_cols(x, 1024),
        flatten=x.dtype != torch.float32,
        num_stages=min(tile.num_stages, 3) if save_pre else tile.num_stages,
        activation=settings.activation,
    )


def with_biases(settings: LayerSettings, config: GemmCombineConfig) -> GemmCombineConfig:
    """Of layer 1's forward pass: in Triton on all ranks where one adds biases: they have to agree in their flags."""
    return replace(config, cuda_kernels=config.cuda_kernels and not settings.expert_bias)


def combine_config(settings: LayerSettings, num_panels: int, out: Tensor) -> GemmCombineConfig:
    """Of layer 1, or of layer 0's gradients, whose result is ``out (T, D)``."""
    tile = settings.tile
    return GemmCombineConfig(
        comm_blocks=settings.comm_blocks,
        num_panels=num_panels,
        block_n=tile.block_n,
        block_k=tile.block_k,
        move_cols=move_cols(out, 512 if settings.comm_blocks or out.element_size() > 2 else 256),
        flatten=out.dtype != torch.float32,
        num_stages=tile.num_stages if settings.comm_blocks else min(tile.num_stages, 3),
        cuda_kernels=settings.cuda_kernels,
        reserved_sms=settings.reserved_sms,
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
