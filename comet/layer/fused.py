"""The layer by kernels: one launch for each of layer 0, layer 1 and their gradients, two for the plan.

In CUDA C++ on Hopper, and by its twins in Triton, compiled or interpreted, where a kernel in CUDA C++ cannot run. Below
the backend stands which of the two is launched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from comet.comm.base import SymmTensor
from comet.config import require
from comet.kernels.gemm.activation import activation_backward
from comet.kernels.gemm.bias import add_bias_products, bias_gradient
from comet.kernels.gemm.fp8 import pack_rows
from comet.kernels.gemm.gather_rows import OwnRows, gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm
from comet.kernels.gemm.wgrad import group_gemm_wgrad
from comet.kernels.gemm.wgrad_cuda import TICKETS, group_gemm_wgrad_cuda, runs_cuda
from comet.kernels.layer import dispatch_gemm as cuda_layer0
from comet.kernels.layer import gemm_combine as cuda_layer1
from comet.kernels.layer.triton.dispatch import DispatchLists
from comet.kernels.layer.triton.dispatch import dispatch as launch_dispatch
from comet.kernels.layer.triton.dispatch_gemm import dispatch_gemm
from comet.kernels.layer.triton.gemm_combine import gemm_combine
from comet.kernels.plan.metadata import PlanConfig, PlanScratch, PoolTensors, RoutingPool, exchange, place_plan
from comet.kernels.runtime.arguments import CombineLists, GradBuffer, Scaled, SymmBuffer, TileTable, aligned, power_of_2
from comet.kernels.runtime.buffers import allocate, cut
from comet.kernels.runtime.primitives import barrier_kernel
from comet.layer.backend import ActivationGradients, Backend
from comet.layer.plan import NUM_COUNTERS, Launch, Plan, PlanRules, plan_shapes
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.quantization.packed import packed_columns
from comet.utils.graphs import is_capturing


class Fused(Backend):
    """The layer by kernels, on GPUs and in Triton's interpreter."""

    def _plan(self, ids: Tensor, weights: Tensor, *, trains: bool) -> Plan:
        layout, workspace, rules = self.layout, self.workspace, self.rules
        config, pool = plan_config(layout, rules), routing_pool(layout, workspace)
        scratch, shapes = PlanScratch.allocate(pool, config), plan_shapes(layout, workspace.max_tokens, rules)
        memory = allocate(shapes, ids.device)
        tensors = cut(memory, shapes)
        tensors["row_weights"] = tensors["row_weights"].view(torch.float32)
        exchange(ids, weights, pool, config, scratch, tensors["counters"], call=self.call(trains=trains))
        place_plan(pool, config, scratch, {name: each for name, each in tensors.items() if name != "counters"})
        return Plan(
            layout=layout,
            num_tokens=ids.shape[0],
            max_tokens=pool.max_tokens,
            block_rows=rules.block_rows,
            memory=memory,
            **tensors,
        )

    def dispatch_gemm(
        self, x: Tensor, w1: Tensor | FP8, plan: Plan, b1: Tensor | None = None, *, save_pre_activation: bool
    ) -> tuple[Tensor | FP8, Tensor | None]:
        """One launch; in block FP8 one that quantises before it."""
        if isinstance(w1, FP8):
            return self._dispatch_gemm_fp8(x, w1, plan, b1), None
        x = aligned(x)
        rows, ffn = plan.routed_row_ids.numel(), w1.shape[1] // 2
        hidden = x.new_empty(rows, ffn)
        pre = x.new_empty(rows, 2 * ffn) if save_pre_activation else None
        self._layer0(x, w1, hidden, pre, recv_symm(self.workspace), plan, b1)
        return hidden, pre

    def gemm_combine(self, hidden: Tensor | FP8, w2: Tensor | FP8, plan: Plan, b2: Tensor | None = None) -> Tensor:
        """One launch."""
        operands: tuple[Any, Any] = hidden, w2
        if isinstance(hidden, FP8) and isinstance(w2, FP8):
            operands = (
                Scaled(elements=hidden.elements, scales=hidden.scales.T),
                Scaled(elements=w2.elements, scales=w2.scales),
            )
        return self._layer1(*operands, plan, combine_lists(plan, weighted=True), Launch.GEMM_COMBINE, b2)

    def _dispatch_gemm_fp8(self, x: Tensor, w1: FP8, plan: Plan, b1: Tensor | None) -> FP8:
        x, rows, ffn = aligned(x), plan.routed_row_ids.numel(), w1.elements.shape[1] // 2
        symm = recv_symm(self.workspace, packed_columns(x.shape[1], x.dtype))
        symm = replace(symm, rows=symm.rows.view(torch.int32))
        pack_rows(x, symm.rows[plan.own_rows])
        elements = x.new_empty(rows, ffn, dtype=w1.elements.dtype)
        scales = x.new_empty(ffn // FP8_BLOCK, rows, dtype=torch.float32)
        weights, hidden = Scaled(elements=w1.elements, scales=w1.scales), Scaled(elements=elements, scales=scales)
        self._layer0(None, weights, hidden, None, symm, plan, b1)
        return FP8(elements=elements, scales=scales.T, block_rows=1, trusted=True)

    def _layer0(
        self,
        x: Tensor | None,
        w1: Tensor | Scaled,
        hidden: Tensor | Scaled,
        pre: Tensor | None,
        symm: SymmBuffer,
        plan: Plan,
        b1: Tensor | None,
    ) -> None:
        """In CUDA C++ where it can run, else in Triton; ranks may differ in it."""
        table = tile_table(plan, Launch.DISPATCH_GEMM)
        launch = cuda_layer0.dispatch_gemm_cuda if cuda_layer0.can_run(w1, table) else dispatch_gemm
        launch(x, w1, hidden, pre, symm, dispatch_lists(plan), table, self.settings, b1)

    def _layer1(
        self,
        a: Tensor | Scaled,
        b: Tensor | Scaled,
        plan: Plan,
        returns: CombineLists,
        kind: Launch,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Layer 1, or fc1_dgrad where ``returns`` has gradients: ``(T, D)``.

        In CUDA C++ where it can run on all ranks, as its flags are not those of Triton's, else in Triton.
        """
        symm, table = combine_symm(self.workspace), tile_table(plan, kind)
        columns, dtype = self.workspace.shape.hidden_size, self.workspace.shape.dtype
        y = plan.row_weights.new_empty(plan.routed_row_ids.numel(), columns, dtype=dtype)
        out = y.new_empty(plan.num_tokens, columns)
        in_cuda = self.settings.cuda_kernels and cuda_layer1.can_run(y, b, symm, returns, table)
        launch = cuda_layer1.gemm_combine_cuda if in_cuda else gemm_combine
        launch(a, b, y, out, symm, returns, table, self.settings, bias)
        return out

    def barrier(self, plan: Plan) -> None:
        """Run on the device, in stream order."""
        workspace, flags, calls = self.workspace, self.workspace.barrier_flags, self.workspace.calls
        barrier_kernel[(1,)](
            flags.pointers, calls.pointers, plan.status, workspace.epoch, workspace.fault, flags.rank,
            len(flags.peers), workspace.timeout_ns, self.call(trains=True),
            W_BLOCK=power_of_2(len(flags.peers)), INTERPRET=triton.knobs.runtime.interpret,
        )  # fmt: skip

    def dispatch_dgrad(self, grad_output: Tensor, w2: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """In CUDA C++ one launch for dispatch and GEMM, and a copy behind it; else a launch for each of them."""
        grad_output, num_rows = aligned(grad_output), plan.routed_row_ids.numel()
        grads, out = grad_output.new_empty(num_rows, w2.shape[1]), grad_output.new_empty(num_rows, w2.shape[2])
        symm, sends = recv_symm(self.workspace), dispatch_lists(plan)
        table = tile_table(plan, Launch.DISPATCH_DGRAD)
        if cuda_layer0.can_run(w2, table, is_dgrad=True):
            by_phase = replace(table, tiles=plan.tiles)
            cuda_layer0.fc2_dgrad_cuda(grad_output, w2, out, symm, sends, by_phase, self.settings.comm_blocks)
            own = OwnRows(rows=grad_output, first=symm.rank * symm.max_tokens)
            gather_rows(symm.rows, grads, table.row_ids, table, own)
        else:
            launch_dispatch(grad_output, symm, sends, table.counters)
            gather_rows(symm.rows, grads, table.row_ids, table)
            group_gemm(grads, w2, out, table, gather=False, layout="kn", config=GemmConfig.select(out.dtype))
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
        received = self.workspace.combine_grads
        grads = GradBuffer(
            row_grads=grad_row_weights,
            received=received.local,
            received_pointers=received.pointers,
            out=grad_row_weights.new_empty(plan.num_tokens, plan.layout.top_k),
        )
        returns = combine_lists(plan, weighted=False, grads=grads)
        return self._layer1(grad_pre, w1, plan, returns, Launch.DGRAD_COMBINE), grads.out

    def fc1_wgrad(self, grad_pre: Tensor, received: Tensor, plan: Plan) -> Tensor:
        """A gather, then a GEMM contracted over rows."""
        return wgrad(grad_pre, self.routed_rows(received, plan), plan, Launch.DGRAD_COMBINE)

    def routed_rows(self, received: Tensor, plan: Plan) -> Tensor:
        """One launch."""
        rows = received.new_empty(plan.routed_row_ids.numel(), received.shape[1])
        gather_rows(received, rows, plan.routed_row_ids, tile_table(plan, Launch.DGRAD_COMBINE))
        return rows

    def fc2_wgrad(self, grad_rows: Tensor, weighted_hidden: Tensor, plan: Plan) -> Tensor:
        """A GEMM contracted over rows."""
        return wgrad(grad_rows, weighted_hidden, plan, Launch.DISPATCH_DGRAD)

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        """One launch."""
        symm, counters = recv_symm(self.workspace, rows.shape[1]), plan.counters_of(Launch.DISPATCH_DGRAD)
        launch_dispatch(rows, symm, dispatch_lists(plan), counters)
        return symm.rows

    def combine(self, y: Tensor, plan: Plan, *, weighted: bool) -> Tensor:
        """The launch of layer 1 with no tile to multiply: what remains of it is the combine."""
        out = y.new_empty(plan.num_tokens, y.shape[1])
        settings = replace(self.settings, num_panels=1)
        table = replace(tile_table(plan, Launch.GEMM_COMBINE), num_tiles=plan.tile_starts.new_zeros(1))
        gemm_combine(
            y, y[None], y, out, combine_symm(self.workspace), combine_lists(plan, weighted=weighted), table, settings
        )
        return out


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


# ---- what the launches are handed ------------------------------------------------------------------------------------


def plan_config(layout: ExpertLayout, rules: PlanRules) -> PlanConfig:
    """Return the constants of the plan's kernels."""
    return PlanConfig(
        top_k=layout.top_k,
        experts_local=layout.experts_local,
        ep=layout.ep,
        tp=layout.tp,
        block_rows=rules.block_rows,
        expert_capacity=rules.expert_capacity,
    )


def routing_pool(layout: ExpertLayout, workspace: Workspace) -> RoutingPool:
    """Return the memory in which ids and weights of all ranks arrive."""
    tensors = PoolTensors(
        ids=workspace.ids.local,
        id_pointers=workspace.ids.pointers,
        weights=workspace.weights.local,
        weight_pointers=workspace.weights.pointers,
        flags=workspace.ids_flags.local,
        flag_pointers=workspace.ids_flags.pointers,
        calls=workspace.calls.local,
        call_pointers=workspace.calls.pointers,
        epoch=workspace.epoch,
        fault=workspace.fault,
    )
    return RoutingPool(tensors=tensors, rank=layout.rank, timeout_ns=workspace.timeout_ns)


def recv_symm(workspace: Workspace, columns: int | None = None) -> SymmBuffer:
    """Return the buffer in which tokens arrive, or rows of so many columns."""
    rows = workspace.recv_rows if columns is None else workspace.recv_rows.with_columns(columns)
    return _symm(workspace, rows, workspace.recv_flags)


def combine_symm(workspace: Workspace) -> SymmBuffer:
    """Return the buffer in which partial sums arrive."""
    return _symm(workspace, workspace.combine_rows, workspace.combine_flags)


def _symm(workspace: Workspace, rows: SymmTensor, flags: SymmTensor) -> SymmBuffer:
    recorder = workspace.recorder
    require(
        recorder is None or not is_capturing(recorder.events.device),
        "a CUDA graph of a layer must not be captured while it is recorded, as its replays would go on recording: "
        "inside record, call the layer without graphs",
    )
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
        recorder=recorder,
    )


def dispatch_lists(plan: Plan) -> DispatchLists:
    """List what comm blocks or warps of this rank send; the counters of the chunks are for layer 0."""
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
