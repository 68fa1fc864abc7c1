"""Events of the fused kernels on the host: their names, one clock for all ranks, and what a block did when.

A block's *event* is one work item: it waited from ``begin`` to ``ready`` and worked from there to ``end`` (see
``comet.kernels.runtime.recorder``). A *span* is a stretch of one block's time with one name; spans of a block never
overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

# A wait this short is the one look that found everything there; it counts as work.
POLL_NS = 1000


@dataclass(frozen=True, slots=True)
class Kind:
    """The meaning of events of one number."""

    work: str
    wait: str  # name of the wait before it; empty where there is none
    numbers: tuple[str, str, str]  # names of the three numbers; empty where unused
    layer: int


# In the order of the KIND_ constants of comet.kernels.runtime.recorder.
KINDS = (
    Kind("dispatch", "", ("destination", "chunk", ""), 0),
    Kind("receive", "wait for rows", ("source", "chunk", ""), 0),
    Kind("layer 0 GEMM", "wait for rows", ("tile", "column", "phase"), 0),
    Kind("layer 1 GEMM", "", ("tile", "column", "panel"), 1),
    Kind("reduce and send", "wait for panel", ("destination", "chunk", "panel"), 1),
    Kind("final sum", "wait for partial sums", ("first_token", "num_tokens", "panel"), 1),
    Kind("conversion", "", ("layer", "", ""), 0),
    Kind("send to nodes", "", ("number", "", ""), 0),
    Kind("wait for nodes", "", ("slot", "part", ""), 0),
)
# The lanes of the network, which stand above block 0.
NETWORK = {-1: "send to nodes", -2: "wait for nodes"}
CONVERSION = "conversion"
WORKS = tuple(kind.work for kind in KINDS if kind.work not in ("receive", CONVERSION, *NETWORK.values()))
WAITS = tuple(dict.fromkeys(kind.wait for kind in KINDS if kind.wait))


@dataclass(frozen=True, slots=True)
class Event:
    """One finished work item, in nanoseconds of rank 0's clock."""

    rank: int
    block: int
    sm: int  # streaming SM the block ran on; 0 under the interpreter
    epoch: int  # epoch of the launch; every layer call and every backward pass has its own
    kind: int
    numbers: tuple[int, int, int]
    begin: int  # when the wait began
    ready: int  # when the work began
    end: int  # when the item was done

    @property
    def work(self) -> str:
        return KINDS[self.kind].work

    @property
    def layer(self) -> int:
        """The launch it belongs to: layer 0 or layer 1 (in a backward pass their counterparts)."""
        return self.numbers[0] if self.work == CONVERSION else KINDS[self.kind].layer

    @property
    def arguments(self) -> dict[str, int]:
        named = zip(KINDS[self.kind].numbers, self.numbers, strict=True)
        return {name: number for name, number in named if name}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one block's time: ``name`` is one of ``WORKS``, ``WAITS`` or the values of ``NETWORK``."""

    name: str
    begin: int
    end: int
    event: Event


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as one rank saw it: from its first event to its last, with the number of its blocks."""

    rank: int
    epoch: int
    layer: int
    blocks: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Clock:
    """How a rank's clock differs from rank 0's: it shows ``offset_ns`` more, give or take ``error_ns``."""

    offset_ns: int
    error_ns: int


def compare_clocks(stamps: Sequence[Tensor]) -> list[Clock]:
    """The clock of every rank against rank 0's, from barriers that all of them passed.

    A rank departs only after every other has arrived; so its offset lies between arrival - departure of rank 0 and
    departure - arrival of rank 0, in every barrier. The offset is the middle of what all barriers leave, the error half
    its width; if the clocks drift so far that nothing is left, half of what is missing.

    Args:
        stamps: For every rank ``(barriers, 2)`` int64 arrival and departure on its own clock, in nanoseconds.

    Example: Rank 0 arrives at 100 and departs at 110, rank 1 arrives at 1103 and departs at 1109: the offset lies
    between 1103 - 110 = 993 and 1109 - 100 = 1009: 1001, give or take 8.
    """
    first = stamps[0]
    clocks = [Clock(0, 0)]
    for mine in stamps[1:]:
        low = int((mine[:, 0] - first[:, 1]).max())
        high = int((mine[:, 1] - first[:, 0]).min())
        clocks.append(Clock((low + high) // 2, abs(high - low) // 2))
    return clocks


def find_spans(events: Iterable[Event]) -> list[Span]:
    """The spans of all blocks by rank, block and begin; conversions have no length and are left out.

    A pipelined GEMM fetches a tile's first operands, and waits for them, before it finishes the tile in front. A tile
    therefore begins no earlier than the block's previous item ended, and a wait interrupts the work it falls into.

    Example: A block works from 0 to 50 us on its first tile, waits from 30 to 40 us for the rows of its second, and
    works on that until 90 us: GEMM 0..30, wait 30..40, GEMM 40..50, GEMM 50..90.
    """
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.work != CONVERSION:
            lanes[event.rank, event.block].append(event)
    return [span for key in sorted(lanes) for span in _lane(lanes[key])]


def _lane(events: list[Event]) -> list[Span]:
    works, waits = [], []
    free = None
    for event in sorted(events, key=lambda event: event.end):
        waited = event.ready - event.begin > POLL_NS
        if waited:
            waits.append(Span(KINDS[event.kind].wait, event.begin, event.ready, event))
        begin = event.ready if waited else event.begin
        works.append(Span(event.work, begin if free is None else max(begin, free), event.end, event))
        free = event.end
    works = [work for work in works if work.name in (*WORKS, *NETWORK.values())]
    return sorted([*_without(works, waits), *waits], key=lambda span: (span.begin, span.end))


def _without(works: Iterable[Span], waits: Sequence[Span]) -> Iterator[Span]:
    """``works`` less the ``waits`` that fall into them; both are in order, and neither overlaps itself."""
    past = 0
    for work in works:
        begin = work.begin
        while past < len(waits) and waits[past].end <= begin:
            past += 1
        for index in range(past, len(waits)):
            wait = waits[index]
            if wait.begin >= work.end:
                break
            if begin < wait.begin:
                yield Span(work.name, begin, wait.begin, work.event)
            begin = max(begin, wait.end)
        if begin < work.end:
            yield Span(work.name, begin, work.end, work.event)
