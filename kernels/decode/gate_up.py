"""Decode, first kernel: hidden = activation(x gate^T, x up^T) of every routed row whose expert is held here.

A block computes BLOCK_F columns of hidden for one group (see ``decode.routing``). Where experts are cached, blocks
before all others bring those that are missing (see ``experts.cache``). *vector* (1 or 2 tokens): gate
and up rows go from memory to registers in 16-byte pieces, products in float32. *matrix*: gate and up rows are the M
side of ``tl.dot``, the tokens its N side, and TMA loads run ahead of it.
What bounds it: reading 2 F D weights of every distinct expert once.
"""

import triton
import triton.language as tl

from ..experts.cache import arrived_slot, fetch_misses, plan_misses
from ..experts.host import ask_host, take_answer
from ..gemm.activation import hidden_of
from ..runtime.dependent import allow_next, wait_for_previous
from .routing import NO_ROW, load_columns, pass_of, row_of, rows_in_passes, serves, slot_of, token_of
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


@triton.jit
def gate_up_vector(
    x_ptr, w1_ptr, scales_ptr, b1_ptr, hidden_ptr, slot, rows, first_col, D, F,
    K: tl.constexpr, T_BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, LANE: tl.constexpr, SCALES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One or two tokens; BLOCK_F divides F. A token without this expert computes on token 0 and stores nothing."""
    cols = first_col + tl.arange(0, BLOCK_F)
    NUMBER: tl.constexpr = in_number(LANE)
    ks, length = tl.arange(0, BLOCK_K // NUMBER), stored_length(D, LANE)
    row, other_row = row_of(rows, 0), row_of(rows, T_BLOCK - 1)
    xs = lane_columns(BLOCK_F, BLOCK_K, LANE, SCALES)
    x_ptrs = x_ptr + token_of(row, K) * D + xs
    other_x_ptrs = x_ptr + token_of(other_row, K) * D + xs
    gate_ptrs = w1_ptr + slot.to(tl.int64) * (2 * F) * length + cols[:, None] * length + ks[None, :]
    up_ptrs = gate_ptrs + F * length
    gate = tl.zeros((BLOCK_F, BLOCK_K // LANE), dtype=tl.float32)
    up, other_gate, other_up = gate, gate, gate
    for k in range(0, D, BLOCK_K):
        at = k // NUMBER
        gate_rows = load_columns(gate_ptrs + at, (at + ks < length)[None, :], EVEN_K, "evict_first")
        up_rows = load_columns(up_ptrs + at, (at + ks < length)[None, :], EVEN_K, "evict_first")
        gate_scales = lane_scales(scales_ptr, slot, first_col, k, 2 * F, D, BLOCK_F, BLOCK_K, LANE, SCALES, EVEN_K)
        up_scales = lane_scales(scales_ptr, slot, F + first_col, k, 2 * F, D, BLOCK_F, BLOCK_K, LANE, SCALES, EVEN_K)
        x = load_lanes(x_ptrs + k, k + xs < D, LANE, SCALES, EVEN_K, "evict_last")
        gate += scaled_products(gate_rows, x, gate_scales, LANE, SCALES)
        up += scaled_products(up_rows, x, up_scales, LANE, SCALES)
        if T_BLOCK == 2:
            other_x = load_lanes(other_x_ptrs + k, k + xs < D, LANE, SCALES, EVEN_K, "evict_last")
            other_gate += scaled_products(gate_rows, other_x, gate_scales, LANE, SCALES)
            other_up += scaled_products(up_rows, other_x, up_scales, LANE, SCALES)
    element = hidden_ptr.dtype.element_ty
    hidden = hidden_of(tl.sum(gate, axis=1), tl.sum(up, axis=1), b1_ptr, slot, cols, F, ACTIVATION).to(element)
    tl.store(hidden_ptr + row * F + cols, hidden, mask=(row < NO_ROW) & (cols < F))
    if T_BLOCK == 2:
        other_gate, other_up = tl.sum(other_gate, axis=1), tl.sum(other_up, axis=1)
        hidden = hidden_of(other_gate, other_up, b1_ptr, slot, cols, F, ACTIVATION).to(element)
        tl.store(hidden_ptr + other_row * F + cols, hidden, mask=(other_row < NO_ROW) & (cols < F))


@triton.jit
def gate_up_matrix(
    x_ptr, w1_desc, scales_ptr, b1_ptr, hidden_ptr, slot, rows, first_col, D, F,
    K: tl.constexpr, TILE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, LANE: tl.constexpr, SCALES: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The TILE tokens of one pass; where ``rows`` has none, they are zeros that are not read from memory."""
    PART: tl.constexpr = part_of(BLOCK_K, SCALES)
    NUMBER: tl.constexpr = in_number(LANE)
    cols = first_col + tl.arange(0, BLOCK_F)
    ks = tl.arange(0, PART)
    valid = rows < NO_ROW
    x_ptrs = x_ptr + token_of(rows, K)[:, None] * D + ks[None, :]
    in_tile = tl.arange(0, 2 * BLOCK_F)
    weight_rows = tl.minimum(first_col + in_tile % BLOCK_F, F - 1) + in_tile // BLOCK_F * F
    accumulator = tl.zeros((2 * BLOCK_F, TILE), dtype=tl.float32)
    ahead = step_scales(scales_ptr, slot, weight_rows, 0, 2 * F, D, BLOCK_K, SCALES, EVEN_K)
    for k in range(0, D, BLOCK_K):
        xs, ws = (), ()
        for part in tl.static_range(BLOCK_K // PART):
            at = k + part * PART
            # The tail of D needs the mask; tokens without this expert are masked so that nothing is read for them.
            xs += (tl.load(x_ptrs + at, mask=valid[:, None] & (EVEN_K | (at + ks < D)[None, :]), other=0.0),)
            ws += (w1_desc.load([slot, 0, first_col, at // NUMBER]).reshape(2 * BLOCK_F, PART // NUMBER),)
        scales, ahead = step_and_next_scales(ahead, scales_ptr, slot, weight_rows, k, 2 * F, D, BLOCK_K, SCALES, EVEN_K)
        for part in tl.static_range(BLOCK_K // PART):
            accumulator = scaled_dot(ws[part], xs[part], accumulator, scales[part], SCALES, PRECISION)
    gate, up = accumulator.reshape(2, BLOCK_F, TILE).permute(1, 2, 0).split()
    hidden = hidden_of(gate, up, b1_ptr, slot, cols[:, None], F, ACTIVATION).to(hidden_ptr.dtype.element_ty)
    targets = hidden_ptr + tl.where(valid, rows, 0)[None, :] * F + cols[:, None]
    tl.store(targets, hidden, mask=valid[None, :] & (cols < F)[:, None])


@triton.jit(do_not_specialize=["T", "E", "S"])
def gate_up_kernel(
    x_ptr, ids_ptr, slots_ptr, w1, scales_ptr, b1_ptr, hidden_ptr, epoch_ptr, weights_ptr, cache, T, D, F, E, S,
    K: tl.constexpr, K_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, BY_EXPERT: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LANE: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, ADVANCE: tl.constexpr,
    GATHERED: tl.constexpr, DEPENDENT: tl.constexpr, CACHE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """See the module; grid (groups, column blocks of hidden). ``w1`` is a pointer (vector) or a descriptor (matrix).

    ``b1_ptr``: ``(S, 2F)`` biases, ``None`` without. ``ACTIVATION``: an ``Activation``.

    ``cache`` and ``CACHE`` are ``HostExperts.pointers`` and ``constants``, ``None`` where all experts are there.

    With ADVANCE the first block adds one to the epoch, which the down kernel reads and, before this one, the gather
    kernel. With GATHERED this one may start while that drains, the down kernel not before it ended: it reads ids early.
    """
    if GATHERED:
        wait_for_previous(DEPENDENT)
    group, block = tl.program_id(0), tl.program_id(1)
    if CACHE is not None:
        block -= CACHE.rows
        if block < 0:
            # The interpreter takes all blocks of a group before those of the next one: there the first group's fetch.
            width = 1 if CACHE.interpret else tl.num_programs(0)
            if group < width:
                fetcher = tl.program_id(1) * width + group
                if fetcher == 0:
                    plan_misses(ids_ptr, weights_ptr, T, T * K, cache, E, S, T_BLOCK * K_BLOCK, CACHE)
                    if CACHE.asks:
                        ask_host(x_ptr, ids_ptr, weights_ptr, T, D, cache, E, S, K, T_BLOCK * K_BLOCK, CACHE)
                allow_next(DEPENDENT)
                fetch_misses(fetcher, CACHE.rows * width, cache, E, S, CACHE)
                if CACHE.mail:
                    if fetcher == 0:
                        take_answer(T, D, cache, E, S, CACHE)
            return
    allow_next(DEPENDENT)
    if ADVANCE:
        if (group == 0) & (block == 0):
            tl.store(epoch_ptr, tl.load(epoch_ptr) + 1)
    expert, rows = serves(ids_ptr, group, T, K, K_BLOCK, T_BLOCK, BY_EXPERT)
    if CACHE is None:
        slot = slot_of(expert, slots_ptr, E, S)
    else:
        slot = arrived_slot(expert, cache[0], E, S, CACHE)
    if slot >= 0:
        if VECTOR:
            gate_up_vector(
                x_ptr, w1, scales_ptr, b1_ptr, hidden_ptr, slot, rows, block * BLOCK_F, D, F,
                K, T_BLOCK, BLOCK_F, BLOCK_K, EVEN_K, LANE, SCALES, ACTIVATION,
            )  # fmt: skip
        else:
            for first in range(0, rows_in_passes(rows, TILE), TILE):
                gate_up_matrix(
                    x_ptr, w1, scales_ptr, b1_ptr, hidden_ptr, slot, pass_of(rows, first, TILE), block * BLOCK_F, D, F,
                    K, TILE, BLOCK_F, BLOCK_K, EVEN_K, LANE, SCALES, PRECISION, ACTIVATION,
                )  # fmt: skip
