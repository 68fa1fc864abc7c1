"""Decode, second kernel: every routed row's hidden through w2, and the weighted sum over each token's routed rows.

Either a block folds all experts of one token into its columns (*fold*, one token), or it computes the columns of one
group (see ``decode.routing``) as float32 partial sums, and the last block of a column block adds them up. A ticket
per column block tells which one is last; that one puts the ticket back to 0 for the next step. Sums run over a token's
routed rows in one order, whoever is last, so equal inputs give equal bits.

Over W ranks the complete columns go to all ranks instead of the output, or where tokens differ between ranks to the
token's own, and blocks behind all others add up what the ranks sent (see ``decode.words``). What bounds it:
reading F D weights of every distinct expert once.
"""

import triton
import triton.language as tl

from ..experts.cache import count_missing, wait_for_missing
from ..experts.host import add_hosted, forget_hosted
from ..experts.waves import is_served
from ..runtime.dependent import wait_for_previous
from .gather import ABSENT
from .routing import NO_ROW, pass_of, row_of, rows_in_passes, serves, slot_of
from .scales import (
    in_number,
    lane_columns,
    lane_scales,
    load_lanes,
    part_of,
    scaled_dot,
    scaled_products,
    step_and_next_scales,
    step_scales,
    stored_length,
)
from .words import push_words, sum_words

SUM_TOKENS = tl.constexpr(16)  # tokens the last block of a column block adds up at once


@triton.jit
def weight_tile(
    w2_ptr, scales_ptr, slot, first_col, f, D, F,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """``(weights (BLOCK_D, BLOCK_K), their scales)`` of a slot, from column ``f`` of w2 on; zeros for slot -1."""
    NUMBER: tl.constexpr = in_number(LANE)
    legal_slot, length = tl.maximum(slot, 0), stored_length(F, LANE)
    cols, ks = first_col + tl.arange(0, BLOCK_D), f // NUMBER + tl.arange(0, BLOCK_K // NUMBER)
    ptrs = w2_ptr + legal_slot.to(tl.int64) * D * length + cols[:, None] * length + ks[None, :]
    # Masked, not skipped: a branch would keep the loads of several experts from being in flight together.
    mask = (slot >= 0) & (EVEN_K | (ks < length)[None, :])
    weights = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    return weights, lane_scales(scales_ptr, legal_slot, first_col, f, D, F, BLOCK_D, BLOCK_K, LANE, SCALES, EVEN_K)


@triton.jit
def bias_of(b2_ptr, slot, cols, D):
    """``b2[slot]`` in the columns ``cols``, in float32; 0 without biases, for slot -1 and from D on."""
    bias = tl.zeros(cols.shape, dtype=tl.float32)
    if b2_ptr is not None:
        mask = (slot >= 0) & (cols < D)
        bias = tl.load(b2_ptr + tl.maximum(slot, 0).to(tl.int64) * D + cols, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def times_hidden(
    tile, hidden_ptr, row, f, F,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """``(BLOCK_D, BLOCK_K / LANE)`` float32: a ``weight_tile`` times one routed row's hidden."""
    hs = f + lane_columns(BLOCK_D, BLOCK_K, LANE, SCALES)
    hidden = load_lanes(hidden_ptr + row * F + hs, hs < F, LANE, SCALES, EVEN_K, "evict_last")
    return scaled_products(tile[0], hidden, tile[1], LANE, SCALES)


@triton.jit
def down_fold(
    hidden_ptr, ids_ptr, slots_ptr, weights_ptr, w2_ptr, scales_ptr, b2_ptr, token, first_col, D, F, E, S,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    LANE: tl.constexpr, SCALES: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """``(BLOCK_D,)`` columns of one token's output; the first AHEAD steps of all its experts are loaded early."""
    places = tl.arange(0, K_BLOCK)
    ids = tl.load(ids_ptr + token * K + places, mask=places < K, other=-1).to(tl.int32)
    slots = slot_of(ids, slots_ptr, E, S, CACHE)
    tiles = ()
    for index in tl.static_range(K * AHEAD):
        slot = tl.sum(tl.where(places == index // AHEAD, slots, 0))
        f = index % AHEAD * BLOCK_K
        tile = weight_tile(w2_ptr, scales_ptr, slot, first_col, f, D, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES)
        tiles = tiles + (tile,)  # noqa: RUF005 - the compiler knows no other way
    wait_for_previous(DEPENDENT)
    weights = tl.load(weights_ptr + token * K + places, mask=slots >= 0, other=0.0)
    total = tl.zeros((BLOCK_D, BLOCK_K // LANE), dtype=tl.float32)
    biases = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in tl.static_range(K):
        here = places == k
        slot, weight = tl.sum(tl.where(here, slots, 0)), tl.sum(tl.where(here, weights, 0.0))
        # An expert named twice may have left its hidden at the first of the two alone.
        row = token * K + tl.min(tl.where(ids == tl.sum(tl.where(here, ids, 0)), places, K_BLOCK))
        sums = tl.zeros((BLOCK_D, BLOCK_K // LANE), dtype=tl.float32)
        for index in tl.static_range(AHEAD):
            sums += times_hidden(
                tiles[k * AHEAD + index], hidden_ptr, row, index * BLOCK_K, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES
            )
        for f in range(AHEAD * BLOCK_K, F, BLOCK_K):
            tile = weight_tile(w2_ptr, scales_ptr, slot, first_col, f, D, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES)
            sums += times_hidden(tile, hidden_ptr, row, f, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES)
        # Hidden of an expert that is not held was never stored.
        total += tl.where(slot >= 0, weight * sums, 0.0)
        if b2_ptr is not None:
            biases += weight * bias_of(b2_ptr, slot, first_col + tl.arange(0, BLOCK_D), D)
    outputs = tl.sum(total, axis=1)
    if b2_ptr is not None:
        outputs += biases
    return outputs


@triton.jit
def down_vector(
    hidden_ptr, w2_ptr, scales_ptr, b2_ptr, partials_ptr, slot, rows, first_col, D, F,
    T_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Partial sums of one expert for one or two tokens; one without this expert computes on row 0, stores nothing.

    The first AHEAD steps of the weights are loaded before hidden is there.
    """
    cols = first_col + tl.arange(0, BLOCK_D)
    row, other_row = row_of(rows, 0), row_of(rows, T_BLOCK - 1)
    legal_row = tl.where(row < NO_ROW, row, other_row)
    legal_other_row = tl.where(other_row < NO_ROW, other_row, row)
    tiles = ()
    for index in tl.static_range(AHEAD):
        tile = weight_tile(
            w2_ptr, scales_ptr, slot, first_col, index * BLOCK_K, D, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES
        )
        tiles = tiles + (tile,)  # noqa: RUF005 - the compiler knows no other way
    wait_for_previous(DEPENDENT)
    total = tl.zeros((BLOCK_D, BLOCK_K // LANE), dtype=tl.float32)
    other_total = total
    for index in tl.static_range(AHEAD):
        total += times_hidden(
            tiles[index], hidden_ptr, legal_row, index * BLOCK_K, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES
        )
        if T_BLOCK == 2:
            other_total += times_hidden(
                tiles[index], hidden_ptr, legal_other_row, index * BLOCK_K, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES
            )
    for f in range(AHEAD * BLOCK_K, F, BLOCK_K):
        tile = weight_tile(w2_ptr, scales_ptr, slot, first_col, f, D, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES)
        total += times_hidden(tile, hidden_ptr, legal_row, f, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES)
        if T_BLOCK == 2:
            other_total += times_hidden(tile, hidden_ptr, legal_other_row, f, F, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES)
    outputs = tl.sum(total, axis=1)
    if b2_ptr is not None:
        outputs += bias_of(b2_ptr, slot, cols, D)
    tl.store(partials_ptr + row * D + cols, outputs, mask=(row < NO_ROW) & (cols < D))
    if T_BLOCK == 2:
        outputs = tl.sum(other_total, axis=1)
        if b2_ptr is not None:
            outputs += bias_of(b2_ptr, slot, cols, D)
        mask = (other_row < NO_ROW) & (cols < D)
        tl.store(partials_ptr + other_row * D + cols, outputs, mask=mask)


@triton.jit
def down_matrix(
    hidden_ptr, w2_desc, scales_ptr, b2_ptr, partials_ptr, slot, rows, first_col, D, F,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of one expert for the TILE tokens of one pass."""
    PART: tl.constexpr = part_of(BLOCK_K, SCALES)
    NUMBER: tl.constexpr = in_number(LANE)
    cols = first_col + tl.arange(0, BLOCK_D)
    ks = tl.arange(0, PART)
    valid = rows < NO_ROW
    legal_rows = tl.where(valid, rows, 0)
    hidden_ptrs = hidden_ptr + legal_rows[:, None] * F + ks[None, :]
    accumulator = tl.zeros((BLOCK_D, TILE), dtype=tl.float32)
    weight_rows = tl.minimum(cols, D - 1)
    ahead = step_scales(scales_ptr, slot, weight_rows, 0, D, F, BLOCK_K, SCALES, EVEN_K)
    for f in range(0, F, BLOCK_K):
        hs, ws = (), ()
        for part in tl.static_range(BLOCK_K // PART):
            at = f + part * PART
            hs += (tl.load(hidden_ptrs + at, mask=valid[:, None] & (EVEN_K | (at + ks < F)[None, :]), other=0.0),)
            ws += (w2_desc.load([slot, first_col, at // NUMBER]).reshape(BLOCK_D, PART // NUMBER),)
        scales, ahead = step_and_next_scales(ahead, scales_ptr, slot, weight_rows, f, D, F, BLOCK_K, SCALES, EVEN_K)
        for part in tl.static_range(BLOCK_K // PART):
            accumulator = scaled_dot(ws[part], hs[part], accumulator, scales[part], SCALES, PRECISION)
    if b2_ptr is not None:
        accumulator += bias_of(b2_ptr, slot, cols, D)[:, None]
    targets = partials_ptr + legal_rows[None, :] * D + cols[:, None]
    tl.store(targets, accumulator, mask=valid[None, :] & (cols < D)[:, None])


@triton.jit
def sum_rows(
    partials_ptr, ids_ptr, slots_ptr, weights_ptr, cache, tokens, cols, T, D, E, S,
    K: tl.constexpr, K_BLOCK: tl.constexpr, IN_WAVES: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """``(tokens, cols)`` float32: each token's weighted partial sums, in the order of its routed rows.

    An expert that a token names twice left its partial sum at the first of the two. One of an earlier wave may have
    lost its slot since.
    """
    ks = tl.arange(0, K_BLOCK)[None, :]
    in_batch = tokens < T
    ids = tl.load(ids_ptr + tokens[:, None] * K + ks, mask=in_batch[:, None] & (ks < K), other=-1).to(tl.int32)
    total = tl.zeros((tokens.shape[0], cols.shape[0]), dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + tokens * K + k, mask=in_batch, other=-1).to(tl.int32)
        if IN_WAVES:
            held = is_served(expert, cache[0], E, S)
        else:
            held = slot_of(expert, slots_ptr, E, S, CACHE) >= 0
        first = tl.min(tl.where(ids == expert[:, None], ks, K_BLOCK), axis=1)
        weight = tl.load(weights_ptr + tokens * K + k, mask=held, other=0.0)
        # Other SMs wrote them during this launch: read from L2.
        partial = tl.load(
            partials_ptr + (tokens * K + first)[:, None] * D + cols[None, :],
            mask=held[:, None] & (cols < D)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        total += weight[:, None] * partial
    return total


@triton.jit
def load_routing(ids_ptr, slots_ptr, weights_ptr, E, S, K: tl.constexpr, K_BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """``(K_BLOCK,)`` of the only token: whether each of its experts is held here, and its routing weight."""
    ks = tl.arange(0, K_BLOCK)
    held = slot_of(tl.load(ids_ptr + ks, mask=ks < K, other=-1).to(tl.int32), slots_ptr, E, S, CACHE) >= 0
    return held, tl.load(weights_ptr + ks, mask=held, other=0.0)


@triton.jit
def sum_only_token(partials_ptr, held, weights, cols, D, K_BLOCK: tl.constexpr):
    """``(1, cols)`` float32: the only token's weighted partial sums, one of each routed row."""
    ptrs = partials_ptr + tl.arange(0, K_BLOCK)[:, None] * D + cols[None, :]
    # As in sum_rows, from L2.
    partial = tl.load(ptrs, mask=held[:, None] & (cols < D)[None, :], other=0.0, cache_modifier=".cg")
    return tl.sum(weights[:, None] * partial, axis=0)[None, :]


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
        # After a missed deadline the order that keeps words unread from being overwritten is lost, and gathered tokens
        # may be half there: the others shall miss this rank, not trust it.
        mask = mask & (tl.load(fault_ptr) == 0)
        if GATHERED:
            ids = tl.load(ids_ptr + tokens * K, mask=tokens < T, other=ABSENT)
            mask = mask & (ids != ABSENT)[:, None]
        push_words(values, tokens, cols, mask, landing_addresses, tl.load(epoch_ptr), rank, max_tokens, D, W, GATHERED)


@triton.jit(do_not_specialize=["T", "E", "S", "rank", "max_tokens", "timeout_ns"])
def down_kernel(
    hidden_ptr, ids_ptr, slots_ptr, weights_ptr, w2, scales_ptr, b2_ptr, partials_ptr, tickets_ptr, out_ptr,
    landing_addresses, epoch_ptr, fault_ptr, rank, max_tokens, timeout_ns, cache, all_ids_ptr, T, D, F, E, S,
    K: tl.constexpr, K_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, BY_EXPERT: tl.constexpr, VECTOR: tl.constexpr,
    FOLD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr, W: tl.constexpr,
    GATHERED: tl.constexpr, WORD_COLS: tl.constexpr, AHEAD: tl.constexpr, INTERPRET: tl.constexpr,
    CACHE: tl.constexpr, ADDS_UP: tl.constexpr,
):  # fmt: skip
    """See the module; one axis of blocks: column block by column block all groups, then the items of ``sum_words``.

    ``b2_ptr``: ``(S, D)`` biases, ``None`` without. Slots of experts that the kernel before this one still brings are
    not there to be read early. Of a step in waves (``experts.waves``) ``ids_ptr`` are those of one wave, and the last
    one alone ADDS_UP, by ``all_ids_ptr``; ``None`` where a step is one wave.
    """
    num_missing = count_missing(cache, E, S, CACHE)
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
            wait_for_missing(num_missing, DEPENDENT, CACHE)
            total = down_fold(
                hidden_ptr, ids_ptr, slots_ptr, weights_ptr, w2, scales_ptr, b2_ptr, group, block * BLOCK_D, D, F, E, S,
                K, K_BLOCK, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES, AHEAD, DEPENDENT, CACHE,
            )  # fmt: skip
            token = group + tl.arange(0, 1)
            total = add_hosted(total[None, :], token, cols, T, D, cache, E, S, CACHE)
            publish(
                total, token, cols, ids_ptr, out_ptr, landing_addresses, epoch_ptr, fault_ptr, rank,
                max_tokens, T, D, K, W, GATHERED,
            )  # fmt: skip
        else:
            expert, rows = serves(ids_ptr, group, T, K, K_BLOCK, T_BLOCK, BY_EXPERT)
            wait_for_missing(num_missing, DEPENDENT, CACHE)
            slot = slot_of(expert, slots_ptr, E, S, CACHE)
            IS_ALONE: tl.constexpr = T_BLOCK == 1 and not BY_EXPERT
            if IS_ALONE:
                # Loaded here they are there when the last block adds up, which everything else waits for.
                held, weights = load_routing(ids_ptr, slots_ptr, weights_ptr, E, S, K, K_BLOCK, CACHE)
            if slot < 0:
                wait_for_previous(DEPENDENT)
            elif VECTOR:
                down_vector(
                    hidden_ptr, w2, scales_ptr, b2_ptr, partials_ptr, slot, rows, block * BLOCK_D, D, F,
                    T_BLOCK, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES, AHEAD, DEPENDENT,
                )  # fmt: skip
            else:
                wait_for_previous(DEPENDENT)
                for first in range(0, rows_in_passes(rows, TILE), TILE):
                    down_matrix(
                        hidden_ptr, w2, scales_ptr, b2_ptr, partials_ptr, slot, pass_of(rows, first, TILE),
                        block * BLOCK_D, D, F, TILE, BLOCK_D, BLOCK_K, EVEN_K, LANE, SCALES, PRECISION,
                    )  # fmt: skip
            # ---- the last of the column block adds up
            if ADDS_UP:
                IN_WAVES: tl.constexpr = all_ids_ptr is not None
                tl.debug_barrier()
                if tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu") == groups - 1:
                    tl.store(tickets_ptr + block, 0)
                    BATCH: tl.constexpr = 1 if IS_ALONE else SUM_TOKENS
                    for first in range(0, 1 if IS_ALONE else T, BATCH):
                        tokens = first + tl.arange(0, BATCH)
                        if IS_ALONE:
                            total = sum_only_token(partials_ptr, held, weights, cols, D, K_BLOCK)
                        else:
                            total = sum_rows(
                                partials_ptr, all_ids_ptr if IN_WAVES else ids_ptr, slots_ptr, weights_ptr, cache,
                                tokens, cols, T, D, E, S, K, K_BLOCK, IN_WAVES, CACHE,
                            )  # fmt: skip
                        total = add_hosted(total, tokens, cols, T, D, cache, E, S, CACHE)
                        publish(
                            total, tokens, cols, ids_ptr, out_ptr, landing_addresses, epoch_ptr, fault_ptr, rank,
                            max_tokens, T, D, K, W, GATHERED,
                        )  # fmt: skip
        forget_hosted(cache, E, S, CACHE)
