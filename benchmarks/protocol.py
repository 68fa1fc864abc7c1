"""The timing protocol of whole layers, their launches and training steps (``RESULTS.md``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from points import Ranks

from comet.tuner.timing import Name, Timing, Variant, host_ahead, max_over_ranks, rank_barrier, time_interleaved


def time_by_protocol(
    variants: Mapping[Name, Variant],
    ranks: Ranks,
    *,
    rounds: int,
    rotate: int,
    opening: Callable[[], None] | None = None,
) -> dict[Name, Timing]:
    """Time variants in turn, the host ahead of the GPU and ranks starting together; the slowest rank counts.

    Args:
        variants: By name, equal on all ranks.
        ranks: Who takes part.
        rounds: Counted calls of each variant.
        rotate: Input sets.
        opening: What comes before each call in the place of the ranks' barrier.
    """
    barrier = rank_barrier(ranks.device, ranks.process_group) if opening is None else opening
    return time_interleaved(
        variants,
        rounds=rounds,
        barrier=host_ahead(barrier, ranks.device),
        rotate=rotate,
        device=ranks.device,
        slowest=max_over_ranks(ranks.device, ranks.process_group),
    )
