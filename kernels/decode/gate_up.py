"""Decode, first kernel: hidden = activation(x gate^T, x up^T) of every routed row whose expert is held here.

A block computes ``rows`` columns of hidden for one group (see ``decode.routing``). Where experts are cached, blocks
before all others bring those that are missing (see ``experts.cache``). *vector* (1 or 2 tokens): gate
and up rows go from memory to registers in 16-byte pieces, products in float32. *matrix*: gate and up rows are the M
side of ``tl.dot``, the tokens its N side, and TMA loads run ahead of it.
What bounds it: reading 2 F D weights of every distinct expert once.
"""

import triton
import triton.language as tl

from ..experts.cache import arrived_slot, bias_row, fetch_misses, plan_misses
from ..experts.host import ask_host, take_answer
from ..gemm.activation import hidden_of
from ..runtime.primitives import allow_next, wait_for_previous
from .routing import NO_ROW, load_columns, pass_of, row_of, rows_in_passes, serves, slot_of, token_of
from .scales import (
    in_number,
    lane_columns,
    lane_scales,
    load_lanes,
    matrix_products,
    scaled_products,
    stored_length,
)


@triton.jit
def gate_up_vector(step, w1, slot, b1_row, rows, first_col, D, F, STEP: tl.constexpr):
    """One or two tokens; F is a multiple of ``rows``. A token without this expert takes token 0 and stores nothing."""
    ROWS: tl.constexpr = STEP.rows
    DEPTH: tl.constexpr = STEP.depth
    K: tl.constexpr = STEP.top_k
    ACTIVATION: tl.constexpr = STEP.activation
    NUMBER: tl.constexpr = in_number(STEP.lane)
    EVERY: tl.constexpr = 2 if STEP.interleaved else 1  # rows of w1 from one column of hidden to the next
    up_row = 1 if STEP.interleaved else F
    cols, first_row = first_col + tl.arange(0, ROWS), first_col * EVERY
    ks, length = tl.arange(0, DEPTH // NUMBER), stored_length(D, STEP.lane)
    row, other_row = row_of(rows, 0), row_of(rows, STEP.token_block - 1)
    xs = lane_columns(ROWS, DEPTH, STEP.lane, STEP.shared_scale)
    x_ptrs = step.tokens + token_of(row, K) * D + xs
    other_x_ptrs = step.tokens + token_of(other_row, K) * D + xs
    gate_ptrs = w1.elements + slot.to(tl.int64) * (2 * F) * length + cols[:, None] * EVERY * length + ks[None, :]
    up_ptrs = gate_ptrs + up_row * length
    gate = tl.zeros((ROWS, DEPTH // STEP.lane), dtype=tl.float32)
    up, other_gate, other_up = gate, gate, gate
    for k in range(0, D, DEPTH):
        at = k // NUMBER
        gate_rows = load_columns(gate_ptrs + at, (at + ks < length)[None, :], STEP.even, "evict_first")
        up_rows = load_columns(up_ptrs + at, (at + ks < length)[None, :], STEP.even, "evict_first")
        gate_scales = lane_scales(w1.scales, slot, first_row, k, 2 * F, D, EVERY, STEP)
        up_scales = lane_scales(w1.scales, slot, up_row + first_row, k, 2 * F, D, EVERY, STEP)
        x = load_lanes(x_ptrs + k, k + xs < D, STEP)
        gate += scaled_products(gate_rows, x, gate_scales, STEP)
        up += scaled_products(up_rows, x, up_scales, STEP)
        if STEP.token_block == 2:
            other_x = load_lanes(other_x_ptrs + k, k + xs < D, STEP)
            other_gate += scaled_products(gate_rows, other_x, gate_scales, STEP)
            other_up += scaled_products(up_rows, other_x, up_scales, STEP)
    element = step.hidden.dtype.element_ty
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    hidden = hidden_of(gate, up, w1.biases, b1_row, cols, F, ACTIVATION, STEP.interleaved).to(element)
    tl.store(step.hidden + row * F + cols, hidden, mask=(row < NO_ROW) & (cols < F))
    if STEP.token_block == 2:
        other_gate, other_up = tl.sum(other_gate, axis=1), tl.sum(other_up, axis=1)
        hidden = hidden_of(other_gate, other_up, w1.biases, b1_row, cols, F, ACTIVATION, STEP.interleaved).to(element)
        tl.store(step.hidden + other_row * F + cols, hidden, mask=(other_row < NO_ROW) & (cols < F))


@triton.jit
def gate_up_matrix(step, w1, w1_desc, slot, b1_row, rows, first_col, D, F, STEP: tl.constexpr):
    """The tokens of one pass; where ``rows`` has none, they are zeros that are not read from memory."""
    ACTIVATION: tl.constexpr = STEP.activation
    ROWS: tl.constexpr = STEP.rows
    cols = first_col + tl.arange(0, ROWS)
    valid = rows < NO_ROW
    in_tile = tl.arange(0, 2 * ROWS)
    weight_rows = tl.minimum(first_col + in_tile % ROWS, F - 1)
    if STEP.interleaved:
        weight_rows = 2 * weight_rows + in_tile // ROWS
    else:
        weight_rows += in_tile // ROWS * F
    row_ptrs = step.tokens + token_of(rows, STEP.top_k)[:, None] * D
    products = matrix_products(
        row_ptrs, valid, w1_desc, (slot, 0, first_col), w1.scales, slot, weight_rows, 2 * F, D, STEP
    )  # fmt: skip
    gate, up = products.reshape(2, ROWS, STEP.tile).permute(1, 2, 0).split()
    hidden = hidden_of(gate, up, w1.biases, b1_row, cols[:, None], F, ACTIVATION, STEP.interleaved)
    hidden = hidden.to(step.hidden.dtype.element_ty)
    targets = step.hidden + tl.where(valid, rows, 0)[None, :] * F + cols[:, None]
    tl.store(targets, hidden, mask=valid[None, :] & (cols < F)[:, None])


@triton.jit(do_not_specialize=["T", "E", "S"])
def gate_up_kernel(step, w1, w1_desc, epoch_ptr, cache, T, D, F, E, S, STEP: tl.constexpr):
    """See the module; grid (groups, column blocks of hidden).

    ``step`` and ``STEP`` are ``StepTensors`` and ``StepConstants``; ``w1`` is read by ``w1_desc`` in the matrix form.
    ``cache`` and ``STEP.cache`` are ``HostExperts.pointers`` and ``constants``, ``None`` where all experts are there.

    The first block adds one to the epoch, if there is one, which the down kernel reads and, before this one, the gather
    kernel. Where tokens are gathered this one may start while that drains, the down kernel not before it ended: it
    reads ids early.
    """
    CACHE: tl.constexpr = STEP.cache
    K: tl.constexpr = STEP.top_k
    J_BLOCK: tl.constexpr = STEP.token_block * STEP.top_k_block
    if STEP.gathered:
        wait_for_previous(STEP.dependent)
    group, block = tl.program_id(0), tl.program_id(1)
    if CACHE is not None:
        block -= CACHE.rows
        if block < 0:
            # The interpreter takes all blocks of a group before those of the next one: there the first group's fetch.
            width = 1 if CACHE.interpret else tl.num_programs(0)
            if group < width:
                fetcher = tl.program_id(1) * width + group
                if fetcher == 0:
                    plan_misses(step.ids, T, T * K, cache, E, S, J_BLOCK, CACHE)
                    if cache.mail is not None:
                        ask_host(step.tokens, step.ids, step.routing_weights, T, D, cache, E, S, K, J_BLOCK, CACHE)
                fetch_misses(fetcher, CACHE.rows * width, cache, E, S, STEP.dependent, CACHE)
                if cache.mail is not None:
                    if fetcher == 0:
                        take_answer(T, D, cache, E, S, CACHE)
            return
    allow_next(STEP.dependent)
    if epoch_ptr is not None:
        if (group == 0) & (block == 0):
            tl.store(epoch_ptr, tl.load(epoch_ptr) + 1)
    expert, rows = serves(step.ids, group, T, K, STEP.top_k_block, STEP.token_block, STEP.by_expert)
    if CACHE is None:
        slot = slot_of(expert, step.slots, E, S)
    else:
        slot = arrived_slot(expert, cache, E, S, CACHE)
    if slot >= 0:
        b1_row = bias_row(expert, slot, cache, E, S, CACHE)
        if STEP.vector:
            gate_up_vector(step, w1, slot, b1_row, rows, block * STEP.rows, D, F, STEP)
        else:
            for first in range(0, rows_in_passes(rows, STEP.tile), STEP.tile):
                of_pass = pass_of(rows, first, STEP.tile)
                gate_up_matrix(step, w1, w1_desc, slot, b1_row, of_pass, block * STEP.rows, D, F, STEP)
