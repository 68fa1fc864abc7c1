"""Routed experts as one differentiable operation.

Forward is layer 0, then layer 1. Backward of layer 1 is a dispatch (the output's gradient travels to the experts) and a
GEMM; backward of layer 0 is a GEMM and a combine; the weight gradients need no communication. Saved: the rows each rank
received and gate | up; expert outputs are never kept, because the gradient of a routing weight is the product of hidden
with the gradient that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comet.comm.collectives import wants_grad
from comet.layer.plan import Plan
from comet.layer.workspace import Workspace
from comet.quantization.formats import FP8
from comet.schedule.settings import LayerSettings


@dataclass(frozen=True, slots=True)
class Pieces:
    """What ``routed_experts`` runs on: a module of pieces (``comet.layer.fused`` or ``comet.layer.twin.layer``), pool
    and settings.

    ``later``, where it is not ``None``, gets what makes the gradients of w1 and of w2, which then are not made in the
    backward pass (``comet.layer.paths.SymmetricPath.weight_gradients_later``).
    """

    ops: ModuleType
    workspace: Workspace
    settings: LayerSettings
    later: list[Callable[[], Tensor]] | None = None


def routed_experts(x: Tensor, w1: Tensor, w2: Tensor, top_k_weights: Tensor, plan: Plan, pieces: Pieces) -> Tensor:
    """The weighted sum of each token's experts.

    Args:
        x: ``(T, D)`` this rank's tokens.
        w1: ``(e, 2F, D)`` gate rows, then up rows, of this rank's experts (its slice of F under TP).
        w2: ``(e, D, F)``.
        top_k_weights: ``(T, K)`` float32; only its gradient is made here, its values travelled with the plan.
        plan: Where rows go.
        pieces: Implementation, pool and launch settings.

    Returns:
        ``(T, D)``.
    """
    # Asked out here: inside of an autograd function inputs seem to need gradients under no_grad, too.
    if wants_grad(x, w1, w2, top_k_weights):
        output: Tensor = _RoutedExperts.apply(x, w1, w2, top_k_weights, plan, pieces)
        return output
    return run_layers(x.contiguous(), w1, w2, plan, pieces, save_pre=False)[0]


def run_layers(
    x: Tensor, w1: Tensor, w2: Tensor, plan: Plan, pieces: Pieces, *, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """Layer 0, then layer 1: ``(T, D)`` and, with ``save_pre``, gate | up ``(Q, 2F)`` of all routed rows."""
    ops, workspace, settings = pieces.ops, pieces.workspace, pieces.settings
    hidden, pre = ops.layer0(x, w1, plan, workspace, settings, save_pre=save_pre)
    output = ops.layer1(hidden, w2, plan, workspace, settings)
    workspace.comm.in_flight = False
    return output, pre


def fp8_experts(x: Tensor, w1: FP8, w2: FP8, plan: Plan, pieces: Pieces) -> Tensor:
    """The weighted sum of each token's experts in block FP8; not differentiable.

    Args:
        x: ``(T, D)`` this rank's tokens.
        w1: ``(e, 2F, D)`` gate rows, then up rows, of this rank's experts (its slice of F under TP).
        w2: ``(e, D, F)``.
        plan: Where rows go.
        pieces: Implementation, pool and launch settings.

    Returns:
        ``(T, D)``.
    """
    ops, arguments = pieces.ops, (plan, pieces.workspace, pieces.settings)
    output: Tensor = ops.layer1_fp8(ops.layer0_fp8(x.contiguous(), w1, *arguments), w2, *arguments)
    pieces.workspace.comm.in_flight = False
    return output


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, top_k_weights: Tensor, plan: Plan, pieces: Pieces
    ) -> Tensor:
        x = x.contiguous()
        y, pre = run_layers(x, w1, w2, plan, pieces, save_pre=True)
        ctx.plan, ctx.pieces = plan, pieces
        # The plan is saved like any other tensor: a checkpoint that runs the forward pass again, with what may be
        # another routing, hands out the tensors of that one, all of them or none.
        ctx.save_for_backward(keep_rows(x, plan, pieces.workspace), w1, w2, pre, plan.memory)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.pieces.workspace.backward_step:
            return _RoutedExperts.gradients(ctx, grad_y)

    @staticmethod
    def gradients(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """The backward pass, as one step of the group."""
        pieces = ctx.pieces
        ops, workspace, settings = pieces.ops, pieces.workspace, pieces.settings
        rows, w1, w2, pre, memory = ctx.saved_tensors
        plan = ctx.plan.in_memory(memory)
        ops.barrier(workspace)
        plan.counters.data.zero_()  # data: autograd would take the plan, of which they are a part, for changed
        grads, grad_hidden = ops.grad_hidden(grad_y.contiguous(), w2, plan, workspace, settings)
        grad_pre, weighted_hidden, row_grads = ops.swiglu_backward(pre, grad_hidden, plan)
        del grad_hidden
        make_w1 = partial(_grad_w1, ops, grad_pre, rows, plan)
        if pieces.later is not None:
            pieces.later[:] = [make_w1, partial(ops.grad_weight, grads, weighted_hidden, plan, launch=2)]
            grad_x, grad_top_k = ops.grad_tokens(grad_pre, w1, row_grads, plan, workspace, settings)
            return grad_x, None, None, grad_top_k, None, None
        grad_w2 = ops.grad_weight(grads, weighted_hidden, plan, launch=2)
        del grads, weighted_hidden  # before as much is needed again
        grad_x, grad_top_k = ops.grad_tokens(grad_pre, w1, row_grads, plan, workspace, settings)
        return grad_x, make_w1(), grad_w2, grad_top_k, None, None


def _grad_w1(ops: ModuleType, grad_pre: Tensor, rows: Tensor, plan: Plan) -> Tensor:
    grad: Tensor = ops.grad_weight(grad_pre, ops.routed_rows(rows, plan.routed_row_ids, plan), plan, launch=3)
    return grad


def keep_rows(x: Tensor, plan: Plan, workspace: Workspace) -> Tensor:
    """Copy the rows ``(R, D)`` as they arrived out of the pool, with own tokens; the next layer overwrites them."""
    rows = workspace.recv_rows.local.clone()
    first = plan.layout.rank * plan.max_tokens
    rows[first : first + plan.num_tokens] = x
    return rows
