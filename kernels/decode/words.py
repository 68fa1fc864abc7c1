"""Decode over W ranks: the all-reduce inside the down kernel.

Every rank has a receive buffer of words ``(2, W, max_tokens, D)`` int64; rank s writes [parity, s] of every rank. A
word holds a float32 partial sum below and the epoch above: 8 bytes arrive as one, so a word that shows the epoch also
shows the value, and neither a fence nor a flag follows the values over the wire. float32, because a sum of W rounded
partial sums would be less exact than one rank alone, and a decode step sends so little that the bytes hide behind the
weights.

Who waits: blocks with the highest ids of the grid. Blocks start in the order of their ids, and those that compute never
wait, so on every rank everything that is waited for has started or will without anyone's help.

Why no rank overwrites what another still reads. Words of epoch n lie in half n % 2, so a word is overwritten by epoch
n + 2. A rank writes epoch n + 2 in a kernel that its stream starts after its kernel of epoch n + 1 ended; that one
ended after it saw words of epoch n + 1 from every rank; a rank sends those from a kernel that its stream starts after
its kernel of epoch n ended, and with it all its reading of epoch n. No barrier between steps is needed. All ranks must
run the same steps, of the same tokens: a step of no tokens runs nowhere. A rank that met a deadline has seen no words
of that epoch from someone and sends none of a later one, so a rank that waits for it names it, and none adds up
words of another step.

Tokens that differ between ranks (GATHERED): sums go to the rank of the token alone, and a rank without tokens waits for
no rank here. ``decode.gather`` says why that is safe.
"""

import triton
import triton.language as tl

from ..runtime.primitives import PLACE_DECODE, any_of, clock_ns, record_fault

# The interpreter's clock counts polls of 20 us; one look at all words takes it at least 100 times as long.
POLL_COUNT = tl.constexpr(100)
LOW_HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit
def word_of(payload, epoch):
    """32 bits of ``payload``, any type of that size, below ``epoch``."""
    return (payload.to(tl.int32, bitcast=True).to(tl.int64) & LOW_HALF) | (epoch.to(tl.int64) << 32)


@triton.jit
def words_at(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def push_words(
    values, tokens, cols, mask, addresses, epoch, rank, max_tokens, D, W: tl.constexpr, GATHERED: tl.constexpr
):
    """Write this rank's ``(tokens, cols)`` float32 sums to every rank, its own included; gathered: to the token's."""
    words = word_of(values, epoch)
    first_row = ((epoch % 2) * W + rank) * max_tokens
    slots = tokens
    if GATHERED:
        slots = tokens % max_tokens
    offsets = (first_row + slots).to(tl.int64)[:, None] * D + cols[None, :]
    for peer in tl.static_range(W):
        wanted = mask
        if GATHERED:
            wanted = mask & (tokens // max_tokens == peer)[:, None]
        tl.store(words_at(addresses, peer) + offsets, words, mask=wanted)


@triton.jit
def sum_words(
    item, out_ptr, addresses, epoch, fault_ptr, timeout_ns, rank, max_tokens, D,
    W: tl.constexpr, COLS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait for COLS columns of one token from all ranks and store their sum, added up in the order of the ranks."""
    col_blocks = tl.cdiv(D, COLS)
    token, cols = item // col_blocks, item % col_blocks * COLS + tl.arange(0, COLS)
    ptrs = words_at(addresses, rank) + ((epoch % 2) * W * max_tokens + token).to(tl.int64) * D + cols
    step = max_tokens.to(tl.int64) * D
    total, epochs, late = read_words(ptrs, step, cols < D, epoch, W)
    oldest = tl.min(epochs, axis=0)
    if oldest < epoch:
        polls = tl.full((), 0, tl.int64)
        start = clock_ns(polls, INTERPRET)
        stop = any_of(tl.load(fault_ptr, volatile=True) != 0, cols)
        while (oldest < epoch) & (stop == 0):
            total, epochs, late = read_words(ptrs, step, cols < D, epoch, W)
            oldest = tl.min(epochs, axis=0)
            stop = any_of(tl.load(fault_ptr, volatile=True) != 0, cols)
            polls += POLL_COUNT
            is_late = any_of(clock_ns(polls, INTERPRET) - start > timeout_ns, cols)
            if (oldest < epoch) & (stop == 0) & (is_late == 1):
                peer = tl.max(tl.where(epochs == oldest, late, 0), axis=0)
                record_fault(fault_ptr, PLACE_DECODE, peer, item, epoch, oldest, INTERPRET)
    # One condition for the block, not one per column, keeps the stores 16 bytes wide.
    mask = (cols < D) & (oldest >= epoch)
    tl.store(out_ptr + token * D + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def read_words(ptrs, step, mask, epoch, W: tl.constexpr):
    """One look at the words of all ranks: their sum, the oldest epoch, and a rank that sent it, each per column.

    The sum means something where the oldest epoch is ``epoch``: each thread judges the very words it adds.
    """
    total = tl.zeros(ptrs.shape, dtype=tl.float32)
    epochs = tl.full(ptrs.shape, 0, tl.int32) + epoch
    late = tl.full(ptrs.shape, 0, tl.int32)
    for source in tl.static_range(W):
        words = tl.load(ptrs + source * step, mask=mask, other=epoch.to(tl.int64) << 32, volatile=True)
        seen = (words >> 32).to(tl.int32)
        late = tl.where(seen < epochs, source, late)
        epochs = tl.minimum(seen, epochs)
        total += words.to(tl.int32).to(tl.float32, bitcast=True)
    return total, epochs, late
