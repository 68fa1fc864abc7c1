"""Combine: weighted top-k reduce of the expert outputs, and the return of partial sums to the rank of each token.

``combine_panels`` draws tickets, panel by panel: those of a panel's reduce, then those of the final sum of the panel
before it, whose partial sums have had a panel's time to travel.

A *reduce* ticket is (source rank, chunk of 32 received rows, panel). It waits until the GEMM of its own rank
has finished the panel, adds up the expert outputs of each row in slot order, stores the partial sums to the rank that
the row came from and publishes the epoch in that rank's flag of (this rank, chunk, panel). Gradients of the
routing weights, if any, travel with the first panel. On a rank that has failed no panel opens, and
reduces neither store nor publish anything.

A *sum* ticket is some of this rank's own tokens. It waits for their flags and adds up their partial sums in rank order.

Why it terminates: tickets only grow, so each block draws finitely many. A reduce of panel p waits for the GEMM only,
whose shares are all drawn by then, by blocks that never wait in it. A sum of panel p waits for reduces of panel p on
all ranks, and each rank's blocks draw those before any sum of panel p: they come after nothing but reduces up to p and
sums below p - 1, so by induction over the panels each flag that is waited for is raised. A rank that died is met by the
deadline of the spin.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...gemm.tiles import panel_span
from ...runtime.arguments import power_of_2
from ...runtime.primitives import MOST_THREADS, PLACE_LAYER1, PLACE_PANEL, any_of, signal, wait_flag, wait_flags
from ...runtime.recorder import KIND_FINAL_SUM, KIND_REDUCE, now, record

SLOTS_AT_ONCE = tl.constexpr(8)


def slot_block(top_k: int) -> int:
    """K_BLOCK: a power of two; Triton's compiler cannot scan rows of fewer than eight."""
    return max(8, power_of_2(top_k))


class CombineSizes(NamedTuple):
    """M, routed rows Q, D and the GEMM's contraction."""

    M: int
    Q: int
    D: int
    contraction: int


class CombineConstants(NamedTuple):
    """The constants for which the combine is compiled."""

    block_n: int  # columns of a GEMM tile, of which panels consist
    world_size: int
    top_k: int  # K
    top_k_block: int  # power of two, at least K
    tokens: int  # of one sum ticket
    rows: int  # that the reduce and the sum handle at once
    cols: int  # of these
    chunk: int  # rows that share flags
    flags: int  # of a chunk
    events: int  # that a block records at most
    interpret: bool


class Turn(NamedTuple):
    """The values that all tickets of a launch share."""

    epoch: int
    rank: int
    timeout_ns: int
    num_tiles: int
    num_cols: int  # column blocks of D
    num_panels: int
    num_tokens: int  # T


@triton.jit
def panel_cols(panel, turn, BLOCK_N: tl.constexpr):
    """First column of a panel, and how many it has, those past D included."""
    first_block, width = panel_span(panel, turn.num_cols, turn.num_panels)
    return first_block * BLOCK_N, width * BLOCK_N


@triton.jit
def load_slots(returns, rows, end, first_slot_row, COMBINE: tl.constexpr):
    """(rows, K) routed rows, -1 where none, and their routing weights."""
    ks = tl.arange(0, COMBINE.top_k_block)[None, :]
    offsets = (first_slot_row + rows)[:, None] * COMBINE.top_k + ks
    mask = (rows < end)[:, None] & (ks < COMBINE.top_k)
    slots = tl.load(returns.row_slots + offsets, mask=mask, other=-1)
    weights = slots.to(tl.float32)
    if returns.row_weights is not None:
        weights = tl.load(returns.row_weights + offsets, mask=mask, other=0.0)
    return slots, weights


@triton.jit
def add_slots(
    total, y_ptr, slots, weights, places, cols, inside, D, FIRST: tl.constexpr, LAST: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """``total`` and the expert outputs of those slots of each row whose place among its used ones is in FIRST..LAST."""
    for place in tl.static_range(FIRST, LAST):
        here = (slots >= 0) & (places == place)
        slot = tl.sum(tl.where(here, slots + 1, 0), axis=1) - 1
        offsets = tl.multiple_of(tl.maximum(slot, 0).to(tl.int64) * D, 16)
        mask = (slot >= 0)[:, None] & inside[None, :]
        part = tl.load(y_ptr + offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.sum(tl.where(here, weights, 0.0), axis=1)[:, None]
        total += part
    return total


@triton.jit
def reduce_rows(
    y_ptr, returns, target_ptr, first_row, first_slot_row, count, first_col, num_cols, D, COMBINE: tl.constexpr
):  # fmt: skip
    """Partial sums of the rows ``first_row .. min(first_row + chunk, count)`` of one source, in slot order.

    ``first_slot_row`` is the received row of the source's row 0; ``target_ptr`` the combine row of its row 0. The slots
    of the next rows are fetched while the present rows travel: they are the first link of a row's chain of latencies.
    The outputs of a row's slots are fetched at once, as far as there are registers: used slots are packed to the front.
    """
    K: tl.constexpr = COMBINE.top_k
    ROWS: tl.constexpr = COMBINE.rows
    COLS: tl.constexpr = COMBINE.cols
    WEIGHTED: tl.constexpr = returns.row_weights is not None
    FIRST: tl.constexpr = K if K < SLOTS_AT_ONCE else SLOTS_AT_ONCE
    in_step = tl.arange(0, ROWS)
    end = tl.minimum(first_row + COMBINE.chunk, count)
    slots, weights = load_slots(returns, first_row + in_step, end, first_slot_row, COMBINE)
    for start in range(first_row, end, ROWS):
        rows = start + in_step
        next_slots, next_weights = load_slots(returns, rows + ROWS, end, first_slot_row, COMBINE)
        used = (slots >= 0).to(tl.int32)
        places = tl.cumsum(used, axis=1) - 1
        most = tl.max(tl.sum(used, axis=1), axis=0)
        for col in range(0, num_cols, COLS):
            in_panel = col + tl.arange(0, COLS)
            cols = first_col + in_panel
            inside = (in_panel < num_cols) & (cols < D)
            total = tl.zeros((ROWS, COLS), dtype=tl.float32)
            total = add_slots(total, y_ptr, slots, weights, places, cols, inside, D, 0, FIRST, WEIGHTED)
            if K > FIRST:
                if most > FIRST:
                    total = add_slots(total, y_ptr, slots, weights, places, cols, inside, D, FIRST, K, WEIGHTED)
            target = target_ptr + rows[:, None].to(tl.int64) * D + cols[None, :]
            # Rows without a slot here, too: where a capacity dropped them, their rank still adds them up.
            tl.store(target, total.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & inside[None, :])
        slots = next_slots
        weights = next_weights


@triton.jit
def send_grads(row_grads, target_ptr, first_row, first_slot_row, count, COMBINE: tl.constexpr):
    """Copy the (row, slot) gradients of one chunk to the rank the rows came from."""
    K: tl.constexpr = COMBINE.top_k
    rows = first_row + tl.arange(0, COMBINE.chunk)
    ks = tl.arange(0, COMBINE.top_k_block)
    mask = (rows < count)[:, None] & (ks < K)[None, :]
    values = tl.load(row_grads + (first_slot_row + rows)[:, None] * K + ks[None, :], mask=mask, other=0.0)
    tl.store(target_ptr + rows[:, None] * K + ks[None, :], values, mask=mask)


@triton.jit
def reduce_and_send(
    panel, source, chunk, open_panels, y_ptr, returns, symm, panel_counters, turn, M, D, COMBINE: tl.constexpr
):  # fmt: skip
    """One reduce ticket; returns how many panels this block has seen complete, ``open_panels`` before."""
    CHUNK: tl.constexpr = COMBINE.chunk
    EVENTS: tl.constexpr = COMBINE.events
    INTERPRET: tl.constexpr = COMBINE.interpret
    rank, first_row = turn.rank, chunk * CHUNK
    count = tl.where(source == rank, M, tl.load(returns.recv_counts + source))
    first_col, cols_here = panel_cols(panel, turn, COMBINE.block_n)
    if first_row < count:
        begin = now(EVENTS, INTERPRET)
        if panel >= open_panels:
            _, width = panel_span(panel, turn.num_cols, turn.num_panels)
            # This load, in flight together with those of the wait, shows whether an earlier kernel met its deadline.
            # The wait itself returns whether this panel did.
            failed = tl.load(symm.fault, volatile=True)
            late = wait_flag(
                panel_counters + panel, turn.num_tiles * width, symm.fault, turn.timeout_ns, PLACE_PANEL, rank,
                panel, INTERPRET,
            )  # fmt: skip
            if any_of((failed != 0) | (late != 0), tl.arange(0, MOST_THREADS)) == 0:
                open_panels = panel + 1
        if panel < open_panels:
            ready = now(EVENTS, INTERPRET)
            rows = tl.load(symm.row_pointers + source).to(tl.pointer_type(y_ptr.dtype.element_ty))
            rows = tl.multiple_of(rows, 16) + rank.to(tl.int64) * M * D
            reduce_rows(y_ptr, returns, rows, first_row, source * M, count, first_col, cols_here, D, COMBINE)
            if returns.grads is not None:
                if panel == 0:
                    grads = tl.load(returns.grads.received_pointers + source).to(tl.pointer_type(tl.float32))
                    grads += rank * M * COMBINE.top_k
                    send_grads(returns.grads.row_grads, grads, first_row, source * M, count, COMBINE)
            flags = tl.load(symm.flag_pointers + source).to(tl.pointer_type(tl.int32))
            signal(flags + (rank * (M // CHUNK) + chunk) * COMBINE.flags + panel, turn.epoch)
            record(symm.events, KIND_REDUCE, turn.epoch, source, chunk, panel, begin, ready, EVENTS, INTERPRET)
    return open_panels


@triton.jit
def wait_tokens(send_rows, tokens, present, panel, symm, turn, num_chunks, COMBINE: tl.constexpr):
    """Wait for a panel of all partial sums of some tokens; one poll looks at all of their flags."""
    W: tl.constexpr = COMBINE.world_size
    for rank in tl.static_range(W):
        row = tl.load(send_rows + tokens * W + rank, mask=present, other=-1)
        chunk = tl.maximum(row, 0) // COMBINE.chunk
        wait_flags(
            symm.flags + (rank * num_chunks + chunk) * COMBINE.flags + panel, row >= 0, turn.epoch, symm.fault,
            turn.timeout_ns, PLACE_LAYER1, rank + row * 0, chunk, COMBINE.interpret,
        )  # fmt: skip


@triton.jit
def sum_partials(panel, first_token, out_ptr, returns, symm, turn, M, D, COMBINE: tl.constexpr):
    """One sum ticket."""
    W: tl.constexpr = COMBINE.world_size
    K: tl.constexpr = COMBINE.top_k
    ROWS: tl.constexpr = COMBINE.rows
    COLS: tl.constexpr = COMBINE.cols
    TOKENS: tl.constexpr = COMBINE.tokens
    T = turn.num_tokens
    first_col, cols_here = panel_cols(panel, turn, COMBINE.block_n)
    waited = first_token + tl.arange(0, TOKENS)
    begin = now(COMBINE.events, COMBINE.interpret)
    wait_tokens(returns.send_rows, waited, waited < T, panel, symm, turn, M // COMBINE.chunk, COMBINE)
    ready = now(COMBINE.events, COMBINE.interpret)
    for start in range(first_token, tl.minimum(first_token + TOKENS, T), ROWS):
        tokens = start + tl.arange(0, ROWS)
        present = tokens < T
        for col in range(0, cols_here, COLS):
            in_part = col + tl.arange(0, COLS)
            cols = first_col + in_part
            inside = (in_part < cols_here) & (cols < D)
            total = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for rank in tl.static_range(W):
                row = tl.load(returns.send_rows + tokens * W + rank, mask=present, other=-1)
                offsets = tl.multiple_of((rank * M + tl.maximum(row, 0)).to(tl.int64) * D, 16)
                mask = (row >= 0)[:, None] & inside[None, :]
                partial = tl.load(symm.rows + offsets[:, None] + cols[None, :], mask=mask, other=0.0)
                total += partial.to(tl.float32)
            target = out_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :]
            tl.store(target, total.to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])
        if returns.grads is not None:
            if panel == 0:
                K_BLOCK: tl.constexpr = COMBINE.top_k_block
                ks = tl.arange(0, K_BLOCK)
                grads = tl.zeros((ROWS, K_BLOCK), dtype=tl.float32)
                for rank in tl.static_range(W):
                    row = tl.load(returns.send_rows + tokens * W + rank, mask=present, other=-1)
                    source = returns.grads.received + (rank * M + tl.maximum(row, 0))[:, None] * K + ks[None, :]
                    grads += tl.load(source, mask=(row >= 0)[:, None] & (ks < K)[None, :], other=0.0)
                target = returns.grads.out + tokens[:, None] * K + ks[None, :]
                tl.store(target, grads, mask=present[:, None] & (ks < K)[None, :])
    record(
        symm.events, KIND_FINAL_SUM, turn.epoch, first_token, TOKENS, panel, begin, ready, COMBINE.events,
        COMBINE.interpret,
    )  # fmt: skip


@triton.jit
def combine_panels(y_ptr, out_ptr, returns, symm, tickets, panel_counters, turn, M, D, COMBINE: tl.constexpr):
    """Draw tickets until none is left: reduces of panel 0, then by turns reduces of panel p + 1 and sums of panel p."""
    W: tl.constexpr = COMBINE.world_size
    num_panels = turn.num_panels
    num_reduces = M // COMBINE.chunk * W
    per_panel = num_reduces + tl.cdiv(turn.num_tokens, COMBINE.tokens)
    open_panels = 0
    ticket = tl.atomic_add(tickets, 1)
    while ticket < num_panels * per_panel:
        # A round is the sums of one panel, before them the reduces of the next; the last round has sums only.
        panel = (ticket - num_reduces + per_panel) // per_panel - 1
        item = ticket - num_reduces - panel * per_panel
        is_reduce = (panel < 0) | ((item < num_reduces) & (panel < num_panels - 1))
        if is_reduce:
            item = tl.where(panel < 0, ticket, item)
            # Sources go round the ring, so that ranks do not all send to the same one.
            source = (turn.rank + 1 + item % W) % W
            open_panels = reduce_and_send(
                panel + 1, source, item // W, open_panels, y_ptr, returns, symm, panel_counters, turn, M, D, COMBINE
            )  # fmt: skip
        else:
            item = tl.where(panel < num_panels - 1, item - num_reduces, item)
            sum_partials(panel, item * COMBINE.tokens, out_ptr, returns, symm, turn, M, D, COMBINE)
        ticket = tl.atomic_add(tickets, 1)
