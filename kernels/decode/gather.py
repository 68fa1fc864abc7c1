"""Decode of tokens that differ between ranks: all tokens and their routing to every rank, in front of a step.

Every rank then computes the same batch of W * max_tokens tokens, token ``rank * max_tokens + slot``, as if it were
replicated; only down sends each token's sums to the one rank it came from, and that adds them up in the order of the
ranks. A slot without a token has ids ``ABSENT``: no block reads anything for it, and its sums are neither sent nor
awaited.

Every rank has a second receive buffer, of words ``(2, W, max_tokens, stride)`` int64; rank s writes [parity, s] of
every rank. A word holds 32 bits below and the epoch above, as in ``decode.words``: the token's bytes from the start of
a row, its K ids and K weights at the end. Bits are copied, so the same tokens give the same sums, whichever rank was
late. Ids of all slots travel in every step, the rest only where there is a token: ranks learn from the ids how many
there are, and a rank without tokens takes part like any other.

Who waits: blocks with the highest ids of the grid, for blocks of this kernel on any rank that never wait.

Why no rank overwrites what another still reads. *Words of tokens* of epoch n lie in half n % 2, and only the gather
kernel of step n reads them. Rank s overwrites them in its gather kernel of step n + 2, which its stream starts after
its gather kernel of step n + 1 ended; that one ended after it saw words of epoch n + 1 from every rank; a rank sends
those from a gather kernel that its stream starts after its gather kernel of step n ended. One half would not do: a rank
without tokens does not wait after its gather kernel, and may send those of step n + 1 while another still reads.
*Sums* of epoch n are read by the down kernel of step n. Rank s writes sums again in its down kernel of step n + 1 or
later, hence after it saw tokens of epoch n + 1 from every rank, which a rank sends after its down kernel of step n
ended; the two halves that ``decode.words`` needs are more than enough here. *What is unpacked* is read by the two
kernels behind this one, which end before the stream starts the next gather kernel; that one is never started early. So
no barrier between steps is needed, but all ranks must run the same steps, of equal K and dtype, also those in which
some or all have no tokens.

A rank that met a deadline sends no more sums, because it may hold half of a token: a rank that waits for it names it,
and no wrong sum arises.
"""

import torch
import triton
import triton.language as tl

from ..runtime.primitives import PLACE_GATHER, allow_next, any_of, clock_ns, record_fault
from .step import Batch, ReceiveBuffer, Step, Words
from .words import POLL_COUNT, word_of, words_at

ABSENT = tl.constexpr(-(2**31))
COLS = 512  # 16 bytes of a token for each thread
NUM_WARPS = 4


@triton.jit
def push_token(
    own, addresses, slot, block, epoch, rank, max_tokens, T, P, E, stride,
    W: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write COLS columns of one slot's token to every rank, this one included; the first block its routing, too.

    ``own`` are ``Batch``, as in ``take_token``.
    """
    ks = tl.arange(0, COLS)
    cols = block * COLS + ks
    here = slot < T
    of_token = here & (cols < P)
    of_routing = (ks < K) & (block == 0)
    payload = tl.load(own.tokens + slot * P + cols, mask=of_token, other=0)
    ids = tl.load(own.ids + slot * K + ks, mask=of_routing & here, other=-1)
    ids = tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)
    ids = tl.where(here, ids, ABSENT)
    weights = tl.load(own.routing_weights + slot * K + ks, mask=of_routing & here, other=0.0)
    words, id_words, weight_words = word_of(payload, epoch), word_of(ids, epoch), word_of(weights, epoch)
    row = ((epoch % 2) * W + rank) * max_tokens + slot
    for peer in tl.static_range(W):
        row_ptr = words_at(addresses, peer) + row.to(tl.int64) * stride
        tl.store(row_ptr + stride - 2 * K + ks, id_words, mask=of_routing)
        tl.store(row_ptr + stride - K + ks, weight_words, mask=of_routing & here)
        tl.store(row_ptr + cols, words, mask=of_token)


@triton.jit
def look(row_ptr, cols, ks, epoch, P, stride, K: tl.constexpr):
    """One look at a token: ``(columns, ids, weights, there, oldest epoch of what must come)``, the first three int32.

    Where the oldest epoch is ``epoch`` the rest means something: each thread judges the very words it read. No two
    threads may read the same one, at different moments, and go different ways: so ``ks`` are as many as ``cols``.
    """
    other = epoch.to(tl.int64) << 32
    words = tl.load(row_ptr + cols, mask=cols < P, other=other, volatile=True)
    ids = tl.load(row_ptr + stride - 2 * K + ks, mask=ks < K, other=other, volatile=True)
    weights = tl.load(row_ptr + stride - K + ks, mask=ks < K, other=other, volatile=True)
    oldest = (tl.min(ids, axis=0) >> 32).to(tl.int32)
    there = tl.max(tl.where(ks < K, ids.to(tl.int32), ABSENT), axis=0) != ABSENT
    if there & (oldest >= epoch):
        oldest = (tl.minimum(tl.min(words, axis=0), tl.min(weights, axis=0)) >> 32).to(tl.int32)
    return words.to(tl.int32), ids.to(tl.int32), weights.to(tl.int32), there, oldest


@triton.jit
def take_token(
    batch, addresses, token, block, epoch, fault_ptr, timeout_ns, rank, max_tokens, P, stride, W: tl.constexpr,
    K: tl.constexpr, COLS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait for COLS columns of one token of the batch and unpack them; the first block its routing, too."""
    ks = tl.arange(0, COLS)
    cols = block * COLS + ks
    row = (epoch % 2) * W * max_tokens + token
    row_ptr = words_at(addresses, rank) + row.to(tl.int64) * stride
    columns, ids, weights, there, oldest = look(row_ptr, cols, ks, epoch, P, stride, K)
    if oldest < epoch:
        polls = tl.full((), 0, tl.int64)
        start = clock_ns(polls, INTERPRET)
        stop = any_of(tl.load(fault_ptr, volatile=True) != 0, ks)
        while (oldest < epoch) & (stop == 0):
            columns, ids, weights, there, oldest = look(row_ptr, cols, ks, epoch, P, stride, K)
            stop = any_of(tl.load(fault_ptr, volatile=True) != 0, ks)
            polls += POLL_COUNT
            late = any_of(clock_ns(polls, INTERPRET) - start > timeout_ns, ks)
            if (oldest < epoch) & (stop == 0) & (late == 1):
                record_fault(fault_ptr, PLACE_GATHER, token // max_tokens, token, epoch, oldest, INTERPRET)
    complete = there & (oldest >= epoch)
    of_routing = (ks < K) & (block == 0)
    tl.store(batch.tokens + token * P + cols, columns, mask=(cols < P) & complete)
    tl.store(batch.ids + token * K + ks, tl.where(complete, ids, ABSENT), mask=of_routing)
    tl.store(batch.routing_weights + token * K + ks, weights.to(tl.float32, bitcast=True), mask=of_routing & complete)


@triton.jit(do_not_specialize=["rank", "max_tokens", "timeout_ns", "T", "E"])
def gather_kernel(
    own, batch, words, rank, max_tokens, timeout_ns, T, P, E, stride,
    W: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, DEPENDENT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; one axis of blocks: this rank's slots, then all tokens of the batch, block of columns by block.

    ``own`` and ``batch`` are ``Batch`` of P int32 each, ``words`` are those of the tokens. The epoch is the next
    one, that of the kernels behind.
    """
    allow_next(DEPENDENT)
    epoch = tl.load(words.epoch) + 1
    blocks = tl.cdiv(P, COLS)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if row < max_tokens:
        push_token(
            own, words.addresses, row, block, epoch, rank, max_tokens, T, P, E, stride, W, K, COLS
        )  # fmt: skip
    else:
        take_token(
            batch, words.addresses, row - max_tokens, block, epoch, words.fault, timeout_ns, rank, max_tokens, P,
            stride, W, K, COLS, INTERPRET,
        )  # fmt: skip


def gather(step: Step, buffer: ReceiveBuffer, *, dependent: bool) -> None:
    """Fill ``step``'s W * max_tokens tokens, ids (int32) and routing weights with those of all ranks.

    ``dependent`` lets the next kernel start while this one drains; it must wait for it.
    """
    own, batch = buffer.gather, step.tensors
    assert own is not None, "the tokens are replicated"
    (num_tokens, top_k), width = batch.ids.shape, batch.tokens.shape[1] * batch.tokens.element_size() // 4
    tokens, ids, routing_weights = own.tokens
    gather_kernel[((buffer.max_tokens + num_tokens) * -(-width // COLS),)](
        Batch(tokens.view(torch.int32), ids, routing_weights),
        Batch(batch.tokens.view(torch.int32), batch.ids, batch.routing_weights),
        Words(own.addresses, *buffer.words[1:]), buffer.rank, buffer.max_tokens, buffer.timeout_ns,
        ids.shape[0], width, batch.slots.shape[0], own.stride,
        W=own.addresses.numel(), K=top_k, COLS=COLS, DEPENDENT=dependent, INTERPRET=triton.knobs.runtime.interpret,
        num_warps=NUM_WARPS,
    )  # fmt: skip
