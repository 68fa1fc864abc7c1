"""What a recorded routing says of two choices: who should name the experts to prefetch, and who should share slots.

A predictor names experts of a layer before its router has decided. Of those that it names only the ones without a slot
can travel, so only these count, in caches that hold what was used last: *precision* is the share of them that the step
needs, *recall* the share of the needed experts without a slot that are among them. ``@4``: the first four of them, as
many as a plan holds. Layers count from the third on, where all predictors name experts.

*next router* is the layer's own on the tokens of the layer before, *router in two* the same on those of two layers
before, *history* the experts that were needed most often behind those of the layer before, counted in the steps so far:
K of them, but for ``@4`` as many as have a count. *union* is the K of each of the three, in this order.

Letters: N steps, L layers, E experts, K experts of a token, S slots of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from comet.kernels.experts.prefetch import MOST_AHEAD

from lib.report import Row
from lib.routing.traces import Trace, UsedLast, one_hot, replay, reuse_distances

FIRST_LAYER = 2  # that all predictors know of


def predictor_rows(trace: Trace, slots: Sequence[int]) -> list[Row]:
    """Recall and precision of each predictor, for caches of these numbers of slots; none of fewer than three layers.

    Args:
        trace: With what routers guessed.
        slots: S, each at least K.
    """
    if trace.guessed is None or trace.guessed_in_two is None or trace.ids.shape[1] <= FIRST_LAYER:
        return []
    top_k = trace.ids.shape[2]
    named = {"next router": trace.guessed, "router in two": trace.guessed_in_two, "history": history(trace)}
    named["union"] = once_each(torch.cat([ids[..., :top_k] for ids in named.values()], dim=2))
    used, rows = one_hot(trace)[:, FIRST_LAYER:], []
    held = torch.stack(list(replay(trace, slots, "lru")), dim=1)[:, :, FIRST_LAYER:]
    for size, of_size in zip(slots, held, strict=True):
        for name, ids in named.items():
            row: Row = {"slots": size, "predictor": name, "missing": float((used & ~of_size).sum() / used.sum())}
            most = ids.shape[2] if name == "union" else top_k
            rows.append(row | judged(ids[:, FIRST_LAYER:], most, used, of_size))
    return rows


def judged(named: Tensor, most: int, used: Tensor, held: Tensor) -> Row:
    """Recall and precision of what is named, ``None`` where nothing could be right.

    Example (E = 8, experts 0 to 2 have slots): of named ``[2, 3, 4, 5, 6, 7]`` five can travel; needed are 1, 3 and 7,
    of which 3 and 7 are missing. Of all six recall is 1 and precision 2 / 5; of the three that ``most`` says, 1 / 2
    and 1 / 2; of the first four that can travel, 3 to 6, 1 / 2 and 1 / 4.

    Args:
        named: ``(N, L, P)`` int64, most likely first; -1 names nothing.
        most: How many of them count, but for those that a plan holds.
        used: ``(N, L, E)`` bool, what each step needs.
        held: ``(N, L, E)`` bool, what has a slot before the step.
    """
    places = named.clamp(min=0)
    travels = (named >= 0) & ~held.gather(2, places)
    right, needed = travels & used.gather(2, places), int((used & ~held).sum())
    row: Row = {}
    for end, kept in (
        ("", travels & (torch.arange(named.shape[2]) < most)),
        (f"@{MOST_AHEAD}", travels & (travels.cumsum(2) <= MOST_AHEAD)),
    ):
        count, hits = int(kept.sum()), int((kept & right).sum())
        row |= {f"recall{end}": hits / needed if needed else None, f"precision{end}": hits / count if count else None}
    return row


def history(trace: Trace) -> Tensor:
    """``(N, L, E)`` int64: the experts that followed those of the layer before, most often first, -1 behind them.

    What counts for an expert is how often it was needed in an earlier step together with each of those that the layer
    before needs now, all added up.

    Example (K = 1): where layer 0 needs 0, 1, 0 and 0 in four steps and layer 1 needs 5, 6, 7 and 7, it names none,
    none, 5, and then 5 and 7, which followed 0 once each, the lower first.
    """
    num_steps, num_layers, _ = trace.ids.shape
    counts = torch.zeros(num_layers - 1, trace.num_experts, trace.num_experts)
    layers = torch.arange(num_layers - 1)[:, None]
    found = torch.full((num_steps, num_layers, trace.num_experts), -1)
    for step in range(num_steps):
        before, after = trace.ids[step, :-1], trace.ids[step, 1:]
        best, order = counts[layers, before].sum(1).sort(dim=1, descending=True, stable=True)
        found[step, 1:] = torch.where(best > 0, order, -1)
        counts[layers[..., None], before[..., None], after[:, None]] += 1
    return found


def once_each(named: Tensor) -> Tensor:
    """The same ids, -1 where one stood before: ``[4, 2, 4, -1, 2]`` becomes ``[4, 2, -1, -1, -1]``."""
    repeats = (named[..., None] == named[..., None, :]).tril(-1).any(-1)
    return named.masked_fill(repeats, -1)


def sharing_rows(trace: Trace, slots: Sequence[int]) -> list[Row]:
    """Hits in the second half of a trace where each layer has S slots, where numbers are unequal, and of a pool.

    All have L times S slots in all and keep what was used last. The unequal numbers are chosen in the first half, as
    ``unequal_slots`` does. The *pool* serves all layers; a layer never gives away what it needs itself.

    Args:
        trace: At least two steps.
        slots: S, each at least K.
    """
    half, top_k = len(trace.ids) // 2, trace.ids.shape[2]
    used, curves = one_hot(trace)[half:], hit_curves(trace, half)
    chosen = [unequal_slots(curves, size, top_k) for size in slots]
    sizes = [each for size, unequal in zip(slots, chosen, strict=True) for each in ([size] * len(curves), unequal)]
    held = torch.stack(list(replay(trace, torch.tensor(sizes), "lru")))[half:]
    shares = iter(((held & used[:, None]).sum((0, 2, 3)) / used.sum()).tolist())
    rows = []
    for size, unequal in zip(slots, chosen, strict=True):
        row: Row = {"slots": size, "per layer": next(shares), "unequal": next(shares)}
        row["pool"] = sum(pool_hits(trace, size * len(curves))[half:]) / int(used.sum())
        rows.append(row | {"chosen": unequal})
    return rows


def hit_curves(trace: Trace, num_steps: int) -> list[list[int]]:
    """Hits of each layer in the first steps with 0, 1, ..., E slots that keep what was used last, full at first.

    Example (E = 4): one layer whose steps need 2, 0 and 2 has reuse distances 2, 1 and 1: ``[[0, 0, 2, 3, 3]]``.
    """
    curves = []
    for layer in range(trace.ids.shape[1]):
        counts = [0] * trace.num_experts
        for step in reuse_distances(trace.ids[:num_steps, layer].tolist(), trace.num_experts):
            for distance in step:
                counts[distance] += 1
        curves.append([0, *accumulate(counts)])
    return curves


def unequal_slots(curves: Sequence[Sequence[int]], size: int, least: int) -> list[int]:
    """Slots of each layer, ``size`` on average: each has ``least``, and one by one goes where it adds most hits.

    Example: curves ``[0, 0, 2, 3, 3]`` and ``[0, 4, 5, 5, 5]``, three slots each on average and one at least: from
    (1, 1) they grow by 2, 1, 1 and 0 hits to (2, 1), (3, 1), (3, 2) and (4, 2).
    """
    slots = [least] * len(curves)
    for _ in range((size - least) * len(curves)):
        gains = [
            curve[count + 1] - curve[count] if count + 1 < len(curve) else -1
            for curve, count in zip(curves, slots, strict=True)
        ]
        slots[gains.index(max(gains))] += 1
    return slots


def pool_hits(trace: Trace, size: int) -> list[int]:
    """Hits of each step where all layers share ``size`` slots, at least K, that keep what was used last.

    Example (two layers, K = 1, two slots): steps ``[[0], [1]]``, ``[[0], [1]]`` and ``[[0], [0]]`` hit 0, 2 and 1
    times: expert 0 of layer 1 is another one.
    """
    held, hits = UsedLast(size), []
    for step in trace.ids.tolist():
        # Of one step the lower numbers stay longer, as in ``replay``.
        missing = [held.use((layer, expert) for expert in sorted(of, reverse=True)) for layer, of in enumerate(step)]
        hits.append(sum(map(len, step)) - sum(missing))
    return hits
