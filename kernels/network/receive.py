"""Waits for what rail peers have sent, unpacks the guests' routing, and adds up the sums of all nodes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from ..runtime.primitives import (
    MOST_THREADS,
    PLACE_ELSEWHERE,
    PLACE_OTHER_CALL,
    any_of,
    record_fault,
    wait_flag,
)
from .legs import Leg, LegShape

ADD_ROWS, ADD_COLS = 16, 512  # rows and columns that a block adds up


@triton.jit(do_not_specialize=["call", "node", "first_slot", "first_chunk", "timeout_ns"])
def receive_kernel(
    leg, ids_ptr, weights_ptr, counts_ptr, number_ptr, call, node, first_slot, first_chunk, timeout_ns,
    TOP_K: tl.constexpr, LEG: tl.constexpr,
):  # fmt: skip
    """One program waits for the words and one chunk of a slot; out of ids it makes -1 of what did not arrive.

    Where anything did not, or came from another pass, this rank sends nothing more inside its node either: sums and
    weight gradients of the other ranks would lack these guests. ``ids_ptr`` is ``None`` where no routing is unpacked.
    """
    chunk, slot = first_chunk + tl.program_id(0), first_slot + tl.program_id(1)
    CHUNKS: tl.constexpr = LEG.num_chunks
    PLACE: tl.constexpr = LEG.place
    source = (node + tl.where(LEG.is_home, 1 + slot, LEG.num_nodes - 1 - slot)) % LEG.num_nodes
    epoch = tl.load(leg.epoch) + 1
    flags = leg.flags + slot * (2 * (1 + CHUNKS))
    words = leg.words + slot % LEG.ring * LEG.slot_words
    threads = tl.arange(0, MOST_THREADS)
    late = wait_flag(flags, epoch, leg.fault, timeout_ns, PLACE, source, 0, LEG.interpret)
    is_missing = any_of(late != 0, threads)
    other, its_number = tl.load(words + 1, volatile=True), tl.load(words + 2, volatile=True)
    number = tl.load(number_ptr)
    if (is_missing == 0) & ((other != call) | (its_number != number)):
        peer = source + LEG.num_nodes * other
        record_fault(leg.fault, PLACE_OTHER_CALL, peer, call, number, its_number, LEG.interpret)
        is_missing += 1
    count = tl.where(is_missing == 0, tl.load(words, volatile=True), 0)
    first = chunk * LEG.chunk
    if first < count:
        late = wait_flag(
            flags + 2 * (1 + chunk), epoch, leg.fault, timeout_ns, PLACE, source, 1 + chunk, LEG.interpret
        )  # fmt: skip
        is_missing = any_of(late != 0, threads)
        count = tl.where(is_missing == 0, count, 0)
    if is_missing != 0:
        record_fault(leg.inner_fault, PLACE_ELSEWHERE, source, chunk, epoch, 0, LEG.interpret)
    if chunk == 0:
        tl.store(counts_ptr + slot, count)
    if ids_ptr is not None:
        rows = first + tl.arange(0, LEG.chunk)[:, None]
        places = rows - first_chunk * LEG.chunk
        slots = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
        source_words = words + LEG.header + rows * (2 * TOP_K) + slots
        exists, is_slot = (rows < count) & (slots < TOP_K), (slots < TOP_K) & (rows >= 0)
        ids = tl.load(source_words, mask=exists, other=-1, volatile=True)
        weights = tl.load(source_words + TOP_K, mask=exists, other=0, volatile=True)
        tl.store(ids_ptr + places * TOP_K + slots, ids, mask=is_slot)
        tl.store(weights_ptr + places * TOP_K + slots, weights, mask=is_slot)


def receive(
    leg: Leg,
    counts: Tensor,
    number: Tensor,
    call: int,
    slots: range,
    chunks: range,
    routing: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Let the stream wait until all that comes through some slots has arrived.

    Args:
        leg: Where it arrives.
        counts: ``(S,)`` int32: receives how many tokens came through each of the slots.
        number: ``(1,)`` int32, and ``call``: what peers have to have called (``put``).
        slots: Those that are waited for; one, if ``routing`` is given.
        chunks: The chunks of their rows that are waited for.
        routing: ``(P, K)`` int32 and ``(P, K)`` float32 of the P rows of these chunks: receive ids, -1 where no token
            came, and routing weights.
    """
    ids, weights = (None, None) if routing is None else (routing[0], routing[1].view(routing[0].dtype))
    receive_kernel[(len(chunks), len(slots))](
        leg.tensors, ids, weights, counts, number, call, leg.node, slots.start, chunks.start, leg.timeout_ns,
        TOP_K=1 if ids is None else ids.shape[1], LEG=leg.shape,
    )  # fmt: skip


@triton.jit(do_not_specialize=["node", "first_term", "num_tokens"])
def add_kernel(
    own_ptr, total_ptr, returned_ptr, places_ptr, out_ptr, node, first_term, num_tokens, num_cols, slot_stride,
    row_stride, TERMS: tl.constexpr, LEG: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add what some nodes computed of some tokens, in float32; ``own_ptr`` and ``total_ptr`` may be ``None``."""
    M: tl.constexpr = LEG.num_chunks * LEG.chunk
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    exists = (tokens < num_tokens)[:, None] & (cols < num_cols)
    here = tokens[:, None].to(tl.int64) * num_cols + cols
    total = tl.zeros((ROWS, COLS), tl.float32)
    if total_ptr is not None:
        total = tl.load(total_ptr + here, mask=exists, other=0.0)
    for term in range(TERMS):
        slot = (first_term + term - node + LEG.num_nodes) % LEG.num_nodes - 1
        if slot < 0:
            if own_ptr is not None:
                total += tl.load(own_ptr + here, mask=exists, other=0.0).to(tl.float32)
        else:
            places = tl.load(places_ptr + slot * M + tokens, mask=tokens < num_tokens, other=-1)[:, None]
            base = returned_ptr + (slot % LEG.ring).to(tl.int64) * slot_stride
            part = tl.load(base + places.to(tl.int64) * row_stride + cols, mask=exists & (places >= 0), other=0.0)
            total += part.to(tl.float32)
    tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), mask=exists)


def add_nodes(
    own: Tensor | None,
    total: Tensor | None,
    returned: Tensor,
    places: Tensor,
    shape: LegShape,
    node: int,
    terms: range,
) -> Tensor:
    """Add what came home of each token, and what this node computed, to a total.

    Args:
        own: ``(T, C)`` contiguous; ``None`` where it is no term.
        total: ``(T, C)`` float32, which receives the sum where ``own`` is no term; ``None``: zeros.
        returned: ``(R, M, C)`` of the ring's places, elements of a row behind each other.
        places: ``(S, M)`` int32: the row of each token there, or -1.
        shape: The leg's.
        node: Term t is slot t - node - 1 modulo N, and own where that is -1: with this rank's node terms are nodes.
        terms: The terms, in the order in which they are added.

    Returns:
        ``(T, C)`` of the type of ``own``, or the total; sums are float32.
    """
    out = torch.empty_like(own) if own is not None else total
    assert out is not None, "own or total is given"
    cols = min(ADD_COLS, power_of_2(out.shape[1]))
    grid = (triton.cdiv(max(len(out), 1), ADD_ROWS), triton.cdiv(out.shape[1], cols))
    add_kernel[grid](
        own, total, returned, places, out, node, terms.start, len(out), out.shape[1], returned.stride(0),
        returned.stride(1), TERMS=len(terms), LEG=shape, ROWS=ADD_ROWS, COLS=cols,
    )  # fmt: skip
    return out
