"""Decode, second kernel: every routed row's hidden through w2, and the weighted sum over each token's routed rows.

Either a block folds all experts of one token into its columns (*fold*, one token), or it computes the columns of one
group (see ``warp_decode_routing``) as float32 partial sums, and the last block of a column block adds them up. A ticket
per column block tells which one is last; that one puts the ticket back to 0 for the next step. Sums run over a token's
routed rows in order, whoever is last, so equal inputs give equal bits.

Over W ranks the complete columns go to all ranks instead of the output, or where tokens differ between ranks to the
token's own, and blocks behind all others add up what the ranks sent (see ``warp_decode_words``). What bounds it:
reading F D weights of every distinct expert once.
"""

import triton
import triton.language as tl

from .warp_decode_gather import ABSENT
from .warp_decode_routing import (
    NO_ROW,
    load_columns,
    prefetch,
    row_of,
    serving,
    slot_of,
    wait_for_previous,
)
from .warp_decode_scales import lane_columns, lane_scales, load_lanes, scaled_dot, scaled_products, step_scales
from .warp_decode_words import push_words, sum_words

SUM_TOKENS = tl.constexpr(16)  # tokens the last block of a column block adds up at once


@triton.jit
def down_fold(
    hidden_ptr, ids_ptr, slots_ptr, weights_ptr, w2_ptr, scales_ptr, token, first_col, D, F, E, S,
    K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``(BLOCK_D,)`` columns of one token's output: its experts one after the other, the loads of all in flight."""
    cols = first_col + tl.arange(0, BLOCK_D)
    ks = tl.arange(0, BLOCK_K)
    hs = lane_columns(BLOCK_D, BLOCK_K, LANE, SCALES)
    offsets = cols[:, None] * F + ks[None, :]
    if DEPENDENT:
        for k in tl.static_range(K):
            slot = slot_of(tl.load(ids_ptr + token * K + k).to(tl.int32), slots_ptr, E, S)
            if slot >= 0:
                prefetch_rows(w2_ptr + slot.to(tl.int64) * D * F, cols, F, BLOCK_D)
        wait_for_previous(DEPENDENT)
    total = tl.zeros((BLOCK_D, BLOCK_K // LANE), dtype=tl.float32)
    for f in range(0, F, BLOCK_K):
        in_depth = EVEN_K | (f + ks < F)
        for k in tl.static_range(K):
            row = token * K + k
            slot = slot_of(tl.load(ids_ptr + row).to(tl.int32), slots_ptr, E, S)
            # Masked, not skipped: a branch would keep the loads of the K experts from being in flight together.
            mask = in_depth & (slot >= 0)
            legal_slot = tl.maximum(slot, 0)
            w2_ptrs = w2_ptr + legal_slot.to(tl.int64) * D * F + offsets + f
            w = tl.load(w2_ptrs, mask=mask[None, :], other=0.0, eviction_policy="evict_first")
            scales = lane_scales(scales_ptr, legal_slot, first_col, f, D, F, BLOCK_D, BLOCK_K, LANE, SCALES, EVEN_K)
            in_hidden = (EVEN_K | (f + hs < F)) & (slot >= 0)
            hidden = load_lanes(hidden_ptr + row * F + f + hs, in_hidden, LANE, SCALES, False, "")
            weight = tl.load(weights_ptr + row, mask=slot >= 0, other=0.0)
            total += weight * scaled_products(w, hidden, scales, LANE, SCALES)
    return tl.sum(total, axis=1)


@triton.jit
def down_vector(
    hidden_ptr, w2_ptr, scales_ptr, partials_ptr, slot, rows, first_col, D, F,
    T_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Partial sums of one expert for one or two tokens; one without this expert computes on row 0, stores nothing."""
    cols = first_col + tl.arange(0, BLOCK_D)
    ks = tl.arange(0, BLOCK_K)
    row, other_row = row_of(rows, 0), row_of(rows, T_BLOCK - 1)
    hs = lane_columns(BLOCK_D, BLOCK_K, LANE, SCALES)
    hidden_ptrs = hidden_ptr + tl.where(row < NO_ROW, row, other_row) * F + hs
    other_hidden_ptrs = hidden_ptr + tl.where(other_row < NO_ROW, other_row, row) * F + hs
    w2_ptrs = w2_ptr + slot.to(tl.int64) * D * F + cols[:, None] * F + ks[None, :]
    total = tl.zeros((BLOCK_D, BLOCK_K // LANE), dtype=tl.float32)
    other_total = total
    for f in range(0, F, BLOCK_K):
        w = load_columns(w2_ptrs + f, (f + ks < F)[None, :], EVEN_K, "evict_first")
        scales = lane_scales(scales_ptr, slot, first_col, f, D, F, BLOCK_D, BLOCK_K, LANE, SCALES, EVEN_K)
        hidden = load_lanes(hidden_ptrs + f, f + hs < F, LANE, SCALES, EVEN_K, "evict_last")
        total += scaled_products(w, hidden, scales, LANE, SCALES)
        if T_BLOCK == 2:
            other_hidden = load_lanes(other_hidden_ptrs + f, f + hs < F, LANE, SCALES, EVEN_K, "evict_last")
            other_total += scaled_products(w, other_hidden, scales, LANE, SCALES)
    tl.store(partials_ptr + row * D + cols, tl.sum(total, axis=1), mask=(row < NO_ROW) & (cols < D))
    if T_BLOCK == 2:
        mask = (other_row < NO_ROW) & (cols < D)
        tl.store(partials_ptr + other_row * D + cols, tl.sum(other_total, axis=1), mask=mask)


@triton.jit
def down_matrix(
    hidden_ptr, w2_desc, scales_ptr, partials_ptr, slot, rows, first_col, D, F,
    T_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of one expert for all tokens that chose it."""
    cols = first_col + tl.arange(0, BLOCK_D)
    ks = tl.arange(0, BLOCK_K)
    valid = rows < NO_ROW
    legal_rows = tl.where(valid, rows, 0)
    hidden_ptrs = hidden_ptr + legal_rows[:, None] * F + ks[None, :]
    accumulator = tl.zeros((BLOCK_D, T_BLOCK), dtype=tl.float32)
    for f in range(0, F, BLOCK_K):
        hidden = tl.load(hidden_ptrs + f, mask=valid[:, None] & (EVEN_K | (f + ks < F)[None, :]), other=0.0)
        w = w2_desc.load([slot, first_col, f]).reshape(BLOCK_D, BLOCK_K)
        scales = step_scales(scales_ptr, slot, tl.minimum(cols, D - 1), f, D, F, BLOCK_K, SCALES, EVEN_K)
        accumulator = scaled_dot(w, hidden, accumulator, scales, SCALES, PRECISION)
    targets = partials_ptr + legal_rows[None, :] * D + cols[:, None]
    tl.store(targets, accumulator, mask=valid[None, :] & (cols < D)[:, None])


@triton.jit
def prefetch_rows(w2_ptr, cols, F, BLOCK_D: tl.constexpr):
    """Bring the start of the block's rows of w2 into L2: up to 8 cache lines each."""
    lines = tl.arange(0, 8) * (128 // (w2_ptr.dtype.element_ty.primitive_bitwidth // 8))
    prefetch(w2_ptr + cols[:, None] * F + tl.minimum(lines, F - 1)[None, :])


@triton.jit
def sum_rows(
    partials_ptr, ids_ptr, slots_ptr, weights_ptr, tokens, cols, T, D, E, S, K: tl.constexpr, K_BLOCK: tl.constexpr
):
    """``(tokens, cols)`` float32: each token's weighted partial sums, in the order of its routed rows.

    An expert that a token names twice left its partial sum at the first of the two.
    """
    ks = tl.arange(0, K_BLOCK)[None, :]
    in_batch = tokens < T
    ids = tl.load(ids_ptr + tokens[:, None] * K + ks, mask=in_batch[:, None] & (ks < K), other=-1).to(tl.int32)
    total = tl.zeros((tokens.shape[0], cols.shape[0]), dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + tokens * K + k, mask=in_batch, other=-1).to(tl.int32)
        held = slot_of(expert, slots_ptr, E, S) >= 0
        first = tl.min(tl.where(ids == expert[:, None], ks, K_BLOCK), axis=1)
        weight = tl.load(weights_ptr + tokens * K + k, mask=held, other=0.0)
        # Other multiprocessors wrote them during this launch: read from L2.
        partial = tl.load(
            partials_ptr + (tokens * K + first)[:, None] * D + cols[None, :],
            mask=held[:, None] & (cols < D)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        total += weight[:, None] * partial
    return total


@triton.jit
def publish(
    values, tokens, cols, ids_ptr, out_ptr, landing_addresses, epoch_ptr, fault_ptr, rank, max_tokens, T, D,
    K: tl.constexpr, W: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Finished columns of this rank: into the output, or, over W ranks, to where they are added up."""
    mask = (tokens < T)[:, None] & (cols < D)[None, :]
    if W == 1:
        tl.store(out_ptr + tokens[:, None] * D + cols[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        if GATHERED:
            # After a missed deadline tokens may be half there: the others shall miss this rank, not trust it.
            sound = tl.load(fault_ptr) == 0
            ids = tl.load(ids_ptr + tokens * K, mask=(tokens < T) & sound, other=ABSENT)
            mask = mask & (ids != ABSENT)[:, None]
        push_words(values, tokens, cols, mask, landing_addresses, tl.load(epoch_ptr), rank, max_tokens, D, W, GATHERED)


@triton.jit(do_not_specialize=["T", "E", "S", "rank", "max_tokens", "timeout_ns"])
def down_kernel(
    hidden_ptr, ids_ptr, slots_ptr, weights_ptr, w2, scales_ptr, partials_ptr, tickets_ptr, out_ptr,
    landing_addresses, epoch_ptr, fault_ptr, rank, max_tokens, timeout_ns, T, D, F, E, S,
    K: tl.constexpr, K_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, BY_EXPERT: tl.constexpr, VECTOR: tl.constexpr,
    FOLD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr, W: tl.constexpr,
    GATHERED: tl.constexpr, WORD_COLS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; one axis of blocks: column block by column block all groups, then the items of ``sum_words``."""
    groups = T * K
    if FOLD:
        groups = T
    elif BY_EXPERT:
        groups = E
    group, block = tl.program_id(0) % groups, tl.program_id(0) // groups
    blocks = tl.cdiv(D, BLOCK_D)
    cols = block * BLOCK_D + tl.arange(0, BLOCK_D)
    if W > 1:
        if block >= blocks:
            wait_for_previous(DEPENDENT)
            sum_words(
                tl.program_id(0) - blocks * groups, out_ptr, landing_addresses, tl.load(epoch_ptr), fault_ptr,
                timeout_ns, rank, max_tokens, D, W, WORD_COLS, INTERPRET,
            )  # fmt: skip
    if block < blocks:
        if FOLD:
            total = down_fold(
                hidden_ptr, ids_ptr, slots_ptr, weights_ptr, w2, scales_ptr, group, block * BLOCK_D, D, F, E, S,
                K, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES, DEPENDENT,
            )  # fmt: skip
            token = group + tl.arange(0, 1)
            publish(
                total[None, :], token, cols, ids_ptr, out_ptr, landing_addresses, epoch_ptr, fault_ptr, rank,
                max_tokens, T, D, K, W, GATHERED,
            )  # fmt: skip
        else:
            slot, rows = serving(ids_ptr, slots_ptr, group, T, E, S, K, K_BLOCK, T_BLOCK, BY_EXPERT)
            wait_for_previous(DEPENDENT)
            if slot >= 0:
                if VECTOR:
                    down_vector(
                        hidden_ptr, w2, scales_ptr, partials_ptr, slot, rows, block * BLOCK_D, D, F,
                        T_BLOCK, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES,
                    )  # fmt: skip
                else:
                    down_matrix(
                        hidden_ptr, w2, scales_ptr, partials_ptr, slot, rows, block * BLOCK_D, D, F,
                        T_BLOCK, BLOCK_D, BLOCK_K, EVEN_K, SCALES, PRECISION,
                    )  # fmt: skip
            # ---- the last of the column block adds up
            tl.debug_barrier()
            if tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu") == groups - 1:
                tl.store(tickets_ptr + block, 0)
                for first in range(0, T, SUM_TOKENS):
                    tokens = first + tl.arange(0, SUM_TOKENS)
                    total = sum_rows(
                        partials_ptr, ids_ptr, slots_ptr, weights_ptr, tokens, cols, T, D, E, S, K, K_BLOCK
                    )
                    publish(
                        total, tokens, cols, ids_ptr, out_ptr, landing_addresses, epoch_ptr, fault_ptr, rank,
                        max_tokens, T, D, K, W, GATHERED,
                    )  # fmt: skip
