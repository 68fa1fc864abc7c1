"""Missing experts that the host's cores compute: how a decode step asks for them and takes their sum.

A process on the host polls a mailbox in memory that the GPU has mapped. The planner of a step (``experts.cache``)
leaves it some of the missing experts: those used longest ago, as many as a table says, so that link and cores end
together. They get no slot. The planner's block writes tokens, ids and routing weights into the mailbox, releases a
sequence number, and brings its part of the other missing experts. Then it waits, alone on the GPU, for the answer, and
copies the answer to GPU memory: the sum over these experts, each times its routing weight. ``down_kernel`` adds that to
its own sums.

``arriving`` is -2 for such an expert from the plan to the end of the step, when ``down_kernel`` puts it back to -1. So
no block of a step ever sees what the step before left. The sum rounds where the host rounds: a step is not bit for bit
one whose experts all came to the GPU.

What bounds it: the host's memory (16 cores read experts of Qwen3 at 33 GB/s while the link reads at 55).
"""

import time
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.faults import Place
from ..runtime.primitives import MOST_THREADS, PLACE_HOST, any_of, wait_flag
from .mailbox import (
    ANSWERED,
    EXPERTS,
    FAILED,
    LAST_SEQUENCE,
    NUM_EXPERTS,
    NUM_TOKENS,
    OF_LAYER,
    REQUEST,
    SERVED,
    TOP_K,
    Mailbox,
)
from .tables import COUNT, HOSTED, LAYER, NEVER, HostExperts, tables_of

ON_HOST = tl.constexpr(-2)  # ``arriving`` of an expert that the host computes
PATIENCE_NS = 2_000_000  # of polling without a pause
PAUSE_S = 50e-6


@triton.jit
def leave_to_host(missing, num_missing, before, T, mail, tables, E, CACHE: tl.constexpr):
    """Take those that the host computes out of ``missing (CACHE.experts,)``; none after a deadline.

    The host gets those used longest ago, of equals the lower number; ``before (CACHE.experts,)`` says when each was
    used before this step. In ``copies`` they stand behind those that are fetched, without a slot.

    Returns ``missing``, and how many of ``num_missing`` are fetched. ``num_missing`` also counts an expert that is half
    there, which is not in ``missing``.
    """
    experts = tl.arange(0, CACHE.experts)
    num_hosted = tl.full((), 0, tl.int32)
    if CACHE.mail_tokens >= T:
        num_hosted = tl.load(mail.share + T * (E + 1) + num_missing)
        num_hosted = tl.minimum(num_hosted, tl.sum(missing.to(tl.int32), axis=0))
        num_hosted = tl.where(tl.load(mail.fault, volatile=True) == 0, num_hosted, 0)
    for index in range(num_hosted):
        expert = tl.argmin(tl.where(missing, before, NEVER), axis=0)
        missing = missing & (experts != expert)
        place = num_missing - num_hosted + index
        tl.store(tables.copy_experts + place, expert)
        tl.store(tables.copy_slots + place, -1)
        tl.store(mail.words + EXPERTS + index, expert)
        tl.store(tables.arriving + expert, ON_HOST)
    return missing, num_missing - num_hosted


@triton.jit
def release_to_host(ptr, value, INTERPRET: tl.constexpr):
    """Store an int32; the host reads what this block wrote before its last barrier once it sees that."""
    if INTERPRET:
        tl.store(ptr, value)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [ptr, value], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def ask_host(
    x_ptr, ids_ptr, weights_ptr, T, D, cache, E, S, K: tl.constexpr, J_BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    """The planner's block: write the request of this step, if there is one.

    Tokens go in blocks of another size than experts: for equal ones the compiler has one layout, of elements of two
    bytes, in which the lanes of a warp read experts 64 bytes apart, at six sevenths of the link's rate.
    """
    header_ptr, mail = tables_of(cache.state, E, S).header, cache.mail
    num_hosted = tl.load(header_ptr + HOSTED)
    if num_hosted > 0:
        sequence = tl.load(mail.sequence) % LAST_SEQUENCE + 1
        js = tl.arange(0, J_BLOCK)
        ids = tl.load(ids_ptr + js, mask=js < T * K, other=-1).to(tl.int32)
        tl.store(mail.words + EXPERTS + E + js, ids, mask=js < T * K)
        weights = tl.load(weights_ptr + js, mask=js < T * K, other=0.0)
        tl.store(mail.weights + js, weights, mask=js < T * K)
        for first in range(0, T * D, 2 * CACHE.piece):
            at = first + tl.arange(0, 2 * CACHE.piece)
            tokens = tl.load(x_ptr + at, mask=at < T * D, other=0.0)
            tl.store(mail.tokens + at, tokens, mask=at < T * D)
        tl.store(mail.words + OF_LAYER, tl.load(header_ptr + LAYER))
        tl.store(mail.words + NUM_EXPERTS, num_hosted)
        tl.store(mail.words + NUM_TOKENS, T)
        tl.store(mail.words + TOP_K, K)
        tl.store(mail.words + ANSWERED, 0)
        tl.debug_barrier()
        tl.store(mail.sequence, sequence)
        release_to_host(mail.words + REQUEST, sequence, CACHE.interpret)


@triton.jit
def take_answer(T, D, cache, E, S, CACHE: tl.constexpr):
    """The planner's block: wait for the host and copy its sums to where ``down_kernel`` reads; NaN after a deadline."""
    header_ptr, mail = tables_of(cache.state, E, S).header, cache.mail
    num_hosted = tl.load(header_ptr + HOSTED)
    if num_hosted > 0:
        sequence, layer = tl.load(mail.sequence), tl.load(header_ptr + LAYER)
        late = wait_flag(
            mail.words + ANSWERED, sequence, mail.fault, mail.timeout_ns.to(tl.int64),
            PLACE_HOST, layer, num_hosted, CACHE.interpret,
        )  # fmt: skip
        is_late = any_of(late != 0, tl.arange(0, MOST_THREADS)) == 1
        if is_late:
            tl.store(mail.words + FAILED, 1)
        PIECE: tl.constexpr = 2 * CACHE.piece  # 4 KB in flight for each warp
        for first in range(0, T * D, PIECE):
            at = first + tl.arange(0, PIECE)
            # The host wrote it while this kernel ran: no cache may answer.
            sums = tl.load(mail.answer + at, mask=at < T * D, other=0.0, cache_modifier=".cv")
            sums = tl.where(is_late, float("nan"), sums)
            tl.store(mail.sums + at, sums, mask=at < T * D)


@triton.jit
def add_hosted(total, tokens, cols, T, D, cache, E, S, CACHE: tl.constexpr):
    """``total (tokens, cols)`` and the host's sums, once the kernel before has ended."""
    if CACHE is None or cache.mail is None:
        return total
    else:
        num_hosted = tl.load(tables_of(cache.state, E, S).header + HOSTED, volatile=True)
        mask = (tokens < T)[:, None] & (cols < D)[None, :] & (num_hosted > 0)
        ptrs = cache.mail.sums + tokens[:, None] * D + cols[None, :]
        return total + tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def forget_hosted(cache, E, S, CACHE: tl.constexpr):
    """The first block of ``down_kernel``: the next step finds no expert that looks as if the host computed it."""
    if CACHE is not None:
        if cache.mail is not None:
            if tl.program_id(0) == 0:
                tables = tables_of(cache.state, E, S)
                num_hosted = tl.load(tables.header + HOSTED, volatile=True)
                num_missing = tl.load(tables.header + COUNT, volatile=True)
                for index in range(num_missing - num_hosted, num_missing):
                    tl.store(tables.arriving + tl.load(tables.copy_experts + index), -1)


def used_longest_ago(missing: Sequence[int], before: Tensor, count: int) -> list[int]:
    """The twin of ``leave_to_host``.

    Example: of experts 1, 4 and 6, last used in steps 3, 1 and 1, the first two to go are 4 and 6, and 4 is the first.
    """
    return sorted(missing, key=lambda expert: (int(before[expert]), expert))[:count]


def tell_mail(mail: Mailbox, experts: Sequence[int]) -> None:
    """Write the experts of the next request into the mailbox."""
    mail.words[EXPERTS.value : EXPERTS.value + len(experts)] = torch.tensor(experts, dtype=torch.int32)


def add_hosted_torch(partial: Tensor, host: HostExperts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``partial (T, D)`` and what the host makes of its experts of a step, which are in the mailbox."""
    hosted, layer = (int(host.tables.header[word.value]) for word in (HOSTED, LAYER))
    if host.mail is None or not hosted:
        return partial
    experts = host.mail.words[EXPERTS.value : EXPERTS.value + hosted].tolist()
    return partial + ask_torch(host.mail, layer, experts, tokens, ids, weights)


def asked_by_host(mail: Mailbox) -> Mailbox:
    """The mailbox for requests that the host makes itself, while the device makes none; ``mail.sequence`` comes behind.

    A deadline that passes meanwhile is in ``mail.words`` alone.
    """
    return mail._replace(sequence=mail.words[REQUEST.value : REQUEST.value + 1].clone(), fault=mail.fault.cpu())


def ask_torch(
    mail: Mailbox, layer: int, experts: Sequence[int], tokens: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """The twin of ``ask_host`` and ``take_answer``; asks from the host itself, once the last request was answered.

    Returns ``(T, D)`` float32, memory that the next request overwrites; NaN where the deadline passed, which
    ``mail.fault`` and ``mail.words`` tell then.
    """
    (num_tokens, top_k), words = ids.shape, mail.words
    sequence = int(mail.sequence) % LAST_SEQUENCE.value + 1
    # A step that was interrupted has not waited for its answer, and the process may still read that request.
    is_late = not _comes(mail, lambda: int(words[SERVED.value]) == int(words[REQUEST.value]))
    mail.sequence.fill_(sequence)
    mail.tokens[:num_tokens] = tokens
    mail.weights[: num_tokens * top_k] = weights.flatten()
    tell_mail(mail, experts)
    words[OF_LAYER.value : TOP_K.value + 1] = torch.tensor((layer, len(experts), num_tokens, top_k))
    first_id = EXPERTS.value + mail.share.shape[1] - 1
    words[first_id : first_id + num_tokens * top_k] = ids.flatten()
    words[ANSWERED.value] = 0
    words[REQUEST.value] = sequence
    if is_late or not _comes(mail, lambda: int(words[ANSWERED.value]) >= sequence):
        record = [1, Place.HOST, layer, len(experts), sequence, int(words[ANSWERED.value])]
        mail.fault[: len(record)] = torch.tensor(record)
        words[FAILED.value] = 1
        return torch.full_like(mail.answer[:num_tokens], torch.nan)
    return mail.answer[:num_tokens]


def _comes(mail: Mailbox, is_there: Callable[[], bool]) -> bool:
    """Wait for the host; whether it came before the deadline."""
    started = time.monotonic_ns()
    while not is_there():
        waited = time.monotonic_ns() - started
        if waited > mail.timeout_ns:
            return False
        if waited > PATIENCE_NS:
            time.sleep(PAUSE_S)
    return True
