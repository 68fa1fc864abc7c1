"""Combine: weighted top-k reduce of the expert outputs, and the partial sums' way back to the rank of each token.

``combine_panels`` draws tickets, panel by panel: those of a panel's reduce, then those of the final sum of the panel
before it, whose partial sums have had a panel's time to travel.

A *reduce* ticket is (source rank, chunk of 32 received rows, panel). It waits until the GEMM of its own rank
has finished the panel, adds up the expert outputs of each row in slot order, stores the partial sums to the rank that
the row came from and publishes the epoch in that rank's flag of (this rank, chunk, panel). With gradients of the
routing weights, they travel beside the first panel. On a rank that has failed no panel opens, and
reduces neither store nor publish anything.

A *sum* ticket is some of this rank's own tokens. It waits for their flags and adds up their partial sums in rank order.

Why it terminates: tickets only grow, so each block draws finitely many. A reduce of panel p waits for GEMM blocks only,
which are resident and wait for nobody. A sum of panel p waits for reduces of panel p on all ranks, and each rank's
blocks draw those before any sum of panel p: they come after nothing but reduces up to p and sums below p - 1, so by
induction over the panels each flag that is waited for is raised. A rank that died is met by the deadline of the spin.
"""

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


@triton.jit
def panel_cols(panel, num_cols, num_panels, BLOCK_N: tl.constexpr):
    """First column of a panel, and how many it has, those past D included."""
    first_block, width = panel_span(panel, num_cols, num_panels)
    return first_block * BLOCK_N, width * BLOCK_N


@triton.jit
def load_slots(
    row_slots, row_weights, rows, end, first_slot_row, K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    """(rows, K) routed rows, -1 where none, and their routing weights."""
    ks = tl.arange(0, K_BLOCK)[None, :]
    offsets = (first_slot_row + rows)[:, None] * K + ks
    mask = (rows < end)[:, None] & (ks < K)
    slots = tl.load(row_slots + offsets, mask=mask, other=-1)
    weights = slots.to(tl.float32)
    if WEIGHTED:
        weights = tl.load(row_weights + offsets, mask=mask, other=0.0)
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
    y_ptr, row_slots, row_weights, target_ptr, first_row, first_slot_row, count, first_col, num_cols, D,
    K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Partial sums of the rows ``first_row .. min(first_row + CHUNK, count)`` of one source, in slot order.

    ``first_slot_row`` is the received row of the source's row 0; ``target_ptr`` the combine row of its row 0. The slots
    of the next rows are fetched while the present rows travel: they are the first link of a row's chain of latencies.
    The outputs of a row's slots are fetched at once, as far as there are registers: used slots are packed to the front.
    """
    FIRST: tl.constexpr = K if K < SLOTS_AT_ONCE else SLOTS_AT_ONCE
    in_step = tl.arange(0, ROWS)
    end = tl.minimum(first_row + CHUNK, count)
    slots, weights = load_slots(
        row_slots, row_weights, first_row + in_step, end, first_slot_row, K, K_BLOCK, WEIGHTED
    )  # fmt: skip
    for start in range(first_row, end, ROWS):
        rows = start + in_step
        next_slots, next_weights = load_slots(
            row_slots, row_weights, rows + ROWS, end, first_slot_row, K, K_BLOCK, WEIGHTED
        )  # fmt: skip
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
def send_grads(
    row_grads, target_ptr, first_row, first_slot_row, count, K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Copy the (row, slot) gradients of one chunk to the rank the rows came from."""
    rows = first_row + tl.arange(0, CHUNK)
    ks = tl.arange(0, K_BLOCK)
    mask = (rows < count)[:, None] & (ks < K)[None, :]
    values = tl.load(row_grads + (first_slot_row + rows)[:, None] * K + ks[None, :], mask=mask, other=0.0)
    tl.store(target_ptr + rows[:, None] * K + ks[None, :], values, mask=mask)


@triton.jit
def reduce_and_send(
    panel, source, chunk, open_panels, y_ptr, row_slots, row_weights, row_grads, recv_counts, addresses,
    grad_addresses, flag_addresses, panel_counters, fault_ptr, timeout_ns, epoch, rank, num_tiles, num_cols, num_panels,
    M, D, events_ptr, K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
    HAS_GRADS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, FLAGS: tl.constexpr, EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One reduce ticket; returns how many panels this block has seen complete, ``open_panels`` before."""
    first_row = chunk * CHUNK
    count = tl.where(source == rank, M, tl.load(recv_counts + source))
    first_col, cols_here = panel_cols(panel, num_cols, num_panels, BLOCK_N)
    if first_row < count:
        begin = now(EVENTS, INTERPRET)
        if panel >= open_panels:
            _, width = panel_span(panel, num_cols, num_panels)
            # Whatever an earlier kernel waited for in vain shows here: a load on its way beside those of the wait. What
            # this panel waited for in vain the wait itself tells.
            failed = tl.load(fault_ptr, volatile=True)
            late = wait_flag(
                panel_counters + panel, num_tiles * width, fault_ptr, timeout_ns, PLACE_PANEL, rank, panel, INTERPRET
            )  # fmt: skip
            if any_of((failed != 0) | (late != 0), tl.arange(0, MOST_THREADS)) == 0:
                open_panels = panel + 1
        if panel < open_panels:
            ready = now(EVENTS, INTERPRET)
            rows = tl.load(addresses + source).to(tl.pointer_type(y_ptr.dtype.element_ty))
            rows = tl.multiple_of(rows, 16) + rank.to(tl.int64) * M * D
            reduce_rows(
                y_ptr, row_slots, row_weights, rows, first_row, source * M, count, first_col, cols_here, D, K,
                K_BLOCK, WEIGHTED, ROWS, COLS, CHUNK,
            )  # fmt: skip
            if HAS_GRADS:
                if panel == 0:
                    grads = tl.load(grad_addresses + source).to(tl.pointer_type(tl.float32)) + rank * M * K
                    send_grads(row_grads, grads, first_row, source * M, count, K, K_BLOCK, CHUNK)
            flags = tl.load(flag_addresses + source).to(tl.pointer_type(tl.int32))
            signal(flags + (rank * (M // CHUNK) + chunk) * FLAGS + panel, epoch)
            record(events_ptr, KIND_REDUCE, epoch, source, chunk, panel, begin, ready, EVENTS, INTERPRET)
    return open_panels


@triton.jit
def wait_tokens(
    send_rows, tokens, present, place, flag_ptr, fault_ptr, timeout_ns, epoch, num_chunks, W: tl.constexpr,
    CHUNK: tl.constexpr, FLAGS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait for a panel of all partial sums of some tokens, whose flag is at ``place`` of a chunk's.

    One poll looks at all of their flags.
    """
    for rank in tl.static_range(W):
        row = tl.load(send_rows + tokens * W + rank, mask=present, other=-1)
        chunk = tl.maximum(row, 0) // CHUNK
        wait_flags(
            flag_ptr + (rank * num_chunks + chunk) * FLAGS + place, row >= 0, epoch, fault_ptr, timeout_ns,
            PLACE_LAYER1, rank + row * 0, chunk, INTERPRET,
        )  # fmt: skip


@triton.jit
def sum_partials(
    panel, first_token, out_ptr, grads_out, combine_ptr, combine_grads, send_rows, flag_ptr, fault_ptr,
    timeout_ns, epoch, num_cols, num_panels, T, M, D, events_ptr, W: tl.constexpr, K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_GRADS: tl.constexpr, BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, FLAGS: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One sum ticket."""
    first_col, cols_here = panel_cols(panel, num_cols, num_panels, BLOCK_N)
    ks = tl.arange(0, K_BLOCK)
    waited = first_token + tl.arange(0, TOKENS)
    begin = now(EVENTS, INTERPRET)
    wait_tokens(
        send_rows, waited, waited < T, panel, flag_ptr, fault_ptr, timeout_ns, epoch, M // CHUNK, W, CHUNK, FLAGS,
        INTERPRET,
    )  # fmt: skip
    ready = now(EVENTS, INTERPRET)
    for start in range(first_token, tl.minimum(first_token + TOKENS, T), ROWS):
        tokens = start + tl.arange(0, ROWS)
        present = tokens < T
        for col in range(0, cols_here, COLS):
            in_part = col + tl.arange(0, COLS)
            cols = first_col + in_part
            inside = (in_part < cols_here) & (cols < D)
            total = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for rank in tl.static_range(W):
                row = tl.load(send_rows + tokens * W + rank, mask=present, other=-1)
                offsets = tl.multiple_of((rank * M + tl.maximum(row, 0)).to(tl.int64) * D, 16)
                mask = (row >= 0)[:, None] & inside[None, :]
                partial = tl.load(combine_ptr + offsets[:, None] + cols[None, :], mask=mask, other=0.0)
                total += partial.to(tl.float32)
            target = out_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :]
            tl.store(target, total.to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])
        if HAS_GRADS:
            if panel == 0:
                grads = tl.zeros((ROWS, K_BLOCK), dtype=tl.float32)
                for rank in tl.static_range(W):
                    row = tl.load(send_rows + tokens * W + rank, mask=present, other=-1)
                    source = combine_grads + (rank * M + tl.maximum(row, 0))[:, None] * K + ks[None, :]
                    grads += tl.load(source, mask=(row >= 0)[:, None] & (ks < K)[None, :], other=0.0)
                target = grads_out + tokens[:, None] * K + ks[None, :]
                tl.store(target, grads, mask=present[:, None] & (ks < K)[None, :])
    record(events_ptr, KIND_FINAL_SUM, epoch, first_token, TOKENS, panel, begin, ready, EVENTS, INTERPRET)


@triton.jit
def combine_panels(
    y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts, combine_ptr,
    combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses, tickets, panel_counters,
    fault_ptr, timeout_ns, epoch, rank, num_tiles, num_cols, num_panels, T, M, D, events_ptr,
    W: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, HAS_GRADS: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, FLAGS: tl.constexpr, EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Draw tickets until none is left: reduces of panel 0, then by turns reduces of panel p + 1 and sums of panel p."""
    num_reduces = M // CHUNK * W
    per_panel = num_reduces + tl.cdiv(T, TOKENS)
    open_panels = 0
    ticket = tl.atomic_add(tickets, 1)
    while ticket < num_panels * per_panel:
        # A turn is the sums of one panel, before them the reduces of the next; the last turn has sums only.
        turn = (ticket - num_reduces + per_panel) // per_panel - 1
        item = ticket - num_reduces - turn * per_panel
        is_reduce = (turn < 0) | ((item < num_reduces) & (turn < num_panels - 1))
        if is_reduce:
            item = tl.where(turn < 0, ticket, item)
            # Sources go round the ring, so that ranks do not all send to the same one.
            open_panels = reduce_and_send(
                turn + 1, (rank + 1 + item % W) % W, item // W, open_panels, y_ptr, row_slots, row_weights,
                row_grads, recv_counts, combine_addresses, combine_grad_addresses, flag_addresses, panel_counters,
                fault_ptr, timeout_ns, epoch, rank, num_tiles, num_cols, num_panels, M, D, events_ptr, K,
                K_BLOCK, WEIGHTED, HAS_GRADS, BLOCK_N, ROWS, COLS, CHUNK, FLAGS, EVENTS, INTERPRET,
            )  # fmt: skip
        else:
            item = tl.where(turn < num_panels - 1, item - num_reduces, item)
            sum_partials(
                turn, item * TOKENS, out_ptr, grads_out, combine_ptr, combine_grads,
                send_rows, flag_ptr, fault_ptr, timeout_ns, epoch, num_cols, num_panels, T, M, D, events_ptr,
                W, K, K_BLOCK, HAS_GRADS, BLOCK_N, TOKENS, ROWS, COLS, CHUNK, FLAGS, EVENTS, INTERPRET,
            )  # fmt: skip
        ticket = tl.atomic_add(tickets, 1)
