"""Which experts of a decode step are computed in which wave, where its cache has fewer slots than the step may need.

A wave computes at most S distinct experts, as many as there are slots, for all tokens of the step. Those that are
cached, or on their way since before the step, come first, so that none gives its slot away before it was computed, and
each missing one is fetched once. How many waves a step has follows from its shape, so that it stays one CUDA graph;
those behind the last expert find nothing to do.

Every wave leaves the partial sums of its routed rows where a step without waves does, and the last one adds up all of
them in the same order: results are equal bit for bit. What bounds it: its launch.

Where the host's cores compute missing experts (``experts.host``), this kernel leaves them theirs before the first wave:
by the number that the whole step misses, and those that were worth least before it. They are in no wave, so the host
works beside all of them, and the last one takes its answer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from ..runtime.case import KernelCase
from .cache import KEPT, raise_scores
from .host import ask_host, count_hosted, take_least, tell_mail, worth_least
from .mailbox import EXPERTS as LISTED
from .mailbox import WORDS, mail_pointers
from .tables import (
    CACHE_POINTERS,
    CLOCK,
    FIRST,
    HOSTED,
    LAST,
    LRU,
    PLANNED,
    HostExperts,
    Policy,
    cache_constants,
    header_of,
    worths,
)

ALIGNMENT = 4  # int32 of 16 bytes: kernels are compiled for ids that start at a multiple of them
NUM_WARPS = 4


def count_waves(num_rows: int, num_held: int, num_slots: int) -> int:
    """Waves of a step of so many routed rows on a rank of so many experts.

    Example: 5 tokens with K = 8 need at most 40 of 128 experts, so 12 slots serve them in 4 waves, and 40 in one.
    """
    return max(1, triton.cdiv(min(num_rows, num_held), num_slots))


class Request(NamedTuple):
    """What the host is told of a step."""

    tokens: Tensor  # (T, D)
    weights: Tensor  # (T, K) float32


@triton.jit
def is_served(experts, state_ptr, E, S):
    """Whether this rank serves each of ``experts``, any shape, cached or not."""
    header_ptr = header_of(state_ptr, E, S)
    return (experts >= tl.load(header_ptr + FIRST)) & (experts < tl.load(header_ptr + LAST))


@triton.jit
def leave_waves_to_host(missing, T, cache, E, S, CACHE: tl.constexpr):
    """``(EXPERTS,)`` int32, 1 for those of ``missing`` that the host computes; lists them in the mailbox.

    No wave needs them, so it is said here that they were used.
    """
    state_ptr, totals_ptr = cache[0], cache[2]
    header_ptr, experts = header_of(state_ptr, E, S), tl.arange(0, CACHE.experts)
    used_ptrs, clock = state_ptr + 2 * E + experts, tl.load(header_ptr + CLOCK)
    before = tl.load(used_ptrs, mask=experts < E, other=0)
    worth = worths(tl.where(experts < E, experts, -1), before, cache[1], CACHE.policy)
    tl.debug_barrier()
    left = missing > 0
    num_hosted = count_hosted(left, tl.sum(missing, axis=0), T, cache, E, CACHE)
    for index in range(num_hosted):
        left, expert = take_least(left, worth)
        tl.store(cache[CACHE.mail + WORDS] + LISTED + index, expert)
    hosted = (missing > 0) & (left == 0)
    tl.store(used_ptrs, clock, mask=hosted)
    tl.store(header_ptr + HOSTED, num_hosted)
    tl.atomic_add(totals_ptr, num_hosted.to(tl.int64), sem="relaxed")
    tl.atomic_add(totals_ptr + 7, num_hosted.to(tl.int64), sem="relaxed")
    tl.debug_barrier()
    return hosted.to(tl.int32)


@triton.jit(do_not_specialize=["J", "E", "S", "R"])
def waves_kernel(
    ids_ptr, state_ptr, waves_ptr, request, cache, J, E, S, R,
    WAVES: tl.constexpr, J_BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """One block; see ``split_waves``. Behind the waves each expert has a word: whether it is needed, then its wave."""
    ROWS: tl.constexpr = WAVES if CACHE is None else WAVES + 1
    experts, js, word_ptr = tl.arange(0, EXPERTS), tl.arange(0, J_BLOCK), waves_ptr + ROWS * R
    ids = tl.load(ids_ptr + js, mask=js < J, other=-1).to(tl.int32)
    served = is_served(ids, state_ptr, E, S)
    tl.store(word_ptr + experts, 0, mask=experts < E)
    tl.debug_barrier()
    tl.store(word_ptr + ids, 1, mask=served)
    tl.debug_barrier()
    needed = tl.load(word_ptr + experts, mask=experts < E, other=0)
    tl.debug_barrier()
    there = tl.where(tl.load(state_ptr + experts, mask=experts < E, other=-1) >= 0, needed, 0)
    for copy in range(tl.load(header_of(state_ptr, E, S) + PLANNED)):
        there = tl.where(experts == tl.load(state_ptr + 3 * E + 5 * S + copy), needed, there)
    if CACHE is not None:
        hosted = leave_waves_to_host(needed - there, J // K, cache, E, S, CACHE)
        ask_host(request.tokens, ids_ptr, request.weights, J // K, D, cache, E, S, K, J_BLOCK, CACHE)
        needed -= hosted
    behind = tl.sum(there, axis=0) + tl.cumsum(needed - there, axis=0)
    place = tl.where(there > 0, tl.cumsum(there, axis=0), behind) - 1
    if CACHE is None:
        tl.store(word_ptr + experts, place // S, mask=experts < E)
    else:
        tl.store(word_ptr + experts, tl.where(hosted > 0, -1, place // S), mask=experts < E)
    tl.debug_barrier()
    wave = tl.load(word_ptr + ids, mask=served, other=-1)
    for number in tl.static_range(WAVES):
        tl.store(waves_ptr + number * R + js, tl.where(wave == number, ids, -1), mask=js < J)
    if CACHE is not None:
        tl.store(waves_ptr + WAVES * R + js, tl.where(wave >= 0, ids, -1), mask=js < J)
        if CACHE.policy != LRU:
            raise_scores(ids_ptr, request.weights, ids, served & (wave < 0), cache[1], E, CACHE)


def split_waves(
    ids: Tensor, host: HostExperts, num_waves: int, tokens: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """The ids of each wave of a step; the others are masked there.

    Where the layer's cache asks the host's cores, this asks them for what the step misses, with ``tokens (T, D)`` and
    ``weights (T, K)``. All tensors are contiguous.

    Returns:
        ``(num_waves, R)`` int32, of which the first T * K of a row are routed rows; R is a multiple of 4. Where the
        host is asked, one row more: the ids of all waves.
    """
    tables, num_rows = host.tables, ids.numel()
    stride = triton.cdiv(num_rows, ALIGNMENT) * ALIGNMENT
    size, request, constants = num_waves * stride, (None, None), dict(D=0, K=0, CACHE=None)
    if host.mail is not None:
        assert tokens is not None, "the host computes from them"
        size += stride
        request = Request(tokens, weights), host.mail_pointers
        constants = dict(D=tokens.shape[1], K=ids.shape[1], CACHE=host.mail_constants(NUM_WARPS))
    waves = torch.empty(size + tables.num_experts, dtype=torch.int32, device=ids.device)
    waves_kernel[(1,)](
        ids, tables.state, waves, *request, num_rows, tables.num_experts, tables.num_slots, stride,
        WAVES=num_waves, J_BLOCK=power_of_2(num_rows), EXPERTS=power_of_2(tables.num_experts), num_warps=NUM_WARPS,
        **constants,
    )  # fmt: skip
    return waves[:size].view(-1, stride)


def split_waves_torch(ids: Tensor, host: HostExperts, num_waves: int, weights: Tensor | None = None) -> Tensor:
    """Twin of ``split_waves`` without room behind the routed rows: ``(num_waves, T, K)``, or one more.

    It asks nobody: ``add_hosted_torch`` does.

    Example (S = 2, two waves; expert 4 is cached): ids ``[[3, 1], [4, 3]]`` give ``[[-1, 1], [4, -1]]`` and
    ``[[3, -1], [-1, 3]]``: experts 4, 1 and 3 are numbers 0, 1 and 2. If the host computes one of the two that are
    missing, and 3 was used last, it is 1: ``[[3, -1], [4, 3]]``, nothing, and ``[[3, -1], [4, 3]]`` of both waves.
    """
    tables = host.tables
    first, end = tables.header[FIRST.value : LAST.value + 1].tolist()
    served = ids.masked_fill((ids < first) | (ids >= end), -1)
    planned = tables.ahead[0, : int(tables.header[PLANNED.value])]
    there = (tables.slots >= 0).index_fill(0, planned.long(), True)
    needed = sorted(set(served.flatten().tolist()) - {-1}, key=lambda expert: (not there[expert], expert))
    if host.mail is not None:
        assert weights is not None, "they tell what experts are worth"
        hosted = _leave_waves_to_host_torch(ids, weights, [each for each in needed if not there[each]], host)
        served = served.masked_fill(torch.isin(served, torch.tensor(hosted, dtype=ids.dtype)), -1)
        needed = [expert for expert in needed if expert not in hosted]
    wave = torch.full((tables.num_experts + 1,), -1)
    wave[needed] = torch.arange(len(needed)) // tables.num_slots
    number = torch.arange(num_waves)[:, None, None]
    waves = ids.where(wave[served.long()] == number, -1)
    return waves if host.mail is None else torch.cat([waves, served[None]])


def _leave_waves_to_host_torch(ids: Tensor, weights: Tensor, missing: Sequence[int], host: HostExperts) -> list[int]:
    """The twin of ``leave_waves_to_host``."""
    assert host.mail is not None
    tables, policy = host.tables, host.policy
    worth = tables.last_used if policy == "lru" else tables.scores
    hosted = worth_least(missing, worth, host.mail.share_of(len(ids), len(missing)))
    tables.last_used[hosted] = tables.header[CLOCK.value]
    if policy != "lru":
        chosen = torch.isin(ids, torch.tensor(hosted, dtype=ids.dtype))
        gain = weights if policy == "score" else torch.ones_like(weights)
        tables.scores.mul_(KEPT.value).index_add_(0, ids[chosen].long(), gain[chosen].float())
    tables.header[HOSTED.value] = len(hosted)
    tables.totals[0] += len(hosted)
    tables.totals[7] += len(hosted)
    tell_mail(host.mail, hosted)
    return hosted


def aot_cases() -> list[KernelCase]:
    """Verifying passes of Qwen3, alone and where the host's cores compute some of the experts."""
    return [_case(*sizes) for sizes in ((5, 4), (16, 11))] + [_case(5, 4, policy) for policy in ("lru", "score")]


def _case(num_tokens: int, num_waves: int, policy: Policy | None = None) -> KernelCase:
    """The host computes where there is a policy."""
    constants: dict[str, Any] = dict(WAVES=num_waves, J_BLOCK=power_of_2(8 * num_tokens), EXPERTS=128)
    constants |= dict(D=0, K=0, CACHE=None, request=None, cache=None)
    kinds: dict[str, Any] = dict.fromkeys(("ids_ptr", "state_ptr", "waves_ptr"), "*i32")
    name = f"{num_tokens} tokens, K=8, {num_waves} waves"
    if policy:
        mail = dict(mail=3, mail_tokens=16, timeout_ns=30 * 10**9, asks=True)
        constants |= dict(D=2048, K=8, CACHE=cache_constants(128, 12, (0, 0), 1, NUM_WARPS, policy)._replace(**mail))
        del constants["request"], constants["cache"]
        kinds |= {"request": Request("*bf16", "*fp32"), "cache": (*CACHE_POINTERS[:3], *mail_pointers("bf16"))}
        name += f", host cores, cache {policy}"
    return KernelCase.of(name, waves_kernel, constants, kinds, num_warps=NUM_WARPS)
