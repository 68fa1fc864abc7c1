"""The one timing protocol of sweeps, tuning and benchmarks; ``benchmarks/results/protocol.md`` has its measurements.

1. *Interleaved.* Each round calls every variant once and starts with another one: a GPU slows by up to 10 % within a
   minute of load (power limit).
2. *Warm-up.* Rounds before the counted ones compile and allocate. On a GPU they fill ``WARM_S``. Their number follows
   from the shortest of the first ones on the slowest rank, so that all ranks make equally many.
3. *Barrier.* A barrier on the device before each call keeps another rank's lateness out of a time. A GPU first waits a
   quarter of a millisecond, in which the host launches the call, whatever the variant before it made the host wait for.
4. *CUDA events* around the call are read at the end of a round: the host runs ahead as it does in training. ``capture``
   removes launch cost.
5. *Rotated inputs.* Call number i gets input set i modulo ``rotate``, so that L2 does not flatter.
6. *Slowest rank.* Each sample is the maximum over ranks; then median, 10 % and 90 % quantile over the rounds.

On a CPU the same protocol runs with a wall clock; only ratios mean anything there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.comm.handshake import largest
from comet.config import require
from comet.utils import graphs
from comet.utils.streams import SideStream

Variant = Callable[[int], object]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")

WARM_S = 0.5
LEAD_CYCLES = 500_000  # a quarter of a millisecond: a barrier, a graph and their events take the host less
SHORTEST_ROUND_S = 50e-6  # a shorter one is taken for as long as this, so that 10,000 rounds are the most


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds over the rounds, each the maximum over ranks."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    mean_ms: float

    def of_one(self, calls: int) -> Timing:
        """The timing of one of the calls that a variant makes: 8 in 0.16 ms are 0.02 each."""
        return Timing(*(value / calls for value in astuple(self)))


def time_interleaved(
    variants: Mapping[Name, Variant],
    *,
    rounds: int,
    device: torch.device,
    process_group: ProcessGroup | None = None,
    rotate: int = 1,
    opening: Callable[[], object] | None = None,
    leads: bool = True,
    warmup: int = 3,
) -> dict[Name, Timing]:
    """Time all variants in one loop by the protocol above (collective: same variants and numbers on all ranks).

    Args:
        variants: Name to function of the number of the input set, in ``[0, rotate)``.
        rounds: Counted calls of each variant, at least 1; 10 or more for a result.
        device: Where the variants run.
        process_group: The ranks that take part; ``None`` is a rank alone.
        rotate: Number of input sets, at least 1.
        opening: What comes before the barrier of each call.
        leads: Whether a GPU waits before the barrier until its host has launched what follows.
        warmup: Rounds that are not counted, at least 1; on a GPU as many more follow as fill ``WARM_S``.
    """
    require(rounds >= 1, f"rounds={rounds} must be at least 1")
    require(rotate >= 1, f"rotate={rotate} must be at least 1")
    require(warmup >= 1, f"warmup={warmup} must be at least 1")
    meet = rank_barrier(device, process_group)

    def barrier() -> None:
        if opening is not None:
            opening()
        if leads and device.type == "cuda":
            torch.cuda._sleep(LEAD_CYCLES)
        meet()

    run = partial(run_round, variants, barrier=barrier, rotate=rotate, device=device)
    shortest_s = min(wall_clock(partial(run, number)) for number in range(-warmup, 0))
    if device.type == "cuda":
        (round_s,) = largest([shortest_s], device, process_group)
        for number in range(warmup - math.ceil(WARM_S / max(round_s, SHORTEST_ROUND_S)), 0):
            run(number)
    samples = torch.stack([run(number) for number in range(rounds)], dim=1)
    slowest = torch.tensor(largest(samples.flatten().tolist(), device, process_group), dtype=torch.float64)
    return {name: summarize(of_one) for name, of_one in zip(variants, slowest.view_as(samples), strict=True)}


def run_round(
    variants: Mapping[Name, Variant], number: int, *, barrier: Callable[[], None], rotate: int, device: torch.device
) -> Tensor:
    """Milliseconds ``(variants,)`` of one call each, read when all have started; each number starts with another."""
    names = list(variants)
    first = number % max(len(names), 1)
    order = names[first:] + names[:first]
    clocks = {name: start_call(variants[name], number % rotate, barrier, device) for name in order}
    return torch.tensor([clocks[name]() for name in names], dtype=torch.float64)


def wall_clock(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def summarize(samples_ms: Tensor) -> Timing:
    """Median, quantiles and mean of ``(rounds,)`` samples; of ``[1, 2, 3, 4, 10]`` they are 3, 1.4, 7.6 and 4."""
    p10, median, p90 = torch.quantile(samples_ms.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return Timing(median, p10, p90, float(samples_ms.double().mean()))


def rank_barrier(device: torch.device, process_group: ProcessGroup | None) -> Callable[[], None]:
    """A barrier over the group that runs on the device: a one-element all-reduce on the current stream.

    ``process_group=None`` is a rank alone, whose barrier does nothing.
    """
    if process_group is None:
        return lambda: None
    token = torch.zeros(1, dtype=torch.int32, device=device)
    return lambda: dist.all_reduce(token, group=process_group)


def capture(variant: Callable[[int], Result], *, rotate: int = 1) -> Callable[[int], Result]:
    """Record a variant as CUDA graphs, one per input set; returns their replay by the number of the set.

    The variant never makes the host wait for the device. It is kept with the graphs, which know only addresses of what
    it holds. A replay returns the memory in which set 0 leaves its result.
    """
    with SideStream(torch.cuda.Stream()).inserted():
        for index in range(rotate):
            variant(index)
    kept: list[torch.cuda.CUDAGraph] = []
    made = [
        graphs.capture(partial(variant, index), None, kept, kept[0].pool() if kept else None) for index in range(rotate)
    ]

    def replayed(index: int, _: Callable[[int], Result] = variant) -> Result:
        made[index][0]()
        return made[0][1]

    return replayed


def start_call(variant: Variant, index: int, barrier: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Run one call; returns what reads its milliseconds once the round is over."""
    if device.type != "cuda":
        barrier()
        elapsed_ms = wall_clock(partial(variant, index)) * 1e3
        return lambda: elapsed_ms
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    barrier()
    begin.record()
    variant(index)
    end.record()

    def read_ms() -> float:
        end.synchronize()
        return begin.elapsed_time(end)

    return read_ms
