"""Decode, second kernel: every routed row's hidden through w2, and the weighted sum over each token's routed rows.

Either a block folds all experts of one token into its columns (*fold*, one token), or it computes the columns of one
group (see ``decode.routing``) as float32 partial sums, and the last block of a column block adds them up. A ticket
per column block shows which one is last; that one puts the ticket back to 0 for the next step. Sums run over a token's
routed rows in one order, whichever block is last, so equal inputs give equal bits.

Over W ranks the complete columns go to all ranks instead of the output, or where tokens differ between ranks to the
token's own, and blocks behind all others add up what the ranks sent (see ``decode.words``). What bounds it:
reading F D weights of every distinct expert once.
"""

import triton
import triton.language as tl

from ..experts.cache import bias_row, count_missing, wait_for_missing
from ..experts.host import add_hosted, forget_hosted
from ..experts.waves import is_served
from ..runtime.primitives import wait_for_previous
from .gather import ABSENT
from .routing import NO_ROW, pass_of, row_of, rows_in_passes, serves, slot_of
from .scales import (
    in_number,
    lane_columns,
    lane_scales,
    load_lanes,
    matrix_products,
    scaled_products,
    stored_length,
)
from .words import push_words, sum_words

SUM_TOKENS = tl.constexpr(16)  # tokens the last block of a column block adds up at once


@triton.jit
def weight_tile(w2, slot, first_col, f, D, F, STEP: tl.constexpr):
    """``(weights (rows, depth), their scales)`` of a slot, from column ``f`` of w2 on; zeros for slot -1."""
    NUMBER: tl.constexpr = in_number(STEP.lane)
    legal_slot, length = tl.maximum(slot, 0), stored_length(F, STEP.lane)
    cols, ks = first_col + tl.arange(0, STEP.rows), f // NUMBER + tl.arange(0, STEP.depth // NUMBER)
    ptrs = w2.elements + legal_slot.to(tl.int64) * D * length + cols[:, None] * length + ks[None, :]
    # Masked, not skipped: a branch would keep the loads of several experts from being in flight together.
    mask = (slot >= 0) & (STEP.even | (ks < length)[None, :])
    weights = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    return weights, lane_scales(w2.scales, legal_slot, first_col, f, D, F, 1, STEP)


@triton.jit
def bias_of(b2_ptr, row, cols, D):
    """``b2[row]`` in the columns ``cols``, in float32; 0 without biases, for row -1 and from D on."""
    bias = tl.zeros(cols.shape, dtype=tl.float32)
    if b2_ptr is not None:
        mask = (row >= 0) & (cols < D)
        bias = tl.load(b2_ptr + tl.maximum(row, 0).to(tl.int64) * D + cols, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def times_hidden(tile, hidden_ptr, row, f, F, STEP: tl.constexpr):
    """``(rows, depth / lane)`` float32: a ``weight_tile`` times one routed row's hidden."""
    hs = f + lane_columns(STEP.rows, STEP.depth, STEP.lane, STEP.shared_scale)
    return scaled_products(tile[0], load_lanes(hidden_ptr + row * F + hs, hs < F, STEP), tile[1], STEP)


@triton.jit
def down_fold(step, w2, cache, token, first_col, D, F, E, S, STEP: tl.constexpr):
    """``(rows,)`` columns of one token's output; the first ``ahead`` steps of all its experts are loaded early."""
    K: tl.constexpr = STEP.top_k
    AHEAD: tl.constexpr = STEP.ahead
    ROWS: tl.constexpr = STEP.rows
    DEPTH: tl.constexpr = STEP.depth
    CACHE: tl.constexpr = STEP.cache
    places = tl.arange(0, STEP.top_k_block)
    ids = tl.load(step.ids + token * K + places, mask=places < K, other=-1).to(tl.int32)
    slots = slot_of(ids, step.slots, E, S, CACHE)
    tiles = ()
    for index in tl.static_range(K * AHEAD):
        slot = tl.sum(tl.where(places == index // AHEAD, slots, 0))
        tiles += (weight_tile(w2, slot, first_col, index % AHEAD * DEPTH, D, F, STEP),)
    wait_for_previous(STEP.dependent)
    weights = tl.load(step.routing_weights + token * K + places, mask=slots >= 0, other=0.0)
    total = tl.zeros((ROWS, DEPTH // STEP.lane), dtype=tl.float32)
    biases = tl.zeros((ROWS,), dtype=tl.float32)
    for k in tl.static_range(K):
        here = places == k
        slot, weight = tl.sum(tl.where(here, slots, 0)), tl.sum(tl.where(here, weights, 0.0))
        # An expert named twice may have left its hidden at the first of the two alone.
        row = token * K + tl.min(tl.where(ids == tl.sum(tl.where(here, ids, 0)), places, STEP.top_k_block))
        sums = tl.zeros((ROWS, DEPTH // STEP.lane), dtype=tl.float32)
        for index in tl.static_range(AHEAD):
            sums += times_hidden(tiles[k * AHEAD + index], step.hidden, row, index * DEPTH, F, STEP)
        for f in range(AHEAD * DEPTH, F, DEPTH):
            tile = weight_tile(w2, slot, first_col, f, D, F, STEP)
            sums += times_hidden(tile, step.hidden, row, f, F, STEP)
        # Hidden of an expert that is not held was never stored.
        total += tl.where(slot >= 0, weight * sums, 0.0)
        if w2.biases is not None:
            expert = tl.sum(tl.where(here, ids, 0))
            b2_row = bias_row(expert, slot, cache, E, S, CACHE)
            biases += weight * bias_of(w2.biases, b2_row, first_col + tl.arange(0, ROWS), D)
    outputs = tl.sum(total, axis=1)
    if w2.biases is not None:
        outputs += biases
    return outputs


@triton.jit
def down_vector(step, w2, slot, b2_row, rows, first_col, D, F, STEP: tl.constexpr):
    """Partial sums of one expert for one or two tokens; one without this expert computes on row 0, stores nothing.

    The first ``ahead`` steps of the weights are loaded before hidden is there.
    """
    AHEAD: tl.constexpr = STEP.ahead
    ROWS: tl.constexpr = STEP.rows
    DEPTH: tl.constexpr = STEP.depth
    cols = first_col + tl.arange(0, ROWS)
    row, other_row = row_of(rows, 0), row_of(rows, STEP.token_block - 1)
    legal_row = tl.where(row < NO_ROW, row, other_row)
    legal_other_row = tl.where(other_row < NO_ROW, other_row, row)
    tiles = ()
    for index in tl.static_range(AHEAD):
        tiles += (weight_tile(w2, slot, first_col, index * DEPTH, D, F, STEP),)
    wait_for_previous(STEP.dependent)
    total = tl.zeros((ROWS, DEPTH // STEP.lane), dtype=tl.float32)
    other_total = total
    for index in tl.static_range(AHEAD):
        total += times_hidden(tiles[index], step.hidden, legal_row, index * DEPTH, F, STEP)
        if STEP.token_block == 2:
            other_total += times_hidden(tiles[index], step.hidden, legal_other_row, index * DEPTH, F, STEP)
    for f in range(AHEAD * DEPTH, F, DEPTH):
        tile = weight_tile(w2, slot, first_col, f, D, F, STEP)
        total += times_hidden(tile, step.hidden, legal_row, f, F, STEP)
        if STEP.token_block == 2:
            other_total += times_hidden(tile, step.hidden, legal_other_row, f, F, STEP)
    outputs = tl.sum(total, axis=1)
    if w2.biases is not None:
        outputs += bias_of(w2.biases, b2_row, cols, D)
    tl.store(step.partials + row * D + cols, outputs, mask=(row < NO_ROW) & (cols < D))
    if STEP.token_block == 2:
        outputs = tl.sum(other_total, axis=1)
        if w2.biases is not None:
            outputs += bias_of(w2.biases, b2_row, cols, D)
        mask = (other_row < NO_ROW) & (cols < D)
        tl.store(step.partials + other_row * D + cols, outputs, mask=mask)


@triton.jit
def down_matrix(step, w2, w2_desc, slot, b2_row, rows, first_col, D, F, STEP: tl.constexpr):
    """Partial sums of one expert for the tokens of one pass."""
    cols = first_col + tl.arange(0, STEP.rows)
    valid = rows < NO_ROW
    legal_rows = tl.where(valid, rows, 0)
    row_ptrs = step.hidden + legal_rows[:, None] * F
    sums = matrix_products(
        row_ptrs, valid, w2_desc, (slot, first_col), w2.scales, slot, tl.minimum(cols, D - 1), D, F, STEP
    )  # fmt: skip
    if w2.biases is not None:
        sums += bias_of(w2.biases, b2_row, cols, D)[:, None]
    targets = step.partials + legal_rows[None, :] * D + cols[:, None]
    tl.store(targets, sums, mask=valid[None, :] & (cols < D)[:, None])


@triton.jit
def sum_rows(step, cache, tokens, cols, T, D, E, S, STEP: tl.constexpr):
    """``(tokens, cols)`` float32: each token's weighted partial sums, in the order of its routed rows.

    An expert that a token names twice left its partial sum at the first of the two. One of an earlier wave may have
    lost its slot since.
    """
    K: tl.constexpr = STEP.top_k
    CACHE: tl.constexpr = STEP.cache
    ks = tl.arange(0, STEP.top_k_block)[None, :]
    in_batch = tokens < T
    ids_ptr = step.ids if step.all_ids is None else step.all_ids
    ids = tl.load(ids_ptr + tokens[:, None] * K + ks, mask=in_batch[:, None] & (ks < K), other=-1).to(tl.int32)
    total = tl.zeros((tokens.shape[0], cols.shape[0]), dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + tokens * K + k, mask=in_batch, other=-1).to(tl.int32)
        if step.all_ids is None:
            held = slot_of(expert, step.slots, E, S, CACHE) >= 0
        else:
            held = is_served(expert, cache.state, E, S)
        first = tl.min(tl.where(ids == expert[:, None], ks, STEP.top_k_block), axis=1)
        weight = tl.load(step.routing_weights + tokens * K + k, mask=held, other=0.0)
        # Other SMs wrote them during this launch: read from L2.
        partial = tl.load(
            step.partials + (tokens * K + first)[:, None] * D + cols[None, :],
            mask=held[:, None] & (cols < D)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        total += weight[:, None] * partial
    return total


@triton.jit
def load_routing(step, E, S, STEP: tl.constexpr):
    """``(top_k_block,)`` of the only token: whether each of its experts is held here, and its routing weight."""
    CACHE: tl.constexpr = STEP.cache
    ks = tl.arange(0, STEP.top_k_block)
    ids = tl.load(step.ids + ks, mask=ks < STEP.top_k, other=-1).to(tl.int32)
    held = slot_of(ids, step.slots, E, S, CACHE) >= 0
    return held, tl.load(step.routing_weights + ks, mask=held, other=0.0)


@triton.jit
def sum_only_token(partials_ptr, held, weights, cols, D):
    """``(1, cols)`` float32: the only token's weighted partial sums, one of each routed row."""
    ptrs = partials_ptr + tl.arange(0, held.shape[0])[:, None] * D + cols[None, :]
    # Load from L2, as sum_rows does.
    partial = tl.load(ptrs, mask=held[:, None] & (cols < D)[None, :], other=0.0, cache_modifier=".cg")
    return tl.sum(weights[:, None] * partial, axis=0)[None, :]


@triton.jit
def publish(values, tokens, cols, step, words, rank, max_tokens, T, D, STEP: tl.constexpr):
    """Finished columns of this rank: into the output, or, over ranks, to where they are added up."""
    mask = (tokens < T)[:, None] & (cols < D)[None, :]
    if words is None:
        tl.store(step.out + tokens[:, None] * D + cols[None, :], values.to(step.out.dtype.element_ty), mask=mask)
    else:
        # After a missed deadline the order that keeps words unread from being overwritten is lost, and gathered tokens
        # may be half there: the others shall miss this rank, not trust it.
        mask = mask & (tl.load(words.fault) == 0)
        if STEP.gathered:
            ids = tl.load(step.ids + tokens * STEP.top_k, mask=tokens < T, other=ABSENT)
            mask = mask & (ids != ABSENT)[:, None]
        epoch = tl.load(words.epoch)
        push_words(
            values, tokens, cols, mask, words.addresses, epoch, rank, max_tokens, D, STEP.world_size, STEP.gathered
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "max_tokens", "timeout_ns", "T", "E", "S"])
def down_kernel(
    step, w2, w2_desc, words, cache, rank, max_tokens, timeout_ns, T, D, F, E, S, STEP: tl.constexpr
):  # fmt: skip
    """See the module; one axis of blocks: column block by column block all groups, then the items of ``sum_words``.

    ``step`` and ``STEP`` are ``StepTensors`` and ``StepConstants``; ``w2`` is read by ``w2_desc`` in the matrix form;
    ``words`` is ``None`` for a rank alone. Slots of experts that the kernel before this one still brings are not there
    to be read early. Of a step in waves (``experts.waves``) ``step.ids`` are those of one wave, and the last one alone
    ``adds_up``, by ``step.all_ids``.
    """
    CACHE: tl.constexpr = STEP.cache
    num_missing = count_missing(cache, E, S, CACHE)
    groups = T * STEP.top_k
    if STEP.fold:
        groups = T
    elif STEP.by_expert:
        groups = E
    group, block = tl.program_id(0) % groups, tl.program_id(0) // groups
    blocks = tl.cdiv(D, STEP.rows)
    cols = block * STEP.rows + tl.arange(0, STEP.rows)
    if words is not None:
        if block >= blocks:
            wait_for_previous(STEP.dependent)
            sum_words(
                tl.program_id(0) - blocks * groups, step.out, words.addresses, tl.load(words.epoch), words.fault,
                timeout_ns, rank, max_tokens, D, STEP.world_size, STEP.word_cols, STEP.interpret,
            )  # fmt: skip
    if block < blocks:
        if STEP.fold:
            wait_for_missing(num_missing, STEP.dependent, CACHE)
            total = down_fold(step, w2, cache, group, block * STEP.rows, D, F, E, S, STEP)
            token = group + tl.arange(0, 1)
            total = add_hosted(total[None, :], token, cols, T, D, cache, E, S, CACHE)
            publish(total, token, cols, step, words, rank, max_tokens, T, D, STEP)
        else:
            expert, rows = serves(
                step.ids, group, T, STEP.top_k, STEP.top_k_block, STEP.token_block, STEP.by_expert
            )  # fmt: skip
            wait_for_missing(num_missing, STEP.dependent, CACHE)
            slot = slot_of(expert, step.slots, E, S, CACHE)
            b2_row = bias_row(expert, slot, cache, E, S, CACHE)
            IS_ALONE: tl.constexpr = STEP.token_block == 1 and not STEP.by_expert
            if IS_ALONE:
                # Loaded here they are there when the last block adds up, which everything else waits for.
                held, weights = load_routing(step, E, S, STEP)
            if slot < 0:
                wait_for_previous(STEP.dependent)
            elif STEP.vector:
                down_vector(step, w2, slot, b2_row, rows, block * STEP.rows, D, F, STEP)
            else:
                wait_for_previous(STEP.dependent)
                for first in range(0, rows_in_passes(rows, STEP.tile), STEP.tile):
                    of_pass = pass_of(rows, first, STEP.tile)
                    down_matrix(step, w2, w2_desc, slot, b2_row, of_pass, block * STEP.rows, D, F, STEP)
            # ---- the last of the column block adds up
            if STEP.adds_up:
                tl.debug_barrier()
                if tl.atomic_add(step.tickets + block, 1, sem="acq_rel", scope="gpu") == groups - 1:
                    tl.store(step.tickets + block, 0)
                    BATCH: tl.constexpr = 1 if IS_ALONE else SUM_TOKENS
                    for first in range(0, 1 if IS_ALONE else T, BATCH):
                        tokens = first + tl.arange(0, BATCH)
                        if IS_ALONE:
                            total = sum_only_token(step.partials, held, weights, cols, D)
                        else:
                            total = sum_rows(step, cache, tokens, cols, T, D, E, S, STEP)
                        total = add_hosted(total, tokens, cols, T, D, cache, E, S, CACHE)
                        publish(total, tokens, cols, step, words, rank, max_tokens, T, D, STEP)
        forget_hosted(cache, E, S, CACHE)
