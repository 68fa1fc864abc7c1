"""Router: gradients of ``select`` and of ``measure``, one launch each.

``select_gradient_kernel`` marks a token's K experts in its row, so that all sums are over rows, which stay in one warp.
What bounds both: reading rows of scores, logits and gradients and writing others, once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.case import KernelCase
from .measure import LossRule, log_sum_exp
from .select import MANY_TOKENS, TINY, SelectRule, aot_case, aot_rules, at_least_tiny, exp, rows_per_block


@triton.jit(do_not_specialize=["T"])
def select_gradient_kernel(
    scores_ptr, ids_ptr, grad_weights_ptr, grad_scores_ptr, grad_logits_ptr, T,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    OF_WEIGHTS: tl.constexpr, OF_SCORES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A block takes BLOCK_T tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = tokens < T
    experts = tl.arange(0, BLOCK_E)[None, :]
    there = in_batch[:, None] & (experts < E)
    places = tokens[:, None] * E + experts
    scores = tl.load(scores_ptr + places, mask=there, other=0.0)
    grad = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    if OF_WEIGHTS:
        is_chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
        for k in tl.range(0, K, loop_unroll_factor=min(K, 8)):
            is_kth = experts == tl.load(ids_ptr + tokens * K + k, mask=in_batch, other=-1)[:, None]
            grad_weight = tl.load(grad_weights_ptr + tokens * K + k, mask=in_batch, other=0.0)[:, None]
            grad = tl.where(is_kth, grad_weight * SCALE, grad)
            is_chosen |= is_kth
        if RENORMALIZE:
            total = tl.sum(tl.where(is_chosen, scores, 0.0), axis=1)[:, None]
            divisor = at_least_tiny(total)
            of_total = tl.where(total < TINY, 0.0, tl.sum(grad * tl.div_rn(scores, divisor), axis=1)[:, None])
            grad = tl.where(is_chosen, tl.div_rn(grad - of_total, divisor), 0.0)
    if OF_SCORES:
        grad += tl.load(grad_scores_ptr + places, mask=there, other=0.0)
    if SIGMOID:
        grad *= scores * (1.0 - scores)
    else:
        grad = scores * (grad - tl.sum(grad * scores, axis=1)[:, None])
    tl.store(grad_logits_ptr + places, grad, mask=there)


@triton.jit(do_not_specialize=["T", "aux", "z"])
def measure_gradient_kernel(
    logits_ptr, scores_ptr, load_ptr, grad_aux_ptr, grad_z_ptr, grad_logits_ptr, grad_scores_ptr, T, aux, z,
    E: tl.constexpr, OF_AUX: tl.constexpr, OF_Z: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A block takes BLOCK_T tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    known = (experts < E)[None, :]
    there = (tokens < T)[:, None] & known
    places = tokens[:, None] * E + experts[None, :]
    if OF_AUX:
        load = tl.load(load_ptr + experts, mask=experts < E, other=0.0)
        share = tl.div_rn(load, tl.maximum(tl.sum(load, axis=0), 1.0))[None, :]
        scores = tl.load(scores_ptr + places, mask=there, other=0.0)
        total = tl.sum(scores, axis=1)[:, None]
        divisor = at_least_tiny(total)
        of_total = tl.where(total < TINY, 0.0, tl.sum(share * tl.div_rn(scores, divisor), axis=1)[:, None])
        factor = tl.load(grad_aux_ptr) * aux * E / T
        tl.store(grad_scores_ptr + places, factor * tl.div_rn(share - of_total, divisor), mask=there)
    if OF_Z:
        logits = tl.where(known, tl.load(logits_ptr + places, mask=there, other=0.0), float("-inf"))
        lse = log_sum_exp(logits)[:, None]
        tl.store(grad_logits_ptr + places, tl.load(grad_z_ptr) * z * 2.0 / T * lse * exp(logits - lse), mask=there)


def select_gradient(
    scores: Tensor, ids: Tensor, grad_weights: Tensor | None, grad_scores: Tensor | None, rule: SelectRule
) -> Tensor:
    """Gradient ``(T, E)`` float32 of the logits of ``select``.

    Args:
        scores: ``(T, E)`` float32 that ``select`` returned, as ids.
        grad_weights: ``(T, K)`` float32, contiguous, or ``None`` for zeros.
        grad_scores: ``(T, E)`` float32, contiguous, or ``None`` for zeros.
    """
    num_tokens, num_experts = scores.shape
    grad_logits = torch.empty_like(scores)
    if num_tokens == 0:
        return grad_logits
    constants, num_warps = _select_constants(num_tokens, num_experts, rule)
    select_gradient_kernel[(triton.cdiv(num_tokens, constants["BLOCK_T"]),)](
        scores, ids, grad_weights, grad_scores, grad_logits, num_tokens, OF_WEIGHTS=grad_weights is not None,
        OF_SCORES=grad_scores is not None, num_warps=num_warps, **constants,
    )  # fmt: skip
    return grad_logits


def measure_gradient(
    logits: Tensor, scores: Tensor, load: Tensor, grad_losses: tuple[Tensor | None, Tensor | None], rule: LossRule
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients ``(T, E)`` float32 of the logits and of the scores of ``measure``; ``None`` instead of zeros.

    Args:
        logits: ``(T, E)`` float32 that ``measure`` was given, as scores.
        load: ``(E,)`` float32 that it returned.
        grad_losses: ``()`` float32 of the load-balancing loss and of the z-loss, or ``None`` for zero.
    """
    (num_tokens, num_experts), (grad_aux, grad_z) = logits.shape, grad_losses
    of_aux, of_z = grad_aux is not None and rule.aux != 0, grad_z is not None and rule.z != 0
    grad_logits = torch.empty_like(logits) if of_z else None
    grad_scores = torch.empty_like(scores) if of_aux else None
    if num_tokens and (of_aux or of_z):
        block_e = triton.next_power_of_2(num_experts)
        block_t, num_warps = rows_per_block(num_tokens, block_e)
        measure_gradient_kernel[(triton.cdiv(num_tokens, block_t),)](
            logits, scores, load, grad_aux, grad_z, grad_logits, grad_scores, num_tokens, rule.aux, rule.z,
            E=num_experts, OF_AUX=of_aux, OF_Z=of_z, BLOCK_T=block_t, BLOCK_E=block_e, num_warps=num_warps,
        )  # fmt: skip
    return grad_logits, grad_scores


def _select_constants(num_tokens: int, num_experts: int, rule: SelectRule) -> tuple[dict[str, Any], int]:
    block_e = triton.next_power_of_2(num_experts)
    block_t, num_warps = rows_per_block(num_tokens, block_e)
    return rule.constants(num_experts) | dict(BLOCK_T=block_t, BLOCK_E=block_e), num_warps


def aot_cases() -> list[KernelCase]:
    """The rules of ``select`` at few and at many tokens, and both losses for as many experts."""
    cases = []
    for name, (num_experts, rule) in aot_rules().items():
        for num_tokens in (1, 2 * MANY_TOKENS):
            constants, num_warps = _select_constants(num_tokens, num_experts, rule)
            of_losses = {each: constants[each] for each in ("E", "BLOCK_T", "BLOCK_E")} | dict(OF_AUX=True, OF_Z=True)
            of_select, words = constants | dict(OF_WEIGHTS=True, OF_SCORES=True), f"{name}, {num_tokens} tokens"
            cases.append(aot_case(words, select_gradient_kernel, of_select, num_warps))
            cases.append(aot_case(words, measure_gradient_kernel, of_losses, num_warps))
    return cases
