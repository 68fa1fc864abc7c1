"""Experts on their way to a layer's cache before its step: kernels on a stream beside what the layers before compute.

``plan_kernel`` gives predicted experts that have no slot the slots of those that are worth least. ``travel_kernel``
reads them from host memory, piece by piece: its blocks claim one after the other until all are there or the layer's own
step begins. The planner of that step then closes a gate, waits for the pieces that were claimed, and takes over: what
came whole is there, what has not begun gives its slot back to the expert that had it, and of an expert that is half
there and needed the step fetches the rest. One that is half there and not needed is dropped. So a miss never waits for
a guess, and a guess costs a miss at most the pieces in flight.

A slot in the plan belongs to no expert until the step, so no kernel reads it; and ``plan_kernel`` has ended before the
step begins. The gate is one word: how many blocks travel, and ``STOP`` more once the step has begun. A predictor that
is mostly wrong rests: where the steps needed less than a quarter of what travelled, some steps go without a plan.

What travels for the verification of drafts is ``experts.drafts``'s; its words in ``take_over`` are there only for it.

What bounds it: the link to the host, while the layers before leave it idle.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from ..runtime.case import KernelCase
from .tables import (
    AHEAD_WORDS,
    BEGUN,
    BY_DRAFT,
    CACHE_POINTERS,
    CLOCK,
    FIRST,
    GATE,
    HALF,
    HALF_EXPERT,
    HALF_PLACE,
    HEADER_WORDS,
    LAST,
    NEEDED,
    NEVER,
    NEXT,
    OF_DRAFTS,
    PLANNED,
    SCALE_POINTERS,
    THERE1,
    THERE2,
    UNUSED,
    HostExperts,
    cache_constants,
    cheapest_place,
    header_of,
    load_acquired,
    pieces_of,
    worths,
)

STOP = tl.constexpr(1 << 16)
MOST_AHEAD = 4  # experts of a plan; more have no time to come
TRAVEL_BLOCKS, TRAVEL_WARPS = 32, 4
ENOUGH = tl.constexpr(32)  # experts that travelled, before their use is judged
PIECE = tl.constexpr(AHEAD_WORDS)
MARKS = tl.constexpr(HEADER_WORDS)  # words from the header to ``CacheTables.unused``


@triton.jit
def rests(header_ptr, OF: tl.constexpr):
    """Whether a predictor, whose words are ``OF`` behind those of guesses, goes without a plan; counts that."""
    begun, needed = tl.load(header_ptr + BEGUN + OF), tl.load(header_ptr + NEEDED + OF)
    is_wrong = (begun >= ENOUGH) & (4 * needed < begun)
    if is_wrong:
        tl.store(header_ptr + BEGUN + OF, begun - 1)
    return is_wrong


@triton.jit
def count_use(header_ptr, begun, needed, OF: tl.constexpr):
    """Experts of a predictor that are judged, and those of them that were needed; older ones count less."""
    begun += tl.load(header_ptr + BEGUN + OF)
    needed += tl.load(header_ptr + NEEDED + OF)
    HALVED: tl.constexpr = 2 * ENOUGH
    tl.store(header_ptr + BEGUN + OF, tl.where(begun > HALVED, begun // 2, begun))
    tl.store(header_ptr + NEEDED + OF, tl.where(begun > HALVED, needed // 2, needed))


@triton.jit
def reserve(copy, expert, place, owner, state_ptr, E, S):
    """Take a slot from the expert that has it, if any, for one that is to travel."""
    ahead_ptr = state_ptr + 3 * E + 5 * S
    if owner >= 0:
        tl.store(state_ptr + owner, -1)
        tl.store(state_ptr + E + owner, -1)
    tl.store(state_ptr + 3 * E + place, -1)
    tl.store(ahead_ptr + copy, expert)
    tl.store(ahead_ptr + S + copy, place)
    tl.store(ahead_ptr + 2 * S + copy, owner)


@triton.jit
def drop_half(state_ptr, totals_ptr, E, S):
    """Give up the expert of a draft's plan that was half there behind the last step; how many such there were."""
    header_ptr = header_of(state_ptr, E, S)
    half = tl.load(header_ptr + HALF)
    if half > 0:
        owner_ptr = state_ptr + 3 * E + tl.load(header_ptr + HALF_PLACE)
        if tl.load(owner_ptr) == tl.load(header_ptr + HALF_EXPERT):
            tl.store(owner_ptr, -1)
        tl.atomic_add(totals_ptr + 4, tl.where(half > 0, 1, 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(totals_ptr + 6, half.to(tl.int64) * PIECE, sem="relaxed")
        tl.debug_barrier()
        tl.store(header_ptr + HALF, 0)
    return tl.where(half > 0, 1, 0)


@triton.jit(do_not_specialize=["T", "E", "S"])
def plan_kernel(
    ids_ptr, cache, T, E, S, K: tl.constexpr, J_BLOCK: tl.constexpr, MOST: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """One block. ``ids_ptr``: ``(T, K)`` int32 predicted experts, the likeliest of each token first."""
    state_ptr, scores_ptr = cache[0], cache[1]
    header_ptr = header_of(state_ptr, E, S)
    if rests(header_ptr, 0):
        return
    if tl.load(header_ptr + PLANNED) > 0:
        return  # no step has come since the last plan
    if CACHE.drafts:
        dropped = drop_half(state_ptr, cache[2], E, S)
        count_use(header_ptr, dropped, 0, OF_DRAFTS)
        tl.store(header_ptr + BY_DRAFT, 0)
        tl.debug_barrier()
    js, places = tl.arange(0, J_BLOCK), tl.arange(0, CACHE.slots)
    ids = tl.load(ids_ptr + js % T * K + js // T, mask=js < T * K, other=-1).to(tl.int32)
    held = (ids >= tl.load(header_ptr + FIRST)) & (ids < tl.load(header_ptr + LAST))
    missing = held & (tl.load(state_ptr + ids, mask=held, other=0) < 0)
    owners = tl.load(state_ptr + 3 * E + places, mask=places < S, other=-1)
    is_kept = tl.max((held[None, :] & (owners[:, None] == ids[None, :])).to(tl.int32), axis=1) > 0
    last_used = tl.load(state_ptr + 2 * E + owners, mask=owners >= 0, other=-1)
    worth = tl.where(is_kept | (places >= S), NEVER, worths(owners, last_used, scores_ptr, CACHE.policy))
    tl.debug_barrier()
    count = 0
    for _ in range(MOST):
        first = tl.min(tl.where(missing, js, NEVER), axis=0)
        place = tl.argmin(worth, axis=0)
        if (first < NEVER) & (tl.min(worth, axis=0) < NEVER):
            expert = tl.sum(tl.where(js == first, ids, 0), axis=0)
            reserve(count, expert, place, tl.sum(tl.where(places == place, owners, 0), axis=0), state_ptr, E, S)
            missing = missing & (ids != expert)
            worth = tl.where(places == place, NEVER, worth)
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
    copy_words(piece, cache[3], cache[5], expert, place, CACHE.words1)
    piece -= tl.cdiv(CACHE.words1, PIECE)
    copy_words(piece, cache[4], cache[6], expert, place, CACHE.words2)
    if CACHE.scales1 > 0:
        piece -= tl.cdiv(CACHE.words2, PIECE)
        copy_words(piece, cache[7], cache[9], expert, place, CACHE.scales1)
        piece -= tl.cdiv(CACHE.scales1, PIECE)
        copy_words(piece, cache[8], cache[10], expert, place, CACHE.scales2)


@triton.jit
def is_to_come(until_ptr, now, INTERPRET: tl.constexpr):
    """Whether the layer with that header is still before its step of the pass whose step ``now`` another one has ended.

    Layers of a model take equally many steps, so this one's last is below ``now`` until it has ended.
    """
    is_open = load_acquired(until_ptr + GATE, INTERPRET) < STOP
    return is_open & (load_acquired(until_ptr + CLOCK, INTERPRET) < now)


@triton.jit(do_not_specialize=["E", "S"])
def travel_kernel(cache, until_ptr, E, S, CACHE: tl.constexpr):
    """Any number of blocks, which claim pieces of the planned experts until all are claimed or the step begins.

    ``until_ptr``: header of the next layer, whose step in this pass ends it as well; ``None``: no other one does.
    """
    state_ptr = cache[0]
    header_ptr, ahead_ptr = header_of(state_ptr, E, S), state_ptr + 3 * E + 5 * S
    is_open = tl.atomic_add(header_ptr + GATE, 1, sem="acq_rel", scope="gpu") < STOP
    total = load_acquired(header_ptr + PLANNED, CACHE.interpret) * CACHE.ahead
    first_held, now = tl.load(header_ptr + FIRST), 0
    if until_ptr is not None:
        now = load_acquired(header_ptr + CLOCK, CACHE.interpret)
        is_open = is_open & is_to_come(until_ptr, now, CACHE.interpret)
    while is_open & (total > 0):
        piece = tl.atomic_add(header_ptr + NEXT, 1, sem="relaxed", scope="gpu")
        is_open = piece < total
        if is_open:
            copy = piece // CACHE.ahead
            expert, place = tl.load(ahead_ptr + copy), tl.load(ahead_ptr + S + copy)
            copy_piece(piece % CACHE.ahead, expert - first_held, place, cache, CACHE)
            is_open = load_acquired(header_ptr + GATE, CACHE.interpret) < STOP
            if until_ptr is not None:
                is_open = is_open & is_to_come(until_ptr, now, CACHE.interpret)
    tl.debug_barrier()
    tl.atomic_add(header_ptr + GATE, -1, sem="acq_rel", scope="gpu")


@triton.jit
def give(place, expert, state_ptr, E):
    """A slot that holds all of an expert becomes its slot; -1: becomes empty."""
    tl.store(state_ptr + 3 * E + place, expert)
    if expert >= 0:
        tl.store(state_ptr + expert, place)
        tl.atomic_xchg(state_ptr + E + expert, place, sem="release", scope="gpu")


@triton.jit
def judge(now, state_ptr, E, S, CACHE: tl.constexpr):
    """Of experts that came by a draft's plan: how many are judged by step ``now``, and how many of these it needs."""
    header_ptr, experts = header_of(state_ptr, E, S), tl.arange(0, CACHE.experts)
    unused = tl.load(header_ptr + MARKS + experts, mask=experts < E, other=0) > 0
    slots = tl.load(state_ptr + experts, mask=experts < E, other=-1)
    needed = tl.load(state_ptr + 2 * E + experts, mask=experts < E, other=-1) == now
    over = unused & (needed | (slots < 0))
    tl.store(header_ptr + MARKS + experts, 0, mask=over)
    return tl.sum(over.to(tl.int32), axis=0), tl.sum((over & (slots >= 0)).to(tl.int32), axis=0)


@triton.jit
def take_over(now, state_ptr, totals_ptr, E, S, CACHE: tl.constexpr):
    """What the planner of step ``now`` does first; afterwards nothing travels, and no slot is planned.

    Returns the expert that is half there and needed, or -1, and how many such there are, 0 or 1: it owns its slot, is
    the first copy, and the header has its pieces; and how many slots changed.
    """
    header_ptr, ahead_ptr = header_of(state_ptr, E, S), state_ptr + 3 * E + 5 * S
    travelling = tl.atomic_add(header_ptr + GATE, STOP, sem="acq_rel", scope="gpu")
    while travelling % STOP > 0:
        travelling = load_acquired(header_ptr + GATE, CACHE.interpret)
    count = load_acquired(header_ptr + PLANNED, CACHE.interpret)
    taken, num_taken, there1, there2 = -1, 0, 0, 0
    num_unused, judged, useful, by_draft = 0, 0, 0, 0
    if CACHE.drafts:
        num_unused, by_draft = tl.load(header_ptr + UNUSED), tl.load(header_ptr + BY_DRAFT)
        judged += drop_half(state_ptr, totals_ptr, E, S)
        if num_unused > 0:
            over, used = judge(now, state_ptr, E, S, CACHE)
            num_unused, judged, useful = num_unused - over, judged + over, useful + used
            tl.atomic_add(totals_ptr + 5, used.to(tl.int64), sem="relaxed")
        tl.debug_barrier()
    if count > 0:
        pieces = tl.minimum(load_acquired(header_ptr + NEXT, CACHE.interpret), count * CACHE.ahead)
        begun, needed, came, unjudged = 0 * count, 0 * count, 0 * count, 0 * count
        for copy in range(count):
            expert, place = tl.load(ahead_ptr + copy), tl.load(ahead_ptr + S + copy)
            own = tl.minimum(pieces - copy * CACHE.ahead, CACHE.ahead)
            is_needed = tl.load(state_ptr + 2 * E + expert) == now
            if own <= 0:
                give(place, tl.load(ahead_ptr + 2 * S + copy), state_ptr, E)
            else:
                begun += 1
                needed += is_needed.to(tl.int32)
                if own == CACHE.ahead:
                    came += own
                    give(place, expert, state_ptr, E)
                    if CACHE.drafts:
                        if by_draft > is_needed.to(tl.int32):
                            tl.store(header_ptr + MARKS + expert, 1)
                            unjudged += 1
                elif is_needed:
                    tl.store(state_ptr + 3 * E + place, expert)
                    tl.store(state_ptr + 3 * E + S, expert)
                    tl.store(state_ptr + 3 * E + 2 * S, place)
                    taken, num_taken = expert, 1
                    PIECES1: tl.constexpr = triton.cdiv(CACHE.words1, PIECE)
                    there1 = tl.minimum(own, PIECES1) * PIECE // CACHE.piece
                    there2 = tl.maximum(own - PIECES1, 0) * PIECE // CACHE.piece
                elif by_draft > 0:
                    begun -= 1  # it is counted once it has come, or is given up
                    tl.store(state_ptr + 3 * E + place, expert)
                    tl.store(header_ptr + HALF_EXPERT, expert)
                    tl.store(header_ptr + HALF_PLACE, place)
                    tl.store(header_ptr + HALF, own)
                else:
                    came += own
        tl.atomic_add(totals_ptr + 4, begun.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals_ptr + 5, needed.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals_ptr + 6, came.to(tl.int64) * PIECE, sem="relaxed")
        if by_draft > 0:
            num_unused, judged, useful = num_unused + unjudged, judged + begun - unjudged, useful + needed
        else:
            count_use(header_ptr, begun, needed, 0)
        tl.store(header_ptr + PLANNED, 0)
    if CACHE.drafts:
        tl.store(header_ptr + UNUSED, num_unused)
        count_use(header_ptr, judged, useful, OF_DRAFTS)
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


def travel(slots: Sequence[Tensor], host: HostExperts, until: Tensor | None = None) -> None:
    """Launch ``travel_kernel``; ``until``: ``CacheTables.header`` of the next layer; others as those of the twin."""
    sizes, constants = (host.tables.num_experts, host.tables.num_slots), host.constants(1, TRAVEL_WARPS)
    travel_kernel[(TRAVEL_BLOCKS,)](host.pointers(*slots), until, *sizes, CACHE=constants, num_warps=TRAVEL_WARPS)


def rests_torch(header: Tensor, words: int) -> bool:
    """The twin of ``rests``."""
    begun, needed = header[BEGUN.value + words : NEEDED.value + words + 1].tolist()
    is_wrong = begun >= ENOUGH.value and 4 * needed < begun
    header[BEGUN.value + words] = begun - is_wrong
    return is_wrong


def count_use_torch(header: Tensor, begun: int, needed: int, words: int) -> None:
    """The twin of ``count_use``."""
    counts = header[BEGUN.value + words : NEEDED.value + words + 1]
    counts += torch.tensor([begun, needed], dtype=counts.dtype, device=counts.device)
    if counts[0] > 2 * ENOUGH.value:
        counts //= 2


def drop_half_torch(host: HostExperts) -> int:
    """The twin of ``drop_half``."""
    tables, header = host.tables, host.tables.header
    half, expert, place = header[HALF.value : HALF_PLACE.value + 1].tolist()
    if half and tables.owners[place] == expert:
        tables.owners[place] = -1
    tables.totals[4] += half > 0
    tables.totals[6] += half * AHEAD_WORDS
    header[HALF.value] = 0
    return int(half > 0)


def reserve_torch(copy: int, expert: int, place: int, owner: int, host: HostExperts) -> None:
    """The twin of ``reserve``, but that the slot's owner is left to the caller."""
    tables = host.tables
    if owner >= 0:
        tables.slots[owner] = tables.arriving[owner] = -1
    tables.ahead[:, copy] = torch.tensor([expert, place, owner])


def plan_torch(ids: Tensor, host: HostExperts) -> None:
    """The twin of ``plan_kernel``.

    Example (E = 6, S = 3; slots hold experts 3, 0 and 5, used in steps 1, 3 and 2): ids ``[[5, 2, 4]]`` keep slot 2,
    and expert 2 is to come to slot 0, expert 4 to slot 1: owners ``[-1, -1, 5]``, ahead ``[2, 4], [0, 1], [3, 0]``.
    """
    tables, header = host.tables, host.tables.header
    if rests_torch(header, 0) or header[PLANNED.value] > 0:
        return
    count_use_torch(header, drop_half_torch(host), 0, OF_DRAFTS.value)
    header[BY_DRAFT.value] = 0
    predicted = served(ids, host)
    missing = [expert for expert in predicted if tables.slots[expert] < 0]
    plan_missing_torch(missing, predicted, 0, host)
    header[NEXT.value] = 0


def served(ids: Tensor, host: HostExperts) -> list[int]:
    """Those of experts ``(T, K)`` that this rank serves, the first of each token first, each of them once."""
    first, end = host.tables.header[FIRST.value : LAST.value + 1].tolist()
    return [expert for expert in dict.fromkeys(ids.t().flatten().tolist()) if first <= expert < end]


def plan_missing_torch(missing: Sequence[int], kept: Sequence[int], count: int, host: HostExperts) -> None:
    """Plan as many experts as find a slot of none that is ``kept``, behind ``count`` that are planned."""
    tables = host.tables
    num_free = sum(owner not in kept for owner in tables.owners.tolist())
    planned = missing[: min(MOST_AHEAD - count, num_free)]
    for copy, expert in enumerate(planned, start=count):
        place = cheapest_place(host, NEVER.value, [*kept, *planned])
        reserve_torch(copy, expert, place, int(tables.owners[place]), host)
        tables.owners[place] = expert  # so that the next one finds another place
    count += len(planned)
    tables.owners[tables.ahead[1, :count].long()] = -1
    tables.header[PLANNED.value] = count


def travel_torch(slots: Sequence[Tensor], host: HostExperts) -> None:
    """The twin of ``travel_kernel`` where the step begins when all are there."""
    tables = host.tables
    first, planned = int(tables.header[FIRST.value]), int(tables.header[PLANNED.value])
    for expert, place in tables.ahead[:2, :planned].t().tolist():
        for part, stored in zip(slots, host.parts, strict=True):
            part[place] = stored[expert - first]
    tables.header[NEXT.value] = planned * host.pieces


def judge_torch(host: HostExperts, now: int) -> tuple[int, int]:
    """The twin of ``judge``."""
    tables = host.tables
    over = (tables.unused > 0) & ((tables.last_used == now) | (tables.slots < 0))
    tables.unused[over] = 0
    return int(over.sum()), int((over & (tables.slots >= 0)).sum())


def take_over_torch(host: HostExperts, now: int) -> tuple[int, int]:
    """The twin of ``take_over``, also for tables that are on a GPU.

    Example (after ``plan_torch``'s, experts of 10 pieces, step 4 needs 5, 2 and 1): 12 pieces have come. Expert 2 is
    there, in slot 0. Of expert 4 two pieces are, and it is dropped: slot 1 is empty.
    """
    tables, header = host.tables, host.tables.header
    count, by_draft = int(header[PLANNED.value]), bool(header[BY_DRAFT.value])
    judged, useful = judge_torch(host, now)
    judged += drop_half_torch(host)
    tables.totals[5] += useful
    pieces, taken, begun, needed, came, unjudged = min(int(header[NEXT.value]), count * host.pieces), -1, 0, 0, 0, 0
    for copy, (expert, place, former) in enumerate(tables.ahead[:, :count].t().tolist()):
        own, is_needed = min(pieces - copy * host.pieces, host.pieces), bool(tables.last_used[expert] == now)
        begun, needed = begun + (own > 0), needed + (own > 0 and is_needed)
        if own <= 0 or own == host.pieces:
            owner = former if own <= 0 else expert
            tables.owners[place] = owner
            if owner >= 0:
                tables.slots[owner] = tables.arriving[owner] = place
        if own == host.pieces or (own > 0 and not is_needed and not by_draft):
            came += own
        if own == host.pieces and by_draft and not is_needed:
            tables.unused[expert], unjudged = 1, unjudged + 1
        if 0 < own < host.pieces and is_needed:
            tables.owners[place] = taken = expert
        elif 0 < own < host.pieces and by_draft:
            tables.owners[place], begun = expert, begun - 1
            header[HALF.value : HALF_PLACE.value + 1] = torch.tensor([own, expert, place], dtype=torch.int32)
    tables.totals[4:7] += torch.tensor([begun, needed, came * AHEAD_WORDS], device=tables.totals.device)
    header[PLANNED.value] = 0
    if by_draft:
        judged, useful = judged + begun - unjudged, useful + needed
    else:
        count_use_torch(header, begun, needed, 0)
    header[UNUSED.value] = tables.unused.sum()
    count_use_torch(header, judged, useful, OF_DRAFTS.value)
    return taken, count


def aot_cases() -> list[KernelCase]:
    """Experts of Qwen3 in bfloat16, and in MXFP4 with their scales."""
    num_experts, top_k, element = 128, 8, 2048 * 768 * 2
    cases = []
    for stored, num_bytes in (
        ("bf16", [2 * element, element]),
        ("mxfp4", [element // 2, element // 4, element // 32, element // 64]),
    ):
        sizes = num_experts, num_experts // 4
        constants = cache_constants(*sizes, num_bytes, 1, TRAVEL_WARPS, "lru", pieces_of(num_bytes))
        scales = SCALE_POINTERS if len(num_bytes) > 2 else ()
        kinds = {"cache": CACHE_POINTERS + scales, "ids_ptr": "*i32", "until_ptr": "*i32"}
        for name, values in (("travel", {"until_ptr": None}), ("travel of a draft", {})):
            options = dict(num_warps=TRAVEL_WARPS, expects=frozenset({"wide_loads", "wide_stores"}))
            values = values | {"CACHE": constants}
            cases.append(KernelCase.of(f"{stored}, {name}", travel_kernel, values, kinds, **options))
        for num_tokens, words, kind in ((1, "", {}), (16, "", {}), (1, " beside drafts", {"drafts": True})):
            sizes_of_plan = dict(K=top_k, J_BLOCK=power_of_2(num_tokens * top_k), MOST=MOST_AHEAD)
            values = sizes_of_plan | {"CACHE": constants._replace(**kind)}
            cases.append(KernelCase.of(f"{stored}, plan for {num_tokens} tokens{words}", plan_kernel, values, kinds))
    return cases
