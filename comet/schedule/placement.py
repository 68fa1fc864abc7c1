"""Which rank holds which expert: orders and copies of experts that even out the loads of ranks.

A rank computes the rows of its experts, and the slowest rank bounds the layer. ``place`` orders the experts of a layer
so that ranks have about equal loads; the order belongs into the weights and the router (``comet place``), so that a
layer costs what it cost before. ``redundant_experts`` chooses copies of hot experts for inference
(``comet.add_redundant_experts``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from comet.config import require


def check_loads(loads: Sequence[float]) -> None:
    """Raise ``ValueError`` unless all loads are numbers of rows."""
    bad = {expert: load for expert, load in enumerate(loads) if not 0 <= load < math.inf}
    require(not bad, f"loads={bad} of these experts must be at least 0 and finite")


def rank_loads(loads: Sequence[float], num_ranks: int) -> list[float]:
    """Loads of ranks that hold consecutive experts; ``[5, 4, 1, 2]`` over two ranks: ``[9, 3]``."""
    size = len(loads) // num_ranks
    return [sum(loads[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def imbalance(loads: Sequence[float]) -> float:
    """The largest load over the mean load, 1.0 without any load; ``[9, 3]``: 1.5."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def pack(loads: Sequence[float], num_bins: int) -> list[list[int]]:
    """Put equally many items into each bin, the heaviest first, each into the lightest bin that has room.

    Example: ``[5, 4, 1, 2]`` into two bins: ``[[0, 2], [1, 3]]``, of loads 6 and 6.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [0.0] * num_bins
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        lightest = min((b for b in range(num_bins) if len(bins[b]) < len(loads) // num_bins), key=totals.__getitem__)
        bins[lightest].append(item)
        totals[lightest] += loads[item]
    return [sorted(items) for items in bins]


def place(loads: Sequence[float], num_ranks: int, num_groups: int = 1) -> list[int]:
    """The order of a layer's experts in which ranks have about equal loads: rank r holds the r-th part of it.

    A router that chooses among groups of consecutive experts keeps its groups: whole groups go to ranks, or the experts
    of each group to the ranks of that group.

    Args:
        loads: ``(E,)`` routed rows of each expert.

    Raises:
        ValueError: If neither groups nor ranks divide the other, or loads are negative or not finite.

    Example: loads ``[5, 4, 1, 2]`` over two ranks: ``[0, 2, 1, 3]``, where ranks have 6 and 6 rows instead of 9 and 3.
    """
    check_loads(loads)
    size = len(loads) // num_groups
    groups = [list(loads[group * size : (group + 1) * size]) for group in range(num_groups)]
    if num_ranks % num_groups == 0:
        bins = [(group, items) for group, own in enumerate(groups) for items in pack(own, num_ranks // num_groups)]
        return [group * size + expert for group, items in bins for expert in items]
    require(num_groups % num_ranks == 0, f"ep={num_ranks} must divide num_groups={num_groups} or be its multiple")
    order = [group for items in pack([sum(own) for own in groups], num_ranks) for group in items]
    return [group * size + expert for group in order for expert in range(size)]


def redundant_experts(loads: Sequence[float], num_ranks: int, copies: int) -> list[list[int]]:
    """The experts of which each rank holds a copy, in addition to its own, so that ranks have about equal loads.

    An expert's rows are shared equally by the ranks that hold it. Copy by copy, the pair of an expert and a rank is
    taken that leaves the smallest sum of squares of the ranks' loads, until no copy makes it smaller.

    Args:
        loads: ``(E,)`` routed rows of each expert.
        copies: The most copies that a rank holds.

    Returns:
        For each rank the experts, in ascending order.

    Raises:
        ValueError: If a rank would hold an expert twice, or loads are negative or not finite.

    Example: loads ``[4, 1, 1, 2]``, two ranks, one copy each: rank 1 takes a copy of expert 1, and ranks have 4.5 and
    3.5 rows instead of 5 and 3; a copy on rank 0 would add to its rows: ``[[], [1]]``.
    """
    check_loads(loads)
    rows, own = np.asarray(loads, dtype=np.float64) / (max(loads) or 1.0), len(loads) // num_ranks
    most = len(rows) - own
    require(copies in range(most + 1), f"copies={copies!r} must be 0 to {most}, the experts of the other ranks")
    holds = who_holds(len(rows), num_ranks)
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for _ in range(num_ranks * copies):
        holders, totals = holds.sum(1), shared_loads(rows, holds)
        share, lost = rows / (holders + 1), rows / holders - rows / (holders + 1)
        # A holder's load t becomes t - lost, and that of the rank that takes the copy becomes t + share.
        change = (holders * lost**2 - 2 * lost * (holds @ totals) + share**2)[:, None] + 2 * np.outer(share, totals)
        change[holds | (np.array([len(each) for each in held]) == copies)] = np.inf
        expert, rank = np.unravel_index(change.argmin(), change.shape)
        if change[expert, rank] >= 0:
            break
        held[rank].append(int(expert))
        holds[expert, rank] = True
    return [sorted(each) for each in held]


def who_holds(num_experts: int, num_ranks: int, copies: Sequence[Sequence[int]] = ()) -> np.ndarray:
    """``(E, ranks)`` bool: which rank holds which expert, of its own or as a copy.

    Example: two experts over two ranks, rank 1 with a copy of expert 0: ``[[True, True], [False, True]]``.
    """
    holds = np.arange(num_experts)[:, None] // (num_experts // num_ranks) == np.arange(num_ranks)
    for rank, experts in enumerate(copies):
        holds[list(experts), rank] = True
    return holds


def shared_loads(loads: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """Loads of ranks that share each expert's rows equally, where ``holds (E, ranks)`` says who holds what."""
    return loads / holds.sum(1) @ holds
