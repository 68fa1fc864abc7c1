"""The expert cache of one layer, kept by the GPU inside the decode step, without a launch or the host.

The first blocks of ``gate_up_kernel`` serve the step's misses. One of them, the planner, finds the experts of the step
that have no slot and gives each one the slot whose expert was used longest ago. All of them then read these experts
from host memory, which the GPU has mapped, into their slots: first w1 of all, then w2, and the scales of quantised
experts with each. The blocks that multiply wait for the w1 of their own expert alone. So experts that are there are
computed meanwhile, and so are those whose w2 still travels. A step whose experts are all there never waits: the planner
works during the products.

No slot is overwritten that a kernel may still read, and none is read half-written. A step's kernels run one after the
other on one stream. A slot whose expert this step needs is never given away. ``arriving`` names a slot once w1 is
there, ``slots`` once w2 is too, each by a store that releases what was written before it. ``down_kernel`` starts to
read w2 before ``gate_up_kernel`` has ended only where the planner said that nothing is missing.

Experts may have begun to travel before their step (``experts.prefetch``); the planner takes over how far they came.

What bounds it: the link to the host (55 GB/s on an H200 with PCIe 5).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.primitives import allow_next, clock_ns, wait_for_previous
from .host import leave_to_host, tell_mail, used_longest_ago
from .prefetch import STOP, take_over, take_over_torch
from .tables import (
    CHANGED,
    CLOCK,
    COUNT,
    DONE,
    FIRST,
    GATE,
    HOSTED,
    LAST,
    NEVER,
    READY,
    THERE1,
    HostExperts,
    cheapest_place,
    load_acquired,
    tables_of,
    totals_of,
)


@triton.jit
def readable_by_tma(value, INTERPRET: tl.constexpr):
    """``value``, after which TMA loads see what was stored before it without TMA."""
    if INTERPRET:
        return value
    else:
        return tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def give_slots(now, before, T, taken, num_taken, mail, tables, E, CACHE: tl.constexpr):
    """Give each missing expert that the host does not compute a slot, empty ones first; of equals the lower number.

    Lists the copies. An expert that was ``taken`` over half there has its slot, and is the first copy, if there is one.
    Returns how many are missing, and how many of these are fetched.
    """
    S = tables.num_slots
    experts, places = tl.arange(0, CACHE.experts), tl.arange(0, CACHE.slots)
    missing = tl.load(tables.last_used + experts, mask=experts < E, other=0) == now
    missing = missing & (tl.load(tables.slots + experts, mask=experts < E, other=0) < 0)
    num_missing = tl.sum(missing.to(tl.int32), axis=0)
    missing = missing & (experts != taken)
    num_fetched = num_missing
    if mail is not None:
        missing, num_fetched = leave_to_host(missing, num_missing, before, T, mail, tables, E, CACHE)
    owners = tl.load(tables.owners + places, mask=places < S, other=-1)
    last_used = tl.load(tables.last_used + owners, mask=owners >= 0, other=-1)
    last_used = tl.where((last_used == now) | (places >= S), NEVER, last_used)
    for copy in range(num_taken, num_fetched):
        expert = tl.min(tl.where(missing, experts, NEVER), axis=0)
        missing = missing & (experts != expert)
        place = tl.argmin(last_used, axis=0)
        last_used = tl.where(places == place, NEVER, last_used)
        owner = tl.load(tables.owners + place)
        if owner >= 0:
            tl.store(tables.slots + owner, -1)
            tl.store(tables.arriving + owner, -1)
        tl.store(tables.owners + place, expert)
        tl.store(tables.copy_experts + copy, expert)
        tl.store(tables.copy_slots + copy, place)
    return num_missing, num_fetched


@triton.jit
def plan_misses(ids_ptr, T, J, cache, E, S, J_BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """Find the experts of the step that have no slot, give them slots, and let the blocks that fetch begin."""
    tables, totals = tables_of(cache.state, E, S), totals_of(cache.totals)
    now = tl.load(tables.header + CLOCK) + 1
    js = tl.arange(0, J_BLOCK)
    ids = tl.load(ids_ptr + js, mask=js < J, other=-1).to(tl.int32)
    held = (ids >= tl.load(tables.header + FIRST)) & (ids < tl.load(tables.header + LAST))
    before = now
    if cache.mail is not None:
        experts = tl.arange(0, CACHE.experts)
        before = tl.load(tables.last_used + experts, mask=experts < E, other=0)
        tl.debug_barrier()
    # Among equal ids only one swap finds another number.
    earlier = tl.atomic_xchg(tables.last_used + ids, now, mask=held, sem="relaxed")
    num_needed = tl.sum((held & (earlier != now)).to(tl.int32), axis=0)
    taken, num_taken, num_ahead = -1, 0, 0
    if CACHE.ahead > 0:
        tl.debug_barrier()
        taken, num_taken, num_ahead = take_over(now, tables, totals, CACHE)
        tl.debug_barrier()
    num_missing = tl.sum((held & (tl.load(tables.slots + ids, mask=held, other=0) < 0)).to(tl.int32), axis=0)
    num_fetched = num_missing
    if num_missing > 0:
        tl.store(totals.since_ns, clock_ns(now.to(tl.int64), CACHE.interpret))
        tl.debug_barrier()
        num_missing, num_fetched = give_slots(now, before, T, taken, num_taken, cache.mail, tables, E, CACHE)
        tl.atomic_add(totals.fetched, num_fetched.to(tl.int64), sem="relaxed")
    tl.atomic_add(totals.needed, num_needed.to(tl.int64), sem="relaxed")
    tl.store(tables.header + CLOCK, now)
    tl.store(tables.header + COUNT, num_missing)
    tl.store(tables.header + CHANGED, num_missing + num_ahead)
    if cache.mail is not None:
        tl.store(tables.header + HOSTED, num_missing - num_fetched)
        tl.atomic_add(totals.hosted, (num_missing - num_fetched).to(tl.int64), sem="relaxed")
    tl.debug_barrier()
    tl.atomic_xchg(tables.header + READY, num_fetched + 1, sem="release", scope="gpu")


@triton.jit
def copy_pieces(first, fetchers, source_ptr, target_ptr, WORDS: tl.constexpr, PIECE: tl.constexpr):
    """One block's pieces of so many words, from its ``first`` one on."""
    for piece in range(first, tl.cdiv(WORDS, PIECE), fetchers):
        at = piece * PIECE + tl.arange(0, PIECE)
        if WORDS % PIECE == 0:
            tl.store(target_ptr + at, tl.load(source_ptr + at, eviction_policy="evict_first"))
        else:
            words = tl.load(source_ptr + at, mask=at < WORDS, other=0, eviction_policy="evict_first")
            tl.store(target_ptr + at, words, mask=at < WORDS)


@triton.jit
def fetch_half(fetcher, fetchers, copy, cache, tables, HALF: tl.constexpr, CACHE: tl.constexpr):
    """This block's pieces of w1 (HALF 0) or w2 (1) of a missing expert, and of the scales that go with it.

    The last block to end says that it is there.
    """
    expert, place = tl.load(tables.copy_experts + copy), tl.load(tables.copy_slots + copy)
    stored, slot = (expert - tl.load(tables.header + FIRST)).to(tl.int64), place.to(tl.int64)
    WORDS: tl.constexpr = CACHE.words2 if HALF else CACHE.words1
    first = fetcher
    if CACHE.ahead > 0:
        if copy == 0:
            first += tl.load(tables.header + THERE1 + HALF)
    copy_pieces(
        first, fetchers, cache.stored[HALF] + stored * WORDS, cache.slots[HALF] + slot * WORDS, WORDS, CACHE.piece
    )  # fmt: skip
    SCALES: tl.constexpr = CACHE.scales2 if HALF else CACHE.scales1
    if SCALES > 0:
        # The other way round: the first blocks may have had a piece more.
        copy_pieces(
            fetchers - 1 - fetcher, fetchers, cache.stored_scales[HALF] + stored * SCALES,
            cache.slot_scales[HALF] + slot * SCALES, SCALES, CACHE.piece,
        )  # fmt: skip
    landed_ptr = tables.landed + HALF * tables.num_slots + copy
    tl.debug_barrier()
    if tl.atomic_add(landed_ptr, 1, sem="acq_rel", scope="gpu") == fetchers - 1:
        tl.store(landed_ptr, 0)
        there_ptr = tables.slots if HALF else tables.arriving
        tl.atomic_xchg(there_ptr + expert, place, sem="release", scope="gpu")


@triton.jit
def fetch_misses(fetcher, fetchers, cache, E, S, DEPENDENT: tl.constexpr, CACHE: tl.constexpr):
    """Bring what is missing, once the planner has said so; the last block to end makes ready for the next step.

    The next kernel may start once the planner has said so, not before: it reads ``CHANGED`` first of all. Where that
    was still of the step before for some warps of a block, these went another way than the others, or read old slots.
    """
    tables = tables_of(cache.state, E, S)
    ready = load_acquired(tables.header + READY, CACHE.interpret)
    while ready == 0:
        ready = load_acquired(tables.header + READY, CACHE.interpret)
    allow_next(DEPENDENT)
    count = ready - 1
    for copy in range(count):
        fetch_half(fetcher, fetchers, copy, cache, tables, 0, CACHE)
    for copy in range(count):
        fetch_half(fetcher, fetchers, copy, cache, tables, 1, CACHE)
    tl.debug_barrier()
    if tl.atomic_add(tables.header + DONE, 1, sem="acq_rel", scope="gpu") == fetchers - 1:
        tl.store(tables.header + DONE, 0)
        tl.store(tables.header + READY, 0)
        if CACHE.ahead > 0:
            tl.atomic_add(tables.header + GATE, -STOP, sem="acq_rel", scope="gpu")
        if count > 0:
            clock = clock_ns(tl.load(tables.header + CLOCK).to(tl.int64) + 1, CACHE.interpret)
            totals = totals_of(cache.totals)
            tl.store(totals.fetching_ns, tl.load(totals.fetching_ns) + clock - tl.load(totals.since_ns))


@triton.jit
def arrived_slot(expert, cache, E, S, CACHE: tl.constexpr):
    """Slot of an expert once its w1 is there; below 0 for one that the host computes, or another rank serves."""
    tables = tables_of(cache.state, E, S)
    known = (expert >= 0) & (expert < E)
    arriving_ptr = tables.arriving + tl.where(known, expert, 0)
    # To acquire empties L1, which the tokens are in. An expert that was there before this launch needs none, nor does
    # one that arrived since: its slot is of no other expert of this step, so L1 has nothing of it, unless its scales
    # share a line with those of another slot.
    if CACHE.lines_shared:
        slot = load_acquired(arriving_ptr, CACHE.interpret)
    else:
        slot = tl.load(arriving_ptr)
    if slot < 0:
        if (expert >= tl.load(tables.header + FIRST)) & (expert < tl.load(tables.header + LAST)):
            if cache.mail is not None:
                while slot == -1:
                    slot = load_acquired(arriving_ptr, CACHE.interpret)
            else:
                while slot < 0:
                    slot = load_acquired(arriving_ptr, CACHE.interpret)
    return tl.where(known, readable_by_tma(slot, CACHE.interpret), -1)


@triton.jit
def bias_row(expert, slot, cache, E, S, CACHE: tl.constexpr):
    """Row of an expert's biases: its slot; of a cache, which keeps them all, its place among those of the rank."""
    if CACHE is None:
        return slot
    else:
        return tl.where(slot >= 0, expert - tl.load(tables_of(cache.state, E, S).header + FIRST), -1)


@triton.jit
def count_missing(cache, E, S, CACHE: tl.constexpr):
    """How many slots of the step the kernel before changes, for one that starts early; nothing waits for it yet."""
    if CACHE is None:
        return 0
    else:
        return tl.load(tables_of(cache.state, E, S).header + CHANGED, volatile=True)


@triton.jit
def wait_for_missing(count, DEPENDENT: tl.constexpr, CACHE: tl.constexpr):
    """Return at once where all experts of the step were there before it; to be called before slots are read."""
    if CACHE is not None:
        if count > 0:
            wait_for_previous(DEPENDENT)
            readable_by_tma(0, CACHE.interpret)


def bring_torch(
    ids: Tensor,
    w1: Tensor,
    w2: Tensor,
    host: HostExperts,
    scales: Sequence[Tensor] = (),
) -> None:
    """The twin of what the first blocks of a decode step do: give the missing experts slots, and copy them there.

    Example (E = 4, S = 2; slot 0 holds expert 3, used in step 1, slot 1 expert 0, used in step 2): ids ``[[3, 2]]`` in
    step 3 keep slot 0 and give slot 1 to expert 2: slots ``[-1, -1, 1, 0]``, owners ``[3, 2]``, copies ``[2], [1]``.

    Args:
        ids: ``(T, K)``; experts that another rank serves need no slot.
        w1: ``(S, ...)`` the slots, as w2 and scales.
    """
    tables = host.tables
    first, end = tables.served.tolist()
    needed = sorted({expert for expert in ids.flatten().tolist() if first <= expert < end})
    now = int(tables.header[CLOCK.value]) + 1
    before = tables.last_used.clone()
    tables.last_used[needed] = now
    taken, num_ahead = take_over_torch(host, now) if host.prefetched else (-1, 0)
    missing = [expert for expert in needed if tables.slots[expert] < 0]
    missing.sort(key=lambda expert: expert != taken)
    hosted: list[int] = []
    if host.mail is not None:
        whole = [expert for expert in missing if expert != taken]
        hosted = used_longest_ago(whole, before, host.mail.share_of(len(ids), len(missing)))
        missing = [expert for expert in missing if expert not in hosted]
    for copy, expert in enumerate(missing):
        place = cheapest_place(host, now) if expert != taken else int((tables.owners == taken).nonzero())
        owner = int(tables.owners[place])
        if owner >= 0:
            tables.slots[owner] = tables.arriving[owner] = -1
        tables.owners[place] = expert
        tables.slots[expert] = tables.arriving[expert] = place
        tables.copies[0, copy], tables.copies[1, copy] = expert, place
        for slots, stored in zip((w1, w2, *scales), host.parts, strict=True):
            slots[place] = stored[expert - first]
    for copy, expert in enumerate(hosted, start=len(missing)):
        tables.copies[0, copy], tables.copies[1, copy] = expert, -1
    num_missing = len(missing) + len(hosted)
    tables.header[CLOCK.value], tables.header[COUNT.value] = now, num_missing
    tables.header[CHANGED.value] = num_missing + num_ahead
    if host.mail is not None:
        tables.header[HOSTED.value] = len(hosted)
        tell_mail(host.mail, hosted)
    tables.totals[:2] += torch.tensor([len(needed), len(missing)])
    tables.totals[7] += len(hosted)
