"""The work of blocks over time: one event per finished work item, written by the fused kernels while they run.

``events`` is ``(blocks, 1 + capacity, 12)`` int32. Row 0 of a block holds in word 0 how many events the block had, also
those that found no room; row 1 + i holds its i-th event:

    kind, epoch, SM, three numbers that name the item (see ``comet.trace.events``), and as int64 begin, ready, end

From ``begin`` to ``ready`` the block waited, from ``ready`` to ``end`` it worked. Every launch appends, a block writes
only its own rows, and nothing is read back by a computation: results do not depend on recording. ``events_ptr`` is
``None`` and ``EVENTS`` is 0 in a kernel that does not record: then ``now`` and ``record`` leave no instruction behind.

Times are nanoseconds of the GPU's own clock. ``align`` finds how the clocks of the ranks differ: every rank notes when
it arrives at and when it leaves each of a few barriers. No rank leaves before any other has arrived, so the difference
between two clocks lies between (arrival of b - departure of a) and (departure of b - arrival of a).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .primitives import PLACE_BARRIER, clock_ns, wait_flags

Result = TypeVar("Result")
EVENT_WORDS = tl.constexpr(12)
DEFAULT_CAPACITY = 2048
MAX_CAPACITY = 1_000_000  # offsets into the buffer are 32-bit
ALIGN_ROUNDS = 16
BLOCKS_PER_MULTIPROCESSOR = 12  # layer 1 in CUDA C++: one for all that compute, eleven warps that communicate
INTERPRETER_BLOCKS = 10  # most blocks of a layer under the interpreter

# Kinds of work items; comet.trace.events turns them into words.
KIND_DISPATCH = tl.constexpr(0)
KIND_RECEIVE = tl.constexpr(1)
KIND_LAYER0_TILE = tl.constexpr(2)
KIND_LAYER1_TILE = tl.constexpr(3)
KIND_REDUCE = tl.constexpr(4)
KIND_FINAL_SUM = tl.constexpr(5)
KIND_CONVERT = tl.constexpr(6)
KIND_SEND, KIND_AWAIT = 7, 8  # over the network, by kernels that do not record


@triton.constexpr_function
def host_clock_ns() -> int:
    """The clock of all processes of a host, for the interpreter; never compiled."""
    import time  # inside, because the compiler follows module names even where it compiles nothing

    return time.perf_counter_ns()


@triton.jit
def now(EVENTS: tl.constexpr, INTERPRET: tl.constexpr):
    """Nanoseconds, or 0 where nothing is recorded."""
    if not EVENTS:
        return 0
    elif INTERPRET:
        return tl.full((), host_clock_ns(), tl.int64)
    else:
        return clock_ns(0, False)


@triton.jit
def sm_id(INTERPRET: tl.constexpr):
    """Number of the SM this block runs on; 0 under the interpreter."""
    if INTERPRET:
        return 0
    else:
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def record(
    events_ptr, kind, epoch, first, second, third, begin, ready, EVENTS: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Append the work item that ends now; a full buffer only counts it.

    One thread of a block stores all scalars, and it sees its own stores: what the other threads read for ``count`` does
    not matter, so no barrier is needed, and none would be welcome in a GEMM's loop. Layer 0 has no register to spare:
    with 64-bit fields, or as one piece of assembly, it spills.
    """
    if EVENTS:
        block_ptr = events_ptr + tl.program_id(0) * ((EVENTS + 1) * EVENT_WORDS)
        count = tl.load(block_ptr)
        tl.store(block_ptr, count + 1)
        fits = count < EVENTS
        event_ptr = block_ptr + (count + 1) * EVENT_WORDS
        times_ptr = (event_ptr + 6).to(tl.pointer_type(tl.int64))
        tl.store(event_ptr, kind, mask=fits)
        tl.store(event_ptr + 1, epoch, mask=fits)
        tl.store(event_ptr + 2, sm_id(INTERPRET), mask=fits)
        tl.store(event_ptr + 3, first, mask=fits)
        tl.store(event_ptr + 4, second, mask=fits)
        tl.store(event_ptr + 5, third, mask=fits)
        tl.store(times_ptr, begin, mask=fits)
        tl.store(times_ptr + 1, ready, mask=fits)
        tl.store(times_ptr + 2, now(EVENTS, INTERPRET), mask=fits)


@triton.jit(do_not_specialize=["rank", "world_size", "timeout_ns"])
def align_kernel(
    stamps_ptr, flag_addresses, epoch_ptr, fault_ptr, rank, world_size, timeout_ns,
    ROUNDS: tl.constexpr, W_BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program: ``ROUNDS`` barriers of the ranks, each with its time of arrival and of departure.

    ``flag_addresses``: (W,) int64, address of each rank's (W,) int32 barrier flags; rank s writes slot s of every rank.
    """
    epoch = tl.load(epoch_ptr)
    ranks = tl.arange(0, W_BLOCK)
    mask = ranks < world_size
    remote = tl.load(flag_addresses + ranks, mask=mask, other=0).to(tl.pointer_type(tl.int32))
    local = tl.load(flag_addresses + rank).to(tl.pointer_type(tl.int32))
    for index in range(ROUNDS):
        epoch += 1
        tl.store(stamps_ptr + 2 * index, now(1, INTERPRET))
        tl.debug_barrier()
        tl.atomic_xchg(remote + rank, tl.full((W_BLOCK,), 0, tl.int32) + epoch, mask=mask, sem="release", scope="sys")
        wait_flags(local + ranks, mask, epoch, fault_ptr, timeout_ns, PLACE_BARRIER, ranks, ranks * 0, INTERPRET)
        tl.store(stamps_ptr + 2 * index + 1, now(1, INTERPRET))
    tl.store(epoch_ptr, epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorder:
    """The memory in which the launches of one rank write their events."""

    events: Tensor  # (blocks, 1 + capacity, 12) int32 as described in the module
    # of a layer over nodes: kind, two numbers, and the times at which its stream began and ended this
    marks: list[tuple[int, int, int, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def allocate(cls, device: torch.device, capacity: int = DEFAULT_CAPACITY) -> Self:
        """An empty recorder for the blocks of a launch on ``device``, with room for ``capacity`` events of each."""
        blocks = INTERPRETER_BLOCKS
        if device.type == "cuda":
            blocks = BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        return cls(events=torch.zeros(blocks, 1 + capacity, EVENT_WORDS.value, dtype=torch.int32, device=device))

    @property
    def capacity(self) -> int:
        return self.events.shape[1] - 1

    def clear(self) -> None:
        self.events[:, 0].zero_()

    def around(self, slot: int, part: int, run: Callable[[], Result], *, kind: int = KIND_AWAIT) -> Result:
        """Return ``run()``, and mark when the current stream begins and ends what it launches."""
        begin = stamp(self.events.device)
        result = run()
        self.marks.append((kind, slot, part, begin, stamp(self.events.device)))
        return result


def recording(recorder: Recorder | None, num_blocks: int) -> Tensor | None:
    """The memory in which a launch of ``num_blocks`` blocks records, or ``None``."""
    if recorder is None:
        return None
    blocks = recorder.events.shape[0]
    assert num_blocks <= blocks, f"{num_blocks} blocks, rows for {blocks}"
    return recorder.events


def stamp(device: torch.device) -> Tensor:
    """The time at which the current stream comes here, ``(1,)`` int64: a barrier of this rank alone."""
    flags, epoch = torch.zeros(2, 1, dtype=torch.int32, device=device)
    fault = torch.zeros(8, dtype=torch.int64, device=device)
    return align(torch.full((1,), flags.data_ptr(), device=device), epoch, fault, 0, 10**9)[-1, 1:]


def align(flag_pointers: Tensor, epoch: Tensor, fault: Tensor, rank: int, timeout_ns: int) -> Tensor:
    """Barriers of all ranks that note their times (collective); advances the epoch by ``ALIGN_ROUNDS``.

    Takes what ``barrier_kernel`` does of the pool's barrier.

    Returns:
        ``(ALIGN_ROUNDS, 2)`` int64: arrival and departure on this rank's clock, filled in stream order.
    """
    stamps = torch.empty(ALIGN_ROUNDS, 2, dtype=torch.int64, device=epoch.device)
    world_size = flag_pointers.numel()
    align_kernel[(1,)](
        stamps, flag_pointers, epoch, fault, rank, world_size, timeout_ns,
        ROUNDS=ALIGN_ROUNDS, W_BLOCK=triton.next_power_of_2(world_size), INTERPRET=triton.knobs.runtime.interpret,
        num_warps=1,
    )  # fmt: skip
    return stamps
