"""Puts words and rows into the memory of rail peers, where this is mapped: the twin of ``cuda/put_rows.cu``.

Why it ends: no program waits. A rank that has failed, in this group or inside its node, sends nothing, so its peers
meet their deadline and name it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..layer.triton.dispatch import NUM_WARPS, push_chunk, push_constants
from ..runtime.primitives import MOST_THREADS, any_of, signal
from .legs import Leg, Message

BLOCKS = 16  # a launch has so many: the link is slower than they are, and the other SMs compute


class Part(NamedTuple):
    """The part of each slot that one launch sends."""

    by_slot: bool  # whether there is a list of tokens, and words, for each slot
    first_chunk: int
    end_chunk: int
    has_words: bool


@triton.jit
def put_words(words_ptr, target, count, number_ptr, call, per_token, LEG: tl.constexpr):
    """Copy ``count * per_token`` words and the header to ``target``."""
    total = count * per_token
    for first in range(0, total, 1024):
        places = first + tl.arange(0, 1024)
        values = tl.load(words_ptr + places, mask=places < total)
        tl.store(target + LEG.header + places, values, mask=places < total)
    tl.store(target, count)
    tl.store(target + 1, call)
    tl.store(target + 2, tl.load(number_ptr))


@triton.jit(do_not_specialize=["call", "node", "first_slot", "num_slots", "per_token"])
def put_kernel(
    x_ptr, tokens_ptr, words_ptr, counts_ptr, number_ptr, leg, call, node, first_slot, num_slots, per_token, D,
    PART: tl.constexpr, LEG: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """One program takes every n-th item: the words of a slot, if they are sent, then its chunks of rows, slot by slot.

    ``PART`` is a ``Part``.
    """
    CHUNKS: tl.constexpr = PART.end_chunk - PART.first_chunk
    M: tl.constexpr = LEG.num_chunks * LEG.chunk
    FLAGS: tl.constexpr = 2 * (1 + LEG.num_chunks)
    num_words = num_slots * PART.has_words
    epoch = tl.load(leg.epoch) + 1
    failed = (tl.load(leg.fault, volatile=True) != 0) | (tl.load(leg.inner_fault, volatile=True) != 0)
    end = tl.where(any_of(failed, tl.arange(0, MOST_THREADS)) == 0, num_words + num_slots * CHUNKS, 0)
    for item in range(tl.program_id(0), end, tl.num_programs(0)):
        slot = first_slot + tl.where(item < num_words, item, (item - num_words) // CHUNKS)
        target = (node + tl.where(LEG.is_home, LEG.num_nodes - 1 - slot, 1 + slot)) % LEG.num_nodes
        count = tl.load(counts_ptr + slot)
        list_of = tl.where(PART.by_slot, slot, 0)
        flags = tl.load(leg.flag_targets + target).to(tl.pointer_type(tl.int32)) + slot * FLAGS
        if item < num_words:
            words = tl.load(leg.word_targets + target).to(tl.pointer_type(tl.int32)) + slot % LEG.ring * LEG.slot_words
            source = words_ptr + list_of * (M * per_token)
            put_words(source, words, count, number_ptr, call, per_token, LEG)
            signal(flags, epoch)
        else:
            chunk = PART.first_chunk + (item - num_words) % CHUNKS
            if chunk * LEG.chunk < count:
                rows = tl.load(leg.row_targets + target).to(tl.pointer_type(x_ptr.dtype.element_ty))
                rows = tl.multiple_of(rows, 16) + (slot % LEG.ring).to(tl.int64) * M * D
                push_chunk(x_ptr, tokens_ptr + list_of * M, rows, chunk * LEG.chunk, count, D, PUSH)
                signal(flags + 2 * (1 + chunk), epoch)


def put(leg: Leg, message: Message) -> None:
    """Send a message through a leg."""
    x, tokens, slots, chunks = message.x, message.tokens, message.slots, message.chunks
    put_kernel[(1 if triton.knobs.runtime.interpret else BLOCKS,)](
        x, tokens, message.words, message.counts, message.number, leg.tensors, message.call, leg.node, slots.start,
        len(slots), message.words.shape[-1], x.shape[1],
        PART=Part(tokens.dim() == 2, chunks.start, chunks.stop, message.has_words), LEG=leg.shape,
        PUSH=push_constants(x.dtype, x.shape[1], 0), num_warps=NUM_WARPS,
    )  # fmt: skip
