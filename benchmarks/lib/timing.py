"""All time by one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from comet.tuner.timing import Name, Timing, Variant, host_ahead, max_over_ranks, rank_barrier, time_interleaved

from lib.ranks import Ranks


def time_by_protocol(
    variants: Mapping[Name, Variant],
    ranks: Ranks,
    *,
    rounds: int,
    rotate: int = 1,
    opening: Callable[[], None] | None = None,
    leads: bool = True,
    warmup: int = 3,
) -> dict[Name, Timing]:
    """Time variants in turn, ranks starting together; the slowest rank counts.

    Args:
        variants: By name, equal on all ranks.
        ranks: Who takes part.
        rounds: Counted calls of each variant.
        rotate: Input sets.
        opening: What comes before each call in the place of the ranks' barrier.
        leads: Whether the host gets ahead of the GPU before each call.
        warmup: Rounds that are not counted.
    """
    barrier = rank_barrier(ranks.device, ranks.process_group) if opening is None else opening
    return time_interleaved(
        variants,
        rounds=rounds,
        barrier=host_ahead(barrier, ranks.device) if leads else barrier,
        rotate=rotate,
        device=ranks.device,
        slowest=max_over_ranks(ranks.device, ranks.process_group),
        warmup=warmup,
    )
