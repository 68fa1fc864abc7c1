"""The routing of drafts as the list of what travels to a layer's cache for the step that verifies them.

A draft routes each of its tokens to few of its K experts; the step that verifies it needs the others, too. So behind
the draft's own step of a layer ``plan_draft_kernel`` plans what is missing of all K. The plan travels and is taken over
as others are (``experts.prefetch``), with these differences.

- A round is a run of drafts without another step between them. Whatever its tokens named, drafted with or planned,
  counts as used in the last draft that named it, and no plan of a draft displaces it: where nothing else has a slot,
  the plan is empty. Misses of a later draft take it last by the policy ``lru``, and by what it is worth by the others.
  What the round named and is missing is planned again behind the next draft, after its own list.
- It travels until the next layer's step begins, behind the guess for that layer, and again in place of the guess for
  its own layer in the next pass: ``plan_kernel`` does nothing while a plan is outstanding. So a draft's plan, too,
  travels only while no step of its stream fetches, and where a step's graph ends nothing travels; beside the model's
  head and sampling the link is idle.
- The next step of the layer takes over as ever, be it a draft, a verifying step or a plain one: an expert that the plan
  displaced is back in its slot, unless the other one has begun to travel there; then it is missing. But one that is
  half there and not needed is not dropped: it keeps its slot through that step, unless the step's own misses take it,
  and the plan behind the step, if that is a draft's, goes on where it stopped. Any other plan or step drops it. So a
  step in waves keeps none.
- Whether an expert was worth its way is not known before the step that verifies. It is marked when it came, and counts
  as needed in the first step that needs it while it is there, or as not needed when it has lost its slot or the next
  round begins. Drafts have a count of their own, by which they rest.
- Tokens that stream take over as a step that needs nothing: ``settle_torch``.
- Drafts that are refused leave experts that were named last: they are given away last, and nothing else.

What bounds it: the link to the host, while the layers behind leave it idle.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from ..runtime.case import KernelCase
from .prefetch import (
    MARKS,
    MOST_AHEAD,
    TRAVEL_WARPS,
    count_use,
    count_use_torch,
    drop_half,
    drop_half_torch,
    plan_missing_torch,
    reserve,
    reserve_torch,
    rests,
    rests_torch,
    served,
    take_over_torch,
)
from .tables import (
    BY_DRAFT,
    CACHE_POINTERS,
    CLOCK,
    DRAFT_BEGUN,
    DRAFT_NEEDED,
    DRAFTED,
    FIRST,
    HALF,
    HALF_EXPERT,
    HALF_PLACE,
    LAST,
    NEVER,
    NEXT,
    OF_DRAFTS,
    PLANNED,
    ROUND,
    UNUSED,
    HostExperts,
    cache_constants,
    header_of,
    worths,
)


@triton.jit
def begin_round(now, steps, state_ptr, E, S, CACHE: tl.constexpr):
    """When the round of the draft whose step of so many waves has ended began; what came in the last one is judged.

    Returns the number of its first step, and how many were judged as not needed.
    """
    header_ptr, experts = header_of(state_ptr, E, S), tl.arange(0, CACHE.experts)
    since, over = tl.load(header_ptr + ROUND), tl.load(header_ptr + UNUSED)
    is_new = tl.load(header_ptr + DRAFTED) != now - steps + 1
    tl.debug_barrier()
    if is_new:
        tl.store(header_ptr + MARKS + experts, 0, mask=experts < E)
        tl.store(header_ptr + UNUSED, 0)
        tl.store(header_ptr + ROUND, now - steps + 1)
    tl.store(header_ptr + DRAFTED, now + 1)
    return tl.where(is_new, now - steps + 1, since), tl.where(is_new, over, 0)


@triton.jit(do_not_specialize=["T", "E", "S", "steps"])
def plan_draft_kernel(
    ids_ptr, cache, T, E, S, steps,
    K: tl.constexpr, J_BLOCK: tl.constexpr, MOST: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """One block, behind a draft's step of so many waves. ``ids_ptr``: ``(T, K)`` int32 experts that its tokens need."""
    state_ptr, scores_ptr = cache[0], cache[1]
    header_ptr, now = header_of(state_ptr, E, S), tl.load(header_of(state_ptr, E, S) + CLOCK)
    if rests(header_ptr, OF_DRAFTS):
        return
    js, places, experts = tl.arange(0, J_BLOCK), tl.arange(0, CACHE.slots), tl.arange(0, CACHE.experts)
    since, judged = begin_round(now, steps, state_ptr, E, S, CACHE)
    ids = tl.load(ids_ptr + js % T * K + js // T, mask=js < T * K, other=-1).to(tl.int32)
    held = (ids >= tl.load(header_ptr + FIRST)) & (ids < tl.load(header_ptr + LAST))
    tl.store(state_ptr + 2 * E + ids, now, mask=held)
    tl.debug_barrier()
    # The expert that was half there goes on, if the round named it.
    half, half_expert, half_place = (
        tl.load(header_ptr + HALF), tl.load(header_ptr + HALF_EXPERT), tl.load(header_ptr + HALF_PLACE),
    )  # fmt: skip
    goes_on = (half > 0) & (tl.load(state_ptr + 3 * E + half_place) == half_expert)
    goes_on = goes_on & (tl.load(state_ptr + 2 * E + half_expert) >= since)
    tl.debug_barrier()
    count = 0
    if goes_on:
        reserve(0, half_expert, half_place, -1, state_ptr, E, S)
        tl.store(header_ptr + HALF, 0)
        count += 1
    else:
        judged += drop_half(state_ptr, cache[2], E, S)
    tl.debug_barrier()
    mine = held & (tl.load(state_ptr + ids, mask=held, other=0) < 0) & ((ids != half_expert) | (count == 0))
    named = tl.load(state_ptr + 2 * E + experts, mask=experts < E, other=-1) >= since
    missing = named & (tl.load(state_ptr + experts, mask=experts < E, other=0) < 0)
    missing = missing & ((experts != half_expert) | (count == 0))
    owners = tl.load(state_ptr + 3 * E + places, mask=places < S, other=-1)
    last_used = tl.load(state_ptr + 2 * E + owners, mask=owners >= 0, other=-1)
    is_kept = (last_used >= since) | (places >= S) | ((places == half_place) & (count > 0))
    worth = tl.where(is_kept, NEVER, worths(owners, last_used, scores_ptr, CACHE.policy))
    tl.debug_barrier()
    for _ in range(MOST):
        first = tl.min(tl.where(mine, js, NEVER), axis=0)
        expert = tl.min(tl.where(missing, experts, NEVER), axis=0)
        place = tl.argmin(worth, axis=0)
        if (expert < NEVER) & (tl.min(worth, axis=0) < NEVER) & (count < MOST):
            expert = tl.where(first < NEVER, tl.sum(tl.where(js == first, ids, 0), axis=0), expert)
            reserve(count, expert, place, tl.sum(tl.where(places == place, owners, 0), axis=0), state_ptr, E, S)
            mine, missing = mine & (ids != expert), missing & (experts != expert)
            worth = tl.where(places == place, NEVER, worth)
            count += 1
    count_use(header_ptr, judged, 0, OF_DRAFTS)
    tl.store(header_ptr + BY_DRAFT, 1)
    tl.store(header_ptr + NEXT, tl.where(goes_on, half, 0))
    tl.store(header_ptr + PLANNED, count)


def plan_draft(ids: Tensor, steps: int, slots: Sequence[Tensor], host: HostExperts) -> None:
    """Launch ``plan_draft_kernel``; ``slots``: of w1 and w2 and their scales, other arguments as those of the twin."""
    (num_tokens, top_k), tables = ids.shape, host.tables
    plan_draft_kernel[(1,)](
        ids, host.pointers(*slots), num_tokens, tables.num_experts, tables.num_slots, steps, K=top_k,
        J_BLOCK=power_of_2(num_tokens * top_k), MOST=MOST_AHEAD, CACHE=host.constants(1, TRAVEL_WARPS),
    )  # fmt: skip


def plan_draft_torch(ids: Tensor, steps: int, host: HostExperts) -> None:
    """The twin of ``plan_draft_kernel``.

    Example (E = 6, S = 3; slots hold experts 3, 0 and 5, used in steps 1, 3 and 4): a draft's only token was routed to
    expert 5 in step 4, and ``[[5, 2, 4, 3]]`` would be all its experts. Expert 3 keeps slot 0 now, so 2 is to come to
    slot 1, and for 4 there is no slot: owners ``[3, -1, 5]``, ahead ``[2], [1], [0]``, last used in ``[3, 0, 4, 4, 4,
    4]``. ``steps`` are the waves that its step took.
    """
    tables, header, now = host.tables, host.tables.header, int(host.tables.header[CLOCK.value])
    if rests_torch(header, OF_DRAFTS.value):
        return
    judged = 0
    if header[DRAFTED.value] != now - steps + 1:
        header[ROUND.value], judged = now - steps + 1, int(header[UNUSED.value])
        tables.unused.zero_()
        header[UNUSED.value] = 0
    header[DRAFTED.value] = now + 1
    listed = served(ids, host)
    tables.last_used[listed] = now
    is_named = tables.last_used >= header[ROUND.value]
    half, expert, place = header[HALF.value : HALF_PLACE.value + 1].tolist()
    goes_on = bool(half and tables.owners[place] == expert and is_named[expert])
    if goes_on:
        reserve_torch(0, expert, place, -1, host)
        header[HALF.value] = 0
    else:
        judged, half = judged + drop_half_torch(host), 0
    named = is_named.nonzero().flatten().tolist()
    missing = [each for each in dict.fromkeys([*listed, *named]) if tables.slots[each] < 0]
    missing = [each for each in missing if not goes_on or each != expert]
    plan_missing_torch(missing, named, int(goes_on), host)
    count_use_torch(header, judged, 0, OF_DRAFTS.value)
    header[BY_DRAFT.value], header[NEXT.value] = 1, half


def settle_torch(host: HostExperts) -> int:
    """Take over a plan where no step does, but tokens stream; returns how many experts that came are not judged."""
    header = host.tables.header
    words = header.tolist()
    unused = words[UNUSED.value]
    if words[PLANNED.value] or words[HALF.value]:
        take_over_torch(host, NEVER.value)
        count_use_torch(header, drop_half_torch(host), 0, OF_DRAFTS.value)
        unused = int(header[UNUSED.value])
    if words[DRAFTED.value]:
        header[DRAFTED.value] = 0  # the round is over
    return unused


def count_streamed_torch(host: HostExperts, experts: Tensor) -> None:
    """Count those of ``experts``, any shape, that came by a draft's plan as needed; waits for no device."""
    tables, header = host.tables, host.tables.header
    useful = tables.unused[experts].sum()
    tables.unused[experts] = 0
    tables.totals[5] += useful
    header[UNUSED.value] -= useful
    header[DRAFT_BEGUN.value : DRAFT_NEEDED.value + 1] += useful


def aot_cases() -> list[KernelCase]:
    """Drafts of one token and of four, of Qwen3's experts in bfloat16."""
    num_experts, top_k, element = 128, 8, 2048 * 768 * 2
    cache = cache_constants(num_experts, num_experts // 4, [2 * element, element], 1, TRAVEL_WARPS, "lru", 1)
    constants = dict(K=top_k, MOST=MOST_AHEAD, CACHE=cache._replace(drafts=True))
    kinds = {"cache": CACHE_POINTERS, "ids_ptr": "*i32"}
    return [
        KernelCase.of(f"{count} tokens", plan_draft_kernel, constants | {"J_BLOCK": power_of_2(count * top_k)}, kinds)
        for count in (1, 4)
    ]
