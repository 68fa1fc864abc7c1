"""Routed experts over ranks: plan -> layer 0 -> layer 1, and the gradients, as one differentiable operation.

Backward of layer 1 is a dispatch (the output's gradient travels to the experts) and a GEMM; backward of layer 0 is a
GEMM and a combine; the weight gradients need no communication. Saved: the rows each rank received and gate | up; expert
outputs are never kept, because the gradient of a routing weight is the product of hidden with the gradient that reaches
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from comet.comm.base import require_memory
from comet.comm.collectives import wants_grad
from comet.config import MoEConfig, OverlapConfig, check_kernels, require
from comet.layer.backend import Backend
from comet.layer.expert_path import DeferredWgrad, ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.plan import Plan, check_tokens
from comet.layer.twin.layer import Twin
from comet.layer.weights import match_fp8_weights, match_once, match_weights, pad_width
from comet.layer.workspace import Workspace
from comet.layout import Biases, RoutedTokens, added_biases
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.utils.derivatives import first_only
from comet.utils.uncompiled import uncompiled

WITHOUT_MEMORY = "use path 'plain' (moe_path=plain, or auto), or groups of ep x tp ranks on one node of Hopper GPUs"


@dataclass(frozen=True, slots=True)
class Saved:
    """Tensors that a backward pass reads of the forward pass before it."""

    received: Tensor  # (R, D) tokens that arrived, own ones included
    pre_activation: Tensor  # (Q, 2F) gate | up
    plan: Plan


def forward(
    routed: RoutedTokens, w1: Tensor | FP8, w2: Tensor | FP8, backend: Backend, biases: Biases | None, *, trains: bool
) -> tuple[Tensor, Saved | None]:
    """The weighted sum of each token's experts.

    Args:
        routed: Tokens that are contiguous.
        w1: ``(e, 2F, D)`` gate rows, then up rows, of this rank's experts (its slice of F under TP).
        w2: ``(e, D, F)``.
        biases: ``(e, 2F)`` and ``(e, D)`` of these experts; ``None``: there are none.
        trains: Whether a backward pass will follow, for which the second result is; block FP8 has none.
    """
    b1, b2 = added_biases(biases, backend.layout)
    backend.check(routed.top_k_ids, routed.top_k_weights)
    with backend.workspace.comm.in_flight:
        plan = backend.plan(routed.top_k_ids, routed.top_k_weights, trains=trains)
        hidden, pre_activation = backend.dispatch_gemm(routed.tokens, w1, plan, b1, save_pre_activation=trains)
        output = backend.gemm_combine(hidden, w2, plan, b2)
    if pre_activation is None:
        return output, None
    del hidden
    return output, Saved(backend.keep_received(routed.tokens, plan), pre_activation, plan)


def backward(
    grad_output: Tensor,
    saved: Saved,
    w1: Tensor,
    w2: Tensor,
    backend: Backend,
    deferred: DeferredWgrad | None,
    biases: Biases | None = None,
) -> tuple[Tensor | None, ...]:
    """Layer 1's dispatch and GEMM for hidden, layer 0's GEMM and combine for the tokens, and both weights.

    Args:
        grad_output: ``(T, D)`` contiguous.
        saved: Of the forward pass, with a plan for the backward pass.
        deferred: Where to leave the weight gradients; ``None``: they are made here.

    Returns:
        Gradients of tokens, routing weights, w1, w2 and biases, in their shapes; ``None`` of weights that are deferred.
    """
    plan = saved.plan
    backend.barrier(plan)
    grad_rows, grad_hidden = backend.dispatch_dgrad(grad_output, w2, plan)
    grad_pre, weighted_hidden, grad_row_weights = backend.activation_backward(saved.pre_activation, grad_hidden, plan)
    del grad_hidden
    grad_biases: tuple[Tensor, ...] = ()
    if biases is not None:
        _, b2 = added_biases(biases, backend.layout)
        grad_biases = backend.bias_backward(grad_pre, grad_rows, b2, grad_row_weights, plan)
    if deferred is not None:
        deferred[:] = (
            partial(backend.fc1_wgrad, grad_pre, saved.received, plan),
            partial(backend.fc2_wgrad, grad_rows, weighted_hidden, plan),
        )
        return *backend.dgrad_combine(grad_pre, w1, grad_row_weights, plan), None, None, *grad_biases
    grad_w2 = backend.fc2_wgrad(grad_rows, weighted_hidden, plan)
    del grad_rows, weighted_hidden  # before as much is needed again
    grad_x, grad_top_k_weights = backend.dgrad_combine(grad_pre, w1, grad_row_weights, plan)
    grad_w1 = backend.fc1_wgrad(grad_pre, saved.received, plan)
    return grad_x, grad_top_k_weights, grad_w1, grad_w2, *grad_biases


class SymmetricPath(ExpertPath):
    """``forward`` and ``backward`` as one differentiable operation for a layer: plan -> layer 0 -> layer 1.

    Args:
        overlap: Split and order of the work; ``None`` takes what was measured.
    """

    def __init__(
        self, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, *, use_kernels: bool
    ) -> None:
        self.name = "fused" if use_kernels else "twin"
        require_memory(group.comm, f"path={self.name!r}", WITHOUT_MEMORY)
        self.backend = make_backend(config, group, overlap, use_kernels=use_kernels)
        self.takes_fp8 = use_kernels and config.hidden_size % FP8_BLOCK == 0
        self.layout, self.workspace = self.backend.layout, self.backend.workspace
        rules = dict(biased=config.expert_bias, dtype=group.workspace.shape.dtype, device=group.device)
        self.match = match_once(match_weights, config, self.layout, **rules)
        self.match_fp8 = match_once(match_fp8_weights, config, self.layout, **rules)
        self.deferred: DeferredWgrad | None = None

    @uncompiled
    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        """The weighted sum of each token's experts, as every ``comet.layer.paths.ExpertPath`` makes it.

        Raises:
            ValueError: If tokens or routing do not fit the pool or each other, or weights the layer; on a CPU, on all
                ranks, if gradients are wanted on some of them only.
        """
        check_tokens(routed.tokens, routed.top_k_ids, self.workspace)
        self.match(w1, w2, *(biases or ()))
        w1, w2 = w1.contiguous(), w2.contiguous()  # kernels find their rows by address
        biases = biases and Biases(*(bias.contiguous() for bias in biases))
        padded_w1, padded_w2, biases = pad_width(w1, w2, biases)
        with self.workspace.forward_step:
            # Asked out here: inside of an autograd function inputs seem to need gradients under no_grad, too.
            if wants_grad(*routed, w1, w2, *(biases or ())):
                deferred = self.deferred if padded_w1 is w1 else None
                weights = padded_w1, padded_w2, self.backend, deferred, *(biases or ())
                output: Tensor = _RoutedExperts.apply(*routed, *weights)
                return output
            return forward(in_order(routed), padded_w1, padded_w2, self.backend, biases, trains=False)[0]

    @uncompiled
    def fp8(self, routed: RoutedTokens, w1: FP8, w2: FP8, biases: Biases | None = None) -> Tensor:
        """Run the layer for inference with e4m3 products: tokens and hidden are quantised before each.

        Weights have a scale per 128 x 128, elements and scales contiguous; biases are of the pool's type.

        Raises:
            ValueError: If D or F/TP is not a multiple of 128, a gradient is wanted, tokens or routing do not fit the
                pool or each other, or weights the layer.
        """
        check_fp8(routed, w1, w2, self.workspace)
        self.match_fp8(w1.elements, w2.elements, w1.scales, w2.scales, *(biases or ()))
        with self.workspace.forward_step:
            return forward(in_order(routed), w1, w2, self.backend, biases, trains=False)[0]

    @contextmanager
    def defer_wgrad(self) -> Iterator[DeferredWgrad]:
        """Backward passes of calls made inside leave the gradients of w1 and w2 to their caller.

        Yields:
            Where they are left: ``(e, 2F/TP, D)`` and ``(e, D, F/TP)``. Nothing is, and the gradients go their usual
            way, where F/TP is no multiple of 16.
        """
        self.deferred = []
        try:
            yield self.deferred
        finally:
            self.deferred = None


def check_fp8(routed: RoutedTokens, w1: FP8, w2: FP8, workspace: Workspace) -> None:
    """Raise ``ValueError`` unless tokens fit the pool, weights are in block FP8 and no gradient is wanted."""
    check_tokens(routed.tokens, routed.top_k_ids, workspace)
    for name, weight in (("w1", w1), ("w2", w2)):
        require(isinstance(weight, FP8), f"{name} of type {type(weight).__name__} must be FP8: call the path")
    require(
        not wants_grad(*routed),
        "requires_grad=True of tokens or top_k_weights must be False: experts in block FP8 are for inference",
    )


def in_order(routed: RoutedTokens) -> RoutedTokens:
    """With tokens that are contiguous."""
    return routed._replace(tokens=routed.tokens.contiguous())


def make_backend(config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, *, use_kernels: bool) -> Backend:
    """The backend of one layer, by kernels (on a GPU, or in the interpreter) or in plain torch."""
    if not use_kernels:
        return Twin.create(config, group, overlap)
    from comet.layer.fused import Fused  # needs Triton

    check_kernels(group.workspace.shape.dtype, group.device)
    return Fused.create(config, group, overlap)


class _RoutedExperts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        top_k_ids: Tensor,
        top_k_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        backend: Backend,
        deferred: DeferredWgrad | None,
        *biases: Tensor,
    ) -> Tensor:
        given = Biases(*biases) if biases else None
        routed = RoutedTokens(x.contiguous(), top_k_ids, top_k_weights)
        output, saved = forward(routed, w1, w2, backend, given, trains=True)
        assert saved is not None
        ctx.plan, ctx.backend, ctx.deferred = saved.plan, backend, deferred
        # The plan is saved like any other tensor: a checkpoint that runs the forward pass again, with what may be
        # another routing, hands out the tensors of that one, all of them or none.
        ctx.save_for_backward(saved.received, saved.pre_activation, saved.plan.memory, w1, w2, *biases)
        return output

    @staticmethod
    @first_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        workspace = ctx.backend.workspace
        with workspace.backward_step:
            received, pre_activation, plan_memory, w1, w2, *biases = ctx.saved_tensors
            saved = Saved(received, pre_activation, ctx.plan.for_backward(plan_memory))
            given = Biases(*biases) if biases else None
            with workspace.comm.in_flight:
                found = backward(grad_output.contiguous(), saved, w1, w2, ctx.backend, ctx.deferred, given)
        grad_x, grad_top_k_weights, grad_w1, grad_w2, *of_biases = found
        return grad_x, None, grad_top_k_weights, grad_w1, grad_w2, None, None, *of_biases
