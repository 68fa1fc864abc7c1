"""Router: loads, losses and the largest logit, in one launch for few tokens and two for many; their gradients in one.

``measure_kernel``: each block adds up its own rows, ``finish_kernel`` the blocks in their order: no float atomics,
equal inputs give equal bits. Few tokens take one block, which also finishes. What bounds it: reading logits and scores.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .select import TINY, at_least_tiny, exp, rows_per_block

MAX_BLOCKS = 64
ROWS = 64  # up to so many, another block takes longer to start and to add than it saves
BLOCK_ELEMENTS = 4096
NUM_WARPS = 8
WITHOUT_SIGN = tl.constexpr(0x7FFFFFFF)  # bits of a magnitude; as integers they are in its order, NaN above infinity


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRule:
    """Factors of the losses; 0 leaves a loss out."""

    aux: float  # coefficient of the load-balancing loss
    z: float  # coefficient of the router z-loss


class Statistics(NamedTuple):
    """The results of the kernels, float32."""

    load: Tensor  # (E,) routed rows of each expert
    aux_loss: Tensor  # ()
    z_loss: Tensor  # ()
    largest: Tensor  # () grows


class BlockSums(NamedTuple):
    """The sums of each block, float32."""

    experts: Tensor  # (blocks, 2, BLOCK_E) normalised scores, routed rows
    scalars: Tensor  # (blocks, 2) squares of the logarithms, largest magnitude


@triton.jit
def log_sum_exp(logits):
    largest = tl.max(logits, axis=1)
    return largest + tl.log(tl.sum(exp(logits - largest[:, None]), axis=1))


@triton.jit
def write_statistics(
    sums, counts, squares, largest, statistics, T, aux, z,
    E: tl.constexpr, USE_AUX: tl.constexpr, USE_Z: tl.constexpr,
):  # fmt: skip
    """Losses from totals over all tokens: normalised scores and routed rows per expert, and two scalars."""
    experts = tl.arange(0, sums.shape[0])
    num_tokens = tl.maximum(T, 1).to(tl.float32)
    tl.store(statistics.load + experts, counts, mask=experts < E)
    aux_loss, z_loss = 0.0, 0.0
    if USE_AUX:
        share = tl.div_rn(counts, tl.maximum(tl.sum(counts, axis=0), 1.0))
        aux_loss = aux * (E * tl.sum(share * tl.div_rn(sums, num_tokens), axis=0))
    if USE_Z:
        z_loss = z * tl.div_rn(squares, num_tokens)
    tl.store(statistics.aux_loss, aux_loss)
    tl.store(statistics.z_loss, z_loss)
    seen = tl.load(statistics.largest).to(tl.int32, bitcast=True) & WITHOUT_SIGN
    tl.store(statistics.largest, tl.maximum(seen, largest).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["T", "rows", "aux", "z"])
def measure_kernel(
    logits_ptr, scores_ptr, ids_ptr, of_blocks, statistics, T, rows, aux, z,
    E: tl.constexpr, K: tl.constexpr, USE_AUX: tl.constexpr, USE_Z: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Block b adds up rows b * ``rows`` to (b + 1) * ``rows``; ``of_blocks`` is ``None`` for the only one, which writes
    the statistics, too.
    """
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    known = (experts < E)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    counts = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    largest = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    squares = tl.zeros((BLOCK_T,), dtype=tl.float32)
    end = tl.minimum((block + 1) * rows, T)
    for first in tl.range(block * rows, end, BLOCK_T):
        tokens = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
        in_batch = tokens < end
        there = in_batch[:, None] & known
        places = tokens[:, None] * E + experts[None, :]
        logits = tl.load(logits_ptr + places, mask=there, other=0.0)
        largest = tl.maximum(largest, logits.to(tl.int32, bitcast=True) & WITHOUT_SIGN)
        if USE_Z:
            lse = log_sum_exp(tl.where(known, logits, float("-inf")))
            squares += tl.where(in_batch, lse * lse, 0.0)
        if USE_AUX:
            scores = tl.load(scores_ptr + places, mask=there, other=0.0)
            sums += tl.div_rn(scores, at_least_tiny(tl.sum(scores, axis=1))[:, None])
        for k in range(K):
            ids = tl.load(ids_ptr + tokens * K + k, mask=in_batch, other=-1)
            counts += (ids[:, None] == experts[None, :]).to(tl.int32)
    total_sums, total_squares = tl.sum(sums, axis=0), tl.sum(squares, axis=0)
    total_counts, most = tl.sum(counts, axis=0).to(tl.float32), tl.max(tl.max(largest, axis=1), axis=0)
    if of_blocks is None:
        write_statistics(
            total_sums, total_counts, total_squares, most, statistics, T, aux, z, E, USE_AUX, USE_Z
        )  # fmt: skip
    else:
        tl.store(of_blocks.experts + block * 2 * BLOCK_E + experts, total_sums)
        tl.store(of_blocks.experts + (block * 2 + 1) * BLOCK_E + experts, total_counts)
        tl.store(of_blocks.scalars + block * 2, total_squares)
        tl.store(of_blocks.scalars + block * 2 + 1, most.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["T", "blocks", "aux", "z"])
def finish_kernel(
    of_blocks, statistics, T, blocks, aux, z,
    E: tl.constexpr, USE_AUX: tl.constexpr, USE_Z: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One block: the statistics of what the blocks of ``measure_kernel`` added up, ``(blocks, 2, BLOCK_E)``."""
    experts = tl.arange(0, BLOCK_E)[None, :]
    sums = tl.zeros((BLOCK_B, BLOCK_E), dtype=tl.float32)
    counts = tl.zeros((BLOCK_B, BLOCK_E), dtype=tl.float32)
    for first in range(0, blocks, BLOCK_B):
        of = (first + tl.arange(0, BLOCK_B))[:, None]
        counts += tl.load(of_blocks.experts + (of * 2 + 1) * BLOCK_E + experts, mask=of < blocks, other=0.0)
        if USE_AUX:
            sums += tl.load(of_blocks.experts + of * 2 * BLOCK_E + experts, mask=of < blocks, other=0.0)
    of = tl.arange(0, MAX_BLOCKS)
    squares = tl.load(of_blocks.scalars + of * 2, mask=of < blocks, other=0.0)
    largest = tl.load(of_blocks.scalars + of * 2 + 1, mask=of < blocks, other=0.0).to(tl.int32, bitcast=True)
    write_statistics(
        tl.sum(sums, axis=0), tl.sum(counts, axis=0), tl.sum(squares, axis=0), tl.max(largest, axis=0),
        statistics, T, aux, z, E, USE_AUX, USE_Z,
    )  # fmt: skip


def measure(
    logits: Tensor, scores: Tensor, ids: Tensor, largest: Tensor, rule: LossRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and loads of routed tokens.

    Example: logits ``[[0.0, 0.0]]``, scores ``[[0.75, 0.25]]``, ids ``[[0]]``, factors 1: losses 1.5 and
    ``ln(2) ** 2``, loads ``[1.0, 0.0]``.

    Args:
        logits: ``(T, E)`` float32, contiguous.
        scores: ``(T, E)`` float32, contiguous; not read without an aux loss.
        ids: ``(T, K)`` int32, contiguous; -1 is a masked slot.
        largest: ``()`` float32, grows to the largest magnitude of the logits; stays infinite or NaN.

    Returns:
        Load-balancing loss ``()``, z-loss ``()`` and routed rows per expert ``(E,)``, all float32.
    """
    assert logits.dtype == scores.dtype == largest.dtype == torch.float32, (logits.dtype, scores.dtype, largest.dtype)
    assert logits.is_contiguous(), logits.stride()
    assert scores.is_contiguous(), scores.stride()
    assert ids.dtype == torch.int32, ids.dtype
    (num_tokens, num_experts), top_k = logits.shape, ids.shape[1]
    aux_loss, z_loss, load = logits.new_empty(()), logits.new_empty(()), logits.new_empty(num_experts)
    rows = max(ROWS, triton.cdiv(num_tokens, MAX_BLOCKS))
    blocks = max(1, triton.cdiv(num_tokens, rows))
    width = triton.next_power_of_2(num_experts)
    constants = dict(E=num_experts, USE_AUX=rule.aux != 0, USE_Z=rule.z != 0, BLOCK_E=width)
    block = min(ROWS, max(1, BLOCK_ELEMENTS // width))
    of_blocks, statistics = None, Statistics(load, aux_loss, z_loss, largest)
    if blocks > 1:
        of_blocks = BlockSums(logits.new_empty(blocks, 2, width), logits.new_empty(blocks, 2))
    measure_kernel[(blocks,)](
        logits, scores, ids, of_blocks, statistics, num_tokens, rows, rule.aux, rule.z, K=top_k, BLOCK_T=block,
        num_warps=NUM_WARPS, **constants,
    )  # fmt: skip
    if blocks > 1:
        finish_kernel[(1,)](
            of_blocks, statistics, num_tokens, blocks, rule.aux, rule.z, BLOCK_B=block, MAX_BLOCKS=MAX_BLOCKS,
            num_warps=NUM_WARPS, **constants,
        )  # fmt: skip
    return aux_loss, z_loss, load


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
