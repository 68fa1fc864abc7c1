"""Each launch alone for a second, with the clocks it ran at: what a benchmark with ``--clocks`` does after its rounds.

Launches may wait for other ranks, so all ranks make equally many calls: their number follows from the milliseconds
measured before, of the slowest rank. The first part of the calls is not counted, for the clocks to settle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from clocks import LIMITS, Clocks, Watch
from points import Ranks
from report import Row

from comet.tuner.timing import Timing, Variant, max_over_ranks, start_call, summarize

SECONDS = 1.0
SETTLING = 0.3  # part of them that is not counted
CHUNK_S = 0.01
FIGURES = ("ms", "repeated_ms", "sm_mhz", "memory_mhz", "watts", "celsius", "limits", "failures")

# Runs an action on all ranks; its value and "", or ``None`` and why not.
Guard = Callable[[Callable[[], Any]], tuple[Any, str]]


@dataclass(frozen=True, slots=True)
class Calls:
    """How many calls settle the clocks and how many are counted, ``chunk`` of them enqueued at a time."""

    settling: int
    counted: int
    chunk: int

    @classmethod
    def lasting(cls, milliseconds: float, seconds: float) -> Calls:
        """The calls of that length that take so many seconds, at least one of each.

        Example: 2 ms each, 1 s: 150 settle, 350 are counted, 5 make 10 ms.
        """
        parts = (seconds * SETTLING, seconds * (1 - SETTLING), CHUNK_S)
        return cls(*(max(1, math.ceil(part * 1e3 / milliseconds)) for part in parts))


def repeat(variant: Variant, number: int, chunk: int, opening: Callable[[], None], device: torch.device) -> list[float]:
    """Milliseconds of each of ``number`` calls, each after an ``opening`` that does not count.

    While a chunk runs the next is enqueued: the device never waits, and at most two of them wait for it.
    """
    times: list[float] = []
    running: list[Callable[[], float]] = []
    for first in range(0, number, chunk):
        enqueued = [start_call(variant, 0, opening, device) for _ in range(min(chunk, number - first))]
        times += [read_ms() for read_ms in running]
        running = enqueued
    return times + [read_ms() for read_ms in running]


def clocks_of_call(
    watch: Watch, variant: Variant, calls: Calls, opening: Callable[[], None], device: torch.device
) -> tuple[float, Clocks]:
    """Repeat a call; the median of its milliseconds in the counted calls, and the clocks during them."""
    repeat(variant, calls.settling, calls.chunk, opening, device)
    start = time.monotonic()
    times = repeat(variant, calls.counted, calls.chunk, opening, device)
    return summarize(torch.tensor(times)).median_ms, watch.between(start, time.monotonic())


def over_ranks(milliseconds: float, clocks: Clocks, ranks: Ranks) -> tuple[float, Clocks]:
    """The longest time, lowest clocks, highest power and temperature of any rank, and the limits of all (collective).

    Example: 1410 and 1380 MHz, 690 and 700 W, one of them at the software power cap: 1380 MHz, 700 W, that cap.
    """
    signs = (-1, -1, 1, 1)
    values = (clocks.sm_mhz, clocks.memory_mhz, clocks.watts, clocks.celsius)
    numbers = [-math.inf if value is None else sign * value for sign, value in zip(signs, values, strict=True)]
    active = [float(word in clocks.limits) for word in LIMITS]
    largest = max_over_ranks(ranks.device, ranks.process_group)
    slowest, *found = largest(torch.tensor([milliseconds, *numbers, *active], dtype=torch.float64)).tolist()
    sm, memory, watts, celsius = (
        None if math.isinf(value) else sign * value for sign, value in zip(signs, found, strict=False)
    )
    limits = tuple(word for word, is_active in zip(LIMITS, found[len(signs) :], strict=True) if is_active)
    return slowest, Clocks(sm, memory, watts, celsius, limits)


def clock_rows(
    variants: Mapping[str, Variant],
    timings: Mapping[str, Timing],
    *,
    command: Sequence[str],
    opening: Callable[[], None],
    guard: Guard,
    ranks: Ranks,
) -> list[Row]:
    """Repeat every variant alone and say at which clocks it ran (collective: same variants on all ranks).

    Args:
        variants: Name to function of the number of the input set; set 0 is taken.
        timings: Of the same names, the same on all ranks.
        command: Prints samples of this rank's GPU (see ``clocks.Watch``).
        opening: Runs on the device before each call, uncounted.
        guard: Runs an action of all ranks and makes good what a failed one leaves.
        ranks: All of them.

    Returns:
        A row per variant: ``launch``, ``ms`` of the rounds, and the rest of ``FIGURES``; one without ``launch`` if
        there is nothing to watch the clocks with.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        watch, failure = guard(lambda: stack.enter_context(Watch(command)))
        if watch is None:
            return [{"launch": "", "failures": failure}]
        for name, variant in variants.items():
            milliseconds = timings[name].median_ms
            calls = Calls.lasting(ranks.worst(milliseconds), SECONDS)
            found, failure = guard(partial(clocks_of_call, watch, variant, calls, opening, ranks.device))
            row: Row = {"launch": name, "ms": milliseconds, "failures": failure}
            if found is not None:
                repeated_ms, clocks = over_ranks(found[0], found[1], ranks)
                row |= asdict(clocks) | {"repeated_ms": repeated_ms, "limits": ", ".join(clocks.limits)}
            rows.append(row)
    return rows
