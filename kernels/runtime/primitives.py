"""Signals between ranks (release stores, acquire spins with a deadline, a barrier) and between kernels of a stream.

Memory order. Writer: payload stores, block barrier, ``signal`` (release, system scope). Reader: ``wait_flag`` or
``wait_flags`` (acquire, system scope), then read. Flags carry the epoch, a number that only grows, so nothing is ever
reset.

Deadlines. Every spin measures its own time. On expiry it writes one record into ``fault`` and sets ``fault[0]``; every
other spin of the device sees that and gives up as well, so the kernel ends and the host can raise. Until it does, the
stream runs on over what did not come. So kernels of a rank that has failed send nothing more: no other rank takes
garbage for results, nothing is overwritten that another has yet to read, and a rank that waits for this one meets its
deadline and names it. No ids are sent (``counting``), a plan has no rows to send (``placement``), no sums go home
(``combine``), no gradients go out (``dispatch``), no barrier opens.

``fault`` is ``(8,)`` int64, the fields of ``faults.Fault``.
"""

import triton
import triton.language as tl

from .faults import ROWS_NEEDED, Place

(
    PLACE_BARRIER, PLACE_EXCHANGE, PLACE_LAYER0, PLACE_PANEL, PLACE_LAYER1, PLACE_CALL, PLACE_GUESTS, PLACE_SUMS,
    PLACE_OTHER_CALL, PLACE_ELSEWHERE, PLACE_DECODE, PLACE_GATHER, PLACE_HOST, PLACE_ROOM,
) = (tl.constexpr(place.value) for place in Place)  # fmt: skip
FAULT_ROWS_NEEDED = tl.constexpr(ROWS_NEEDED)

# The interpreter has no clock; one poll there takes at least this long.
INTERPRETER_POLL_NS = tl.constexpr(20_000)

MOST_THREADS = tl.constexpr(1024)  # a block's


def _fault_ptx(fault: str, place: str, peer: str, index: str, expected: str, seen: str) -> str:
    """PTX that writes one record unless there is one, then sets the abort flag; takes registers ``stop`` and ``word``.

    Each argument is the operand that holds it: the address in 64 bits, all else in 32.
    """
    fields = "".join(
        f"cvt.s64.s32 word, {field};\nst.global.b64 [{fault}+{8 * place_of}], word;\n"
        for place_of, field in enumerate((place, peer, index, expected, seen), start=1)
    )
    return f"""
            atom.global.cas.b64 word, [{fault}+48], 0, 1;
            setp.ne.u64 stop, word, 0;
            @stop bra ABORT;
            {fields}
            ABORT:
            mov.u64 word, 1;
            st.release.sys.global.b64 [{fault}], word;
    """


def _wait_ptx(result: str) -> str:
    """PTX of ``spin``; ``result`` sets operand 0 and may take the register ``arrived``."""
    return f"""
            {{
            .reg .pred arrived, stop;
            .reg .b32 seen;
            .reg .b64 now, end, word;
            ld.acquire.sys.global.b32 seen, [$1];
            setp.ge.s32 arrived, seen, $2;
            @arrived bra DONE;
            mov.u64 end, %globaltimer;
            add.u64 end, end, $3;
            POLL:
            ld.relaxed.sys.global.b32 seen, [$1];
            setp.ge.s32 arrived, seen, $2;
            @arrived bra ARRIVED;
            ld.volatile.global.b64 word, [$4];
            setp.ne.u64 stop, word, 0;
            @stop bra DONE;
            mov.u64 now, %globaltimer;
            setp.lt.u64 stop, now, end;
            @stop bra POLL;
            {_fault_ptx("$4", "$5", "$6", "$7", "$2", "seen")}
            bra DONE;
            ARRIVED:
            ld.acquire.sys.global.b32 seen, [$1];
            DONE:
            {result}
            }}
    """


_ZERO_PTX = tl.constexpr(_wait_ptx("mov.b32 $0, 0;"))
_WAIT_PTX = tl.constexpr(_wait_ptx("selp.b32 $0, 0, 1, arrived;"))
_RECORD_PTX = tl.constexpr(
    f"""
            {{
            .reg .pred stop;
            .reg .b64 word;
            {_fault_ptx("$1", "$2", "$3", "$4", "$5", "$6")}
            mov.b32 $0, 0;
            }}
    """
)


@triton.jit
def clock_ns(polls, INTERPRET: tl.constexpr):
    """Nanoseconds on the device clock; under the interpreter an estimate from the number of ``polls``."""
    if INTERPRET:
        return polls * INTERPRETER_POLL_NS
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def spin(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices, PTX: tl.constexpr):
    """0 each, once its own flag holds at least ``expected``; 1 where a deadline passed or another spin gave up before.

    One instruction sequence, in which every thread spins for itself: a loop of Triton's has barriers, at which threads
    part that do not read the same time or the same abort flag, and inside a GEMM's loop keeps it from being pipelined.
    """
    zeros = indices * 0
    addresses = tl.where(mask, flag_ptrs.to(tl.int64), fault_ptr.to(tl.int64))
    return tl.inline_asm_elementwise(
        PTX,
        "=r,l,r,l,l,r,r,r",
        [
            addresses, tl.where(mask, expected, -(2**31)), zeros + timeout_ns, zeros + fault_ptr.to(tl.int64),
            zeros + place, peers, indices,
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def zero_after_arrival(
    flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices, INTERPRET: tl.constexpr
):
    """0, once every flag of the block holds at least ``expected``: to be added to the addresses that are then read.

    A value instead of a barrier, for the compiler's pipeline stops at barriers. The value is reduced over the block, so
    no thread has it before all flags were seen.
    """
    if INTERPRET:
        wait_flags(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices, True)
        return 0
    else:
        zeros = spin(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices, _ZERO_PTX)
        return tl.max(zeros, axis=0)


@triton.jit
def after_block(value, INTERPRET: tl.constexpr):
    """The scalar ``value`` once every thread of the block is here.

    Unlike ``tl.debug_barrier``, it may stand in a GEMM's loop.
    """
    if INTERPRET:
        return value
    else:
        return tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def signal(flag_ptr, epoch):
    """Publish ``epoch`` in a flag, after all payload stores of this block."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def record_fault(fault_ptr, place, peer, index, expected, seen, INTERPRET: tl.constexpr):
    """Write which rank waited for which, then set the abort flag; the first to come keeps the record.

    Threads of a block do not read the same time: some come here and others do not. So there is no barrier in it, which
    atomic operations of Triton have as soon as their result is used.
    """
    if INTERPRET:
        first = tl.atomic_cas(fault_ptr + 6, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64))
        if first == 0:
            tl.store(fault_ptr + 1, tl.cast(place, tl.int64))
            tl.store(fault_ptr + 2, tl.cast(peer, tl.int64))
            tl.store(fault_ptr + 3, tl.cast(index, tl.int64))
            tl.store(fault_ptr + 4, tl.cast(expected, tl.int64))
            tl.store(fault_ptr + 5, tl.cast(seen, tl.int64))
        tl.atomic_xchg(fault_ptr, tl.full((), 1, tl.int64), sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            _RECORD_PTX,
            "=r,l,r,r,r,r,r",
            [
                fault_ptr.to(tl.int64), tl.cast(place, tl.int32), tl.cast(peer, tl.int32), tl.cast(index, tl.int32),
                tl.cast(expected, tl.int32), tl.cast(seen, tl.int32),
            ],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def any_of(condition, like):
    """1 for the whole block if a condition, which threads may meet at different moments, holds for one of them.

    ``like`` is a block: wherever a reduction over it is equal, this is, too.
    """
    return tl.max(tl.where(condition, 1, 0) + like * 0, axis=0)


@triton.jit
def poll(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices):
    """``spin`` for the interpreter: 1 if one of the flags did not arrive, else 0."""
    seen = tl.load(flag_ptrs, mask=mask, other=expected, volatile=True)
    aborted = tl.load(fault_ptr, volatile=True)
    polls = tl.full((), 0, tl.int64)
    while (tl.min(seen, axis=0) < expected) & (aborted == 0):
        seen = tl.load(flag_ptrs, mask=mask, other=expected, volatile=True)
        aborted = tl.load(fault_ptr, volatile=True)
        polls += 1
        if (tl.min(seen, axis=0) < expected) & (clock_ns(polls, True) > timeout_ns):
            is_late = tl.arange(0, seen.shape[0]) == tl.argmin(seen, axis=0)
            peer, index = tl.sum(tl.where(is_late, peers, 0), axis=0), tl.sum(tl.where(is_late, indices, 0), axis=0)
            record_fault(fault_ptr, place, peer, index, expected, tl.min(seen, axis=0), True)
    return (tl.min(seen, axis=0) < expected).to(tl.int32)


@triton.jit
def wait_flag(flag_ptr, expected, fault_ptr, timeout_ns, place, peer, index, INTERPRET: tl.constexpr):
    """0, once ``*flag_ptr >= expected``; 1 if a deadline passed or another spin gave up before.

    Each thread waits for itself: some may give up where others do not (see ``any_of``).
    """
    if INTERPRET:
        one = tl.arange(0, 1)
        return poll(flag_ptr + one, one == 0, expected, fault_ptr, timeout_ns, place, peer + one, index + one)
    else:
        return spin(flag_ptr, True, expected, fault_ptr, timeout_ns, place, peer, index, _WAIT_PTX)


@triton.jit
def wait_flags(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices, INTERPRET: tl.constexpr):
    """``wait_flag`` for a vector of flags; ``peers`` and ``indices`` name the flag that is late."""
    if INTERPRET:
        late = poll(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices)
    else:
        late = tl.max(spin(flag_ptrs, mask, expected, fault_ptr, timeout_ns, place, peers, indices, _WAIT_PTX), axis=0)
    tl.debug_barrier()
    return late


@triton.jit(do_not_specialize=["rank", "world_size", "timeout_ns", "call"])
def barrier_kernel(
    flag_addresses, call_addresses, status_ptr, epoch_ptr, fault_ptr, rank, world_size, timeout_ns, call,
    W_BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program: tell every rank, wait for every rank, advance the epoch.

    A rank that has failed does none of it, and one that waits in vain stays at its epoch, as does one that meets
    another ``call``, or the backward pass of another plan.

    ``flag_addresses``: (W,) int64, address of each rank's (W,) int32 barrier flags; rank s writes slot s of every rank.
    ``call_addresses``: the same of (4, W) int32. Rank s writes its call at [parity of the epoch, s], and the epoch of
    its plan two rows below. ``None``: nothing is compared.
    ``status_ptr``: (4,) int32, the status of the plan whose backward pass begins; its last entry is the plan's epoch.
    """
    epoch = tl.load(epoch_ptr) + 1
    ranks = tl.arange(0, W_BLOCK)
    # All threads have loaded this before any of them waits, and nothing else sets it meanwhile.
    works = tl.load(fault_ptr, volatile=True) == 0
    mask = (ranks < world_size) & works
    remote = tl.load(flag_addresses + ranks, mask=mask, other=0).to(tl.pointer_type(tl.int32))
    half = (epoch & 1) * world_size
    if call_addresses is not None:
        remote_calls = tl.load(call_addresses + ranks, mask=mask, other=0).to(tl.pointer_type(tl.int32))
        number = tl.load(status_ptr + 3)
        tl.store(remote_calls + half + rank, ranks * 0 + call, mask=mask)
        tl.store(remote_calls + 2 * world_size + half + rank, ranks * 0 + number, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(remote + rank, tl.full((W_BLOCK,), 0, tl.int32) + epoch, mask=mask, sem="release", scope="sys")
    local = tl.load(flag_addresses + rank).to(tl.pointer_type(tl.int32))
    late = wait_flags(local + ranks, mask, epoch, fault_ptr, timeout_ns, PLACE_BARRIER, ranks, ranks * 0, INTERPRET)
    is_late = any_of(late != 0, tl.arange(0, MOST_THREADS))
    if call_addresses is not None:
        calls = tl.load(call_addresses + rank).to(tl.pointer_type(tl.int32))
        arrived = mask & (is_late == 0)
        seen = tl.load(calls + half + ranks, mask=arrived, other=call)
        numbers = tl.load(calls + 2 * world_size + half + ranks, mask=arrived, other=number)
        other = tl.max(tl.where((seen != call) | (numbers != number), ranks, -1), axis=0)
        if other >= 0:
            number_there = tl.sum(tl.where(ranks == other, numbers, 0), axis=0)
            record_fault(fault_ptr, PLACE_CALL, other, call, number, number_there, INTERPRET)
        works = works & (other < 0)
    tl.store(epoch_ptr, epoch, mask=works & (is_late == 0))


@triton.jit
def allow_next(DEPENDENT: tl.constexpr):
    """Let the next kernel of the stream start as soon as every block of this one has."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Return when the kernel before has finished and its stores can be read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
