"""Experts that travel to a layer's cache before its step: kernels on a stream, while the layers before compute.

``plan_kernel`` gives predicted experts that have no slot the slots of those used longest ago. ``travel_kernel``
reads them from host memory, piece by piece: its blocks claim one after the other until all are there or the layer's own
step begins. The planner of that step then closes a gate, waits for the pieces that were claimed, and takes over: what
came whole is there, what has not begun gives its slot back to the expert that had it, and of an expert that is half
there and needed the step fetches the rest. One that is half there and not needed is dropped. So a miss never waits for
a guess, and a guess costs a miss at most the pieces in flight.

A slot in the plan belongs to no expert until the step, so no kernel reads it; and ``plan_kernel`` has ended before the
step begins. The gate is one word: how many blocks travel, and ``STOP`` more once the step has begun. A predictor that
is mostly wrong rests: where the steps needed less than a quarter of what travelled, some steps go without a plan.

What bounds it: the link to the host, while the layers before leave it idle.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from .tables import (
    AHEAD_WORDS,
    BEGUN,
    FIRST,
    GATE,
    LAST,
    NEEDED,
    NEVER,
    NEXT,
    PLANNED,
    THERE1,
    THERE2,
    HostExperts,
    cheapest_place,
    load_acquired,
    tables_of,
)

STOP = tl.constexpr(1 << 16)
MOST_AHEAD = 4  # experts of a plan; more have no time to come
TRAVEL_BLOCKS, TRAVEL_WARPS = 32, 4
ENOUGH = tl.constexpr(32)  # experts that travelled, before their use is judged
PIECE = tl.constexpr(AHEAD_WORDS)


@triton.jit
def rests(header_ptr):
    """Whether the predictor goes without a plan; counts that."""
    begun, needed = tl.load(header_ptr + BEGUN), tl.load(header_ptr + NEEDED)
    is_wrong = (begun >= ENOUGH) & (4 * needed < begun)
    tl.debug_barrier()  # all warps have read it
    if is_wrong:
        tl.store(header_ptr + BEGUN, begun - 1)
    return is_wrong


@triton.jit
def count_use(header_ptr, begun, needed):
    """Experts that are judged, and those of them that were needed; older ones count less."""
    begun += tl.load(header_ptr + BEGUN)
    needed += tl.load(header_ptr + NEEDED)
    HALVED: tl.constexpr = 2 * ENOUGH
    tl.store(header_ptr + BEGUN, tl.where(begun > HALVED, begun // 2, begun))
    tl.store(header_ptr + NEEDED, tl.where(begun > HALVED, needed // 2, needed))


@triton.jit
def reserve(copy, expert, place, owner, tables):
    """Take a slot from the expert that has it, if any, for one that is to travel."""
    if owner >= 0:
        tl.store(tables.slots + owner, -1)
        tl.store(tables.arriving + owner, -1)
    tl.store(tables.owners + place, -1)
    tl.store(tables.ahead_experts + copy, expert)
    tl.store(tables.ahead_slots + copy, place)
    tl.store(tables.ahead_owners + copy, owner)


@triton.jit(do_not_specialize=["T", "E", "S"])
def plan_kernel(
    ids_ptr, cache, T, E, S, K: tl.constexpr, J_BLOCK: tl.constexpr, MOST: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """One block. ``ids_ptr``: ``(T, K)`` int32 predicted experts, the likeliest of each token first."""
    tables = tables_of(cache.state, E, S)
    header_ptr = tables.header
    if rests(header_ptr):
        return
    if tl.load(header_ptr + PLANNED) > 0:
        return  # no step has come since the last plan
    js, places = tl.arange(0, J_BLOCK), tl.arange(0, CACHE.slots)
    ids = tl.load(ids_ptr + js % T * K + js // T, mask=js < T * K, other=-1).to(tl.int32)
    held = (ids >= tl.load(header_ptr + FIRST)) & (ids < tl.load(header_ptr + LAST))
    missing = held & (tl.load(tables.slots + ids, mask=held, other=0) < 0)
    owners = tl.load(tables.owners + places, mask=places < S, other=-1)
    is_kept = tl.max((held[None, :] & (owners[:, None] == ids[None, :])).to(tl.int32), axis=1) > 0
    last_used = tl.load(tables.last_used + owners, mask=owners >= 0, other=-1)
    last_used = tl.where(is_kept | (places >= S), NEVER, last_used)
    tl.debug_barrier()
    count = 0
    for _ in range(MOST):
        first = tl.min(tl.where(missing, js, NEVER), axis=0)
        place = tl.argmin(last_used, axis=0)
        if (first < NEVER) & (tl.min(last_used, axis=0) < NEVER):
            expert = tl.sum(tl.where(js == first, ids, 0), axis=0)
            reserve(count, expert, place, tl.sum(tl.where(places == place, owners, 0), axis=0), tables)
            missing = missing & (ids != expert)
            last_used = tl.where(places == place, NEVER, last_used)
            count += 1
    tl.store(header_ptr + NEXT, 0)
    tl.store(header_ptr + PLANNED, count)


@triton.jit
def copy_words(piece, source_ptr, target_ptr, expert, place, WORDS: tl.constexpr):
    """Piece ``piece`` of an expert's words, if they have so many."""
    if (piece >= 0) & (piece < tl.cdiv(WORDS, PIECE)):
        at = piece * PIECE + tl.arange(0, PIECE)
        source_ptr += expert.to(tl.int64) * WORDS
        words = tl.load(source_ptr + at, mask=at < WORDS, other=0, eviction_policy="evict_first")
        tl.store(target_ptr + place.to(tl.int64) * WORDS + at, words, mask=at < WORDS)


@triton.jit
def copy_piece(piece, expert, place, cache, CACHE: tl.constexpr):
    """Piece ``piece`` of an expert: those of w1 come first, then w2 and the scales."""
    copy_words(piece, cache.stored[0], cache.slots[0], expert, place, CACHE.words1)
    piece -= tl.cdiv(CACHE.words1, PIECE)
    copy_words(piece, cache.stored[1], cache.slots[1], expert, place, CACHE.words2)
    if CACHE.scales1 > 0:
        piece -= tl.cdiv(CACHE.words2, PIECE)
        copy_words(piece, cache.stored_scales[0], cache.slot_scales[0], expert, place, CACHE.scales1)
        piece -= tl.cdiv(CACHE.scales1, PIECE)
        copy_words(piece, cache.stored_scales[1], cache.slot_scales[1], expert, place, CACHE.scales2)


@triton.jit(do_not_specialize=["E", "S"])
def travel_kernel(cache, E, S, CACHE: tl.constexpr):
    """Any number of blocks, which claim pieces of the planned experts until all are claimed or the step begins."""
    tables = tables_of(cache.state, E, S)
    header_ptr = tables.header
    is_open = tl.atomic_add(header_ptr + GATE, 1, sem="acq_rel", scope="gpu") < STOP
    total = load_acquired(header_ptr + PLANNED, CACHE.interpret) * CACHE.ahead
    first_held = tl.load(header_ptr + FIRST)
    while is_open & (total > 0):
        piece = tl.atomic_add(header_ptr + NEXT, 1, sem="relaxed", scope="gpu")
        is_open = piece < total
        if is_open:
            copy = piece // CACHE.ahead
            expert, place = tl.load(tables.ahead_experts + copy), tl.load(tables.ahead_slots + copy)
            copy_piece(piece % CACHE.ahead, expert - first_held, place, cache, CACHE)
            # Not a load: each warp would have its own answer, and those that find the gate open copy a piece alone.
            is_open = tl.atomic_add(header_ptr + GATE, 0, sem="relaxed", scope="gpu") < STOP
    tl.debug_barrier()
    tl.atomic_add(header_ptr + GATE, -1, sem="acq_rel", scope="gpu")


@triton.jit
def give(place, expert, tables):
    """Let an expert that is all there have its slot; -1: leave the slot empty."""
    tl.store(tables.owners + place, expert)
    if expert >= 0:
        tl.store(tables.slots + expert, place)
        tl.atomic_xchg(tables.arriving + expert, place, sem="release", scope="gpu")


@triton.jit
def take_over(now, tables, totals, CACHE: tl.constexpr):
    """Stop what travels before the planner of step ``now`` plans; afterwards no slot is planned.

    Returns the expert that is half there and needed, or -1, and how many such there are, 0 or 1: it owns its slot, is
    the first copy, and the header has its pieces; and how many slots changed.
    """
    header_ptr = tables.header
    travelling = tl.atomic_add(header_ptr + GATE, STOP, sem="acq_rel", scope="gpu")
    while travelling % STOP > 0:
        travelling = load_acquired(header_ptr + GATE, CACHE.interpret)
    count = load_acquired(header_ptr + PLANNED, CACHE.interpret)
    taken, num_taken, there1, there2 = -1, 0, 0, 0
    if count > 0:
        pieces = tl.minimum(load_acquired(header_ptr + NEXT, CACHE.interpret), count * CACHE.ahead)
        begun, needed, came = 0 * count, 0 * count, 0 * count
        for copy in range(count):
            expert, place = tl.load(tables.ahead_experts + copy), tl.load(tables.ahead_slots + copy)
            own = tl.minimum(pieces - copy * CACHE.ahead, CACHE.ahead)
            is_needed = tl.load(tables.last_used + expert) == now
            if own <= 0:
                give(place, tl.load(tables.ahead_owners + copy), tables)
            else:
                begun += 1
                needed += is_needed.to(tl.int32)
                if own == CACHE.ahead:
                    came += own
                    give(place, expert, tables)
                elif is_needed:
                    tl.store(tables.owners + place, expert)
                    tl.store(tables.copy_experts, expert)
                    tl.store(tables.copy_slots, place)
                    taken, num_taken = expert, 1
                    PIECES1: tl.constexpr = triton.cdiv(CACHE.words1, PIECE)
                    there1 = tl.minimum(own, PIECES1) * PIECE // CACHE.piece
                    there2 = tl.maximum(own - PIECES1, 0) * PIECE // CACHE.piece
                else:
                    came += own
        tl.atomic_add(totals.begun, begun.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals.useful, needed.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals.words, came.to(tl.int64) * PIECE, sem="relaxed")
        count_use(header_ptr, begun, needed)
        tl.debug_barrier()  # all warps have read it
        tl.store(header_ptr + PLANNED, 0)
    tl.store(header_ptr + THERE1, there1)
    tl.store(header_ptr + THERE2, there2)
    return taken, num_taken, count


def plan(ids: Tensor, slots: Sequence[Tensor], host: HostExperts) -> None:
    """Launch ``plan_kernel``; arguments as those of the twins."""
    (num_tokens, top_k), tables = ids.shape, host.tables
    plan_kernel[(1,)](
        ids, host.pointers(*slots), num_tokens, tables.num_experts, tables.num_slots, K=top_k,
        J_BLOCK=power_of_2(num_tokens * top_k), MOST=MOST_AHEAD, CACHE=host.constants(1, TRAVEL_WARPS),
    )  # fmt: skip


def travel(slots: Sequence[Tensor], host: HostExperts) -> None:
    sizes, constants = (host.tables.num_experts, host.tables.num_slots), host.constants(1, TRAVEL_WARPS)
    travel_kernel[(TRAVEL_BLOCKS,)](host.pointers(*slots), *sizes, CACHE=constants, num_warps=TRAVEL_WARPS)


def plan_torch(ids: Tensor, host: HostExperts) -> None:
    """The twin of ``plan_kernel``.

    Example (E = 6, S = 3; slots hold experts 3, 0 and 5, used in steps 1, 3 and 2): ids ``[[5, 2, 4]]`` keep slot 2,
    and expert 2 is to come to slot 0, expert 4 to slot 1: owners ``[-1, -1, 5]``, ahead ``[2, 4], [0, 1], [3, 0]``.
    """
    tables, header = host.tables, host.tables.header
    begun, needed = header[BEGUN.value : NEEDED.value + 1].tolist()
    if begun >= ENOUGH.value and 4 * needed < begun:
        header[BEGUN.value] -= 1
        return
    if header[PLANNED.value] > 0:
        return
    first, end = tables.served.tolist()
    predicted = [expert for expert in dict.fromkeys(ids.t().flatten().tolist()) if first <= expert < end]
    missing = [expert for expert in predicted if tables.slots[expert] < 0]
    num_free = sum(owner not in predicted for owner in tables.owners.tolist())
    planned = missing[: min(MOST_AHEAD, num_free)]
    for copy, expert in enumerate(planned):
        place = cheapest_place(host, NEVER.value, predicted)
        owner = int(tables.owners[place])
        if owner >= 0:
            tables.slots[owner] = tables.arriving[owner] = -1
        tables.ahead[:, copy] = torch.tensor([expert, place, owner])
        tables.owners[place] = expert  # so that the next one finds another place
    tables.owners[tables.ahead[1, : len(planned)].long()] = -1
    header[PLANNED.value], header[NEXT.value] = len(planned), 0


def travel_torch(slots: Sequence[Tensor], host: HostExperts) -> None:
    """The twin of ``travel_kernel`` where the step begins when all are there."""
    tables = host.tables
    first, planned = int(tables.served[0]), int(tables.header[PLANNED.value])
    for expert, place in tables.ahead[:2, :planned].t().tolist():
        for part, stored in zip(slots, host.parts, strict=True):
            part[place] = stored[expert - first]
    tables.header[NEXT.value] = planned * host.pieces


def take_over_torch(host: HostExperts, now: int) -> tuple[int, int]:
    """The twin of ``take_over``, also for tables that are on a GPU.

    Example (after ``plan_torch``'s, experts of 10 pieces, step 4 needs 5, 2 and 1): 12 pieces have come. Expert 2 is
    there, in slot 0. Of expert 4 two pieces are, and it is dropped: slot 1 is empty.

    Args:
        now: Number of the step; ``NEVER``: tokens stream, and none needs what travelled.
    """
    tables, header = host.tables, host.tables.header
    count = int(header[PLANNED.value])
    if not count:
        return -1, 0
    pieces, taken, begun, needed, came = min(int(header[NEXT.value]), count * host.pieces), -1, 0, 0, 0
    for copy, (expert, place, former) in enumerate(tables.ahead[:, :count].t().tolist()):
        own, is_needed = min(pieces - copy * host.pieces, host.pieces), bool(tables.last_used[expert] == now)
        begun, needed = begun + (own > 0), needed + (own > 0 and is_needed)
        if own <= 0 or own == host.pieces:
            owner = former if own <= 0 else expert
            tables.owners[place] = owner
            if owner >= 0:
                tables.slots[owner] = tables.arriving[owner] = place
        if own == host.pieces or (own > 0 and not is_needed):
            came += own
        if 0 < own < host.pieces and is_needed:
            tables.owners[place] = taken = expert
    tables.totals[4:7] += torch.tensor([begun, needed, came * AHEAD_WORDS], device=tables.totals.device)
    header[PLANNED.value] = 0
    counts = header[BEGUN.value : NEEDED.value + 1]
    counts += torch.tensor([begun, needed], dtype=counts.dtype, device=counts.device)
    if counts[0] > 2 * ENOUGH.value:
        counts //= 2
    return taken, count
