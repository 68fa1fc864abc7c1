"""The router on Triton kernels, with gradients; imported only where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comet.config import MoEConfig
from comet.kernels.router.logits import router_logits
from comet.kernels.router.measure import LossRule, measure_gradient
from comet.kernels.router.measure import measure as measure_losses
from comet.kernels.router.select import SelectRule, select_gradient
from comet.kernels.router.select import select as select_ids
from comet.router.losses import RouterStats
from comet.utils.autocast import product
from comet.utils.derivatives import first_only


def logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return float32 logits of bfloat16 tokens ``(T, D)`` and weight ``(E, D)``, as accurate as float32 products."""
    return product(tokens, weight, lambda rows, weight: router_logits(rows.contiguous(), weight.contiguous()))


def select(logits: Tensor, selection_bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Ids ``(T, K)`` int32, weights ``(T, K)`` and scores ``(T, E)`` float32 with gradient, in one launch."""
    rule = SelectRule(
        top_k=config.top_k,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        sigmoid=config.score == "sigmoid",
        renormalize=config.renormalize,
        routed_scale=config.routed_scale,
    )
    result: tuple[Tensor, Tensor, Tensor] = _Select.apply(logits.contiguous(), selection_bias, rule)
    return result


def measure(logits: Tensor, scores: Tensor, top_k_ids: Tensor, config: MoEConfig, largest_logit: Tensor) -> RouterStats:
    """``measure_routing`` and ``watch_finite`` in one launch, or two for many tokens."""
    rule = LossRule(aux=config.aux_loss_coef if config.balance == "aux" else 0.0, z=config.z_loss_coef)
    inputs = (logits.contiguous(), scores.contiguous(), top_k_ids.int().contiguous())
    return RouterStats(*_Measure.apply(*inputs, largest_logit, rule))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, rule: SelectRule) -> tuple[Tensor, Tensor, Tensor]:
        ids, weights, scores = select_ids(logits, bias, rule)
        ctx.save_for_backward(scores, ids)
        ctx.rule = rule
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        return ids, weights, scores

    @staticmethod
    @first_only
    def backward(
        ctx: Any, _: None, grad_weights: Tensor | None, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if grad_weights is None and grad_scores is None:
            return None, None, None
        scores, ids = ctx.saved_tensors
        of_weights, of_scores = (None if grad is None else grad.contiguous() for grad in (grad_weights, grad_scores))
        return select_gradient(scores, ids, of_weights, of_scores, ctx.rule), None, None


class _Measure(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, scores: Tensor, ids: Tensor, largest: Tensor, rule: LossRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        aux_loss, z_loss, load = measure_losses(logits, scores, ids, largest, rule)
        ctx.save_for_backward(logits, scores, load)
        ctx.rule = rule
        unused = [loss for loss, factor in ((aux_loss, rule.aux), (z_loss, rule.z)) if factor == 0]
        ctx.mark_non_differentiable(load, *unused)
        ctx.set_materialize_grads(False)
        return aux_loss, z_loss, load

    @staticmethod
    @first_only
    def backward(
        ctx: Any, grad_aux: Tensor | None, grad_z: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        logits, scores, load = ctx.saved_tensors
        return *measure_gradient(logits, scores, load, (grad_aux, grad_z), ctx.rule), None, None, None
