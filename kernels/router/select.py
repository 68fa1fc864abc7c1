"""Router: everything between logits and plan in one launch: scores, group limit, the K best experts, their weights.

A row of experts stays in the registers of one warp where it fits. What is compared and its column are one integer, so
that equal scores go to the lowest id, as a stable sort would have it. What bounds it: with few tokens its K rounds,
with many also reading the logits and writing the scores; its gradient reading rows and writing others, once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TAKEN = tl.constexpr(-(2**63))
LOWEST = tl.constexpr(0x7FFFFFFF)  # columns are kept with these bits turned over, so that the lowest is the largest
MINUS_INFINITY = tl.constexpr(-0x7F800001)  # where minus infinity is in the order of ``to_keys``
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: products of the first with integers below 2^14 are exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
MANY_TOKENS = 4096  # from here on, a warp gets several rows: else starting so many blocks takes longer than their work


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectRule:
    """How scores become experts and weights; the fields mean what they mean in ``comet.config.MoEConfig``."""

    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    sigmoid: bool = False  # scores are sigmoids instead of a softmax
    renormalize: bool = True
    routed_scale: float = 1.0

    def constants(self, num_experts: int) -> dict[str, Any]:
        return dict(
            E=num_experts, K=self.top_k, SIGMOID=self.sigmoid, RENORMALIZE=self.renormalize, SCALE=self.routed_scale
        )


class Selection(NamedTuple):
    """The results of the kernel."""

    ids: Tensor  # (T, K) int32, best first
    weights: Tensor  # (T, K) float32
    scores: Tensor  # (T, E) float32


@triton.jit
def exp(x):
    """The float32 exponential, as exact for large ``x`` as for small.

    ``tl.exp`` rounds ``x / ln 2``, which costs six bits at 64.
    """
    x = tl.where(x < -192.0, -192.0, tl.where(x > 192.0, 192.0, x))  # NaN stays, infinity minus infinity does not arise
    twos = tl.floor(x * LOG2_E + 0.5)
    rest = (x - twos * LN2_HIGH) - twos * LN2_LOW
    half = tl.floor(twos * 0.5)  # 2^128 is infinite, e^88.7 is not
    return tl.exp2(rest * LOG2_E) * tl.exp2(half) * tl.exp2(twos - half)


@triton.jit
def at_least_tiny(total):
    """Return the sum, at least ``TINY``, to divide by; NaN stays NaN."""
    return tl.where(total < TINY, TINY, total)


@triton.jit
def to_keys(scores, columns, known):
    """int64 in the order of float32 ``scores``, then the lowest column first; NaN is the largest, zeros are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    ordered = tl.where(scores != scores, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    keys = (ordered.to(tl.int64) << 32) | (columns ^ LOWEST)[None, :].to(tl.int64)
    return tl.where(known[None, :], keys, TAKEN)


@triton.jit
def score_of(keys):
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def close_groups(
    keys, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Keys with minus infinity for the scores of all groups but each token's best."""
    grouped = tl.reshape(keys, (BLOCK_T, BLOCK_G, BLOCK_S))
    best = tl.max(grouped, axis=2)
    group_scores = score_of(best)
    if SIZE > 1:
        group_scores += score_of(tl.max(tl.where(grouped == best[:, :, None], TAKEN, grouped), axis=2))
    groups = tl.arange(0, BLOCK_G)
    group_keys = to_keys(group_scores, groups, groups < GROUPS)
    rest = group_keys
    for _ in range(TOP_GROUPS - 1):
        rest = tl.where(rest == tl.max(rest, axis=1)[:, None], TAKEN, rest)
    is_open = group_keys >= tl.max(rest, axis=1)[:, None]
    # Padding has no column bits, so it stays below all experts, of which there are at least K.
    closed = (tl.full(grouped.shape, MINUS_INFINITY, tl.int64) << 32) | (grouped & LOWEST)
    grouped = tl.where(is_open[:, :, None], grouped, closed)
    return tl.reshape(grouped, (BLOCK_T, BLOCK_G * BLOCK_S))


@triton.jit(do_not_specialize=["T"])
def select_kernel(
    logits_ptr, bias_ptr, selection, T,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block takes BLOCK_T tokens, columns are GROUPS groups of E / GROUPS experts, both padded."""
    SIZE: tl.constexpr = E // GROUPS
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = (tokens < T)[:, None]
    columns = tl.arange(0, BLOCK_G * BLOCK_S)
    known = (columns % BLOCK_S < SIZE) & (columns // BLOCK_S < GROUPS)
    experts = columns if SIZE == BLOCK_S else columns // BLOCK_S * SIZE + columns % BLOCK_S
    there = in_batch & known[None, :]
    places = tokens[:, None] * E + experts[None, :]
    logits = tl.load(logits_ptr + places, mask=there, other=float("-inf"))
    if SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + exp(-logits))
    else:
        exps = exp(logits - tl.max(logits, axis=1)[:, None])
        scores = tl.div_rn(exps, tl.sum(exps, axis=1)[:, None])
    tl.store(selection.scores + places, scores, mask=there)
    if bias_ptr is not None:
        keys = to_keys(scores + tl.load(bias_ptr + experts, mask=known, other=0.0)[None, :], columns, known)
    else:
        keys = to_keys(scores if GROUPS > 1 else logits, columns, known)
    if GROUPS > 1:
        keys = close_groups(keys, GROUPS, TOP_GROUPS, SIZE, BLOCK_T, BLOCK_G, BLOCK_S)
    ks = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for k in range(K):
        best = tl.max(keys, axis=1)[:, None]
        chosen = tl.where(ks == k, ((best & LOWEST) ^ LOWEST).to(tl.int32), chosen)
        keys = tl.where(keys == best, TAKEN, keys)
    weights = tl.where(ks < K, tl.gather(scores, chosen, axis=1), 0.0)
    if RENORMALIZE:
        weights = tl.div_rn(weights, at_least_tiny(tl.sum(weights, axis=1))[:, None])
    targets = tokens[:, None] * K + ks
    tl.store(selection.ids + targets, chosen // BLOCK_S * SIZE + chosen % BLOCK_S, mask=in_batch & (ks < K))
    tl.store(selection.weights + targets, weights * SCALE, mask=in_batch & (ks < K))


def select(logits: Tensor, bias: Tensor | None, rule: SelectRule) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the logits, ids of each token's best experts, and their weights.

    Example: logits ``[[0.0, ln 2, 0.0]]``, K = 2, renormalised: ids ``[[1, 0]]``, weights ``[[2/3, 1/3]]``, scores
    ``[[0.25, 0.5, 0.25]]``.

    Args:
        logits: ``(T, E)`` float32, contiguous.
        bias: ``(E,)`` float32, added to the scores that are compared, or ``None``.

    Returns:
        ids ``(T, K)`` int32, best first; weights ``(T, K)`` float32; scores ``(T, E)`` float32.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.is_contiguous(), logits.stride()
    (num_tokens, num_experts), top_k = logits.shape, rule.top_k
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights, scores = logits.new_empty(num_tokens, top_k), torch.empty_like(logits)
    if num_tokens == 0:
        return ids, weights, scores
    groups = rule.num_groups if rule.top_groups < rule.num_groups else 1
    block_g, block_s = triton.next_power_of_2(groups), triton.next_power_of_2(num_experts // groups)
    block_t, num_warps = rows_per_block(num_tokens, block_g * block_s)
    select_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits, bias, Selection(ids, weights, scores), num_tokens, num_warps=num_warps, GROUPS=groups,
        TOP_GROUPS=min(rule.top_groups, groups), BLOCK_T=block_t, BLOCK_G=block_g, BLOCK_S=block_s,
        BLOCK_K=triton.next_power_of_2(top_k), **rule.constants(num_experts),
    )  # fmt: skip
    return ids, weights, scores


@triton.jit(do_not_specialize=["T"])
def select_gradient_kernel(
    scores_ptr, ids_ptr, grad_weights_ptr, grad_scores_ptr, grad_logits_ptr, T,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    OF_WEIGHTS: tl.constexpr, OF_SCORES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A block takes BLOCK_T tokens; K experts are marked in a row, so that all sums are over rows, each in one warp."""
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
    block_e = triton.next_power_of_2(num_experts)
    block_t, num_warps = rows_per_block(num_tokens, block_e)
    select_gradient_kernel[(triton.cdiv(num_tokens, block_t),)](
        scores, ids, grad_weights, grad_scores, grad_logits, num_tokens, OF_WEIGHTS=grad_weights is not None,
        OF_SCORES=grad_scores is not None, BLOCK_T=block_t, BLOCK_E=block_e, num_warps=num_warps,
        **rule.constants(num_experts),
    )  # fmt: skip
    return grad_logits


def rows_per_block(num_tokens: int, width: int) -> tuple[int, int]:
    """Rows of a block and its warps; no row is on two warps up to 512 columns: reductions over it need no barrier."""
    if width > 512:
        return 1, width // 512
    if width > 128:  # more warps would share rows
        return (1 if num_tokens <= MANY_TOKENS else 2), 1
    return 4 * (128 // width) * (1 if num_tokens <= MANY_TOKENS else 4), 4
