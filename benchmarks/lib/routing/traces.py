"""Which experts the tokens of a text go to, one after the other: made, or recorded from a trained model and replayed.

A trace is ``(steps, layers, K)`` int64 expert ids, one token a step, and what follows from it: how soon experts come
again, and what share of them a cache of some size holds by each policy.

Letters: N steps, L layers, E experts, K experts of a token, S slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from comet.config import MoEConfig, require
from comet.kernels.experts.cache import KEPT
from comet.kernels.experts.tables import POLICIES

BEST = "next use"  # gives away what is used again last: no policy, but what none can exceed
NEVER = 2**30
IDS = ("ids", "guessed", "guessed_in_two")
FIELDS = (*IDS, "weights", "num_experts")  # of a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The routing of a text.

    Args:
        ids: ``(N, L, K)`` int64, best first.
        weights: ``(N, L, K)`` float32, of the router.
        num_experts: E.
        guessed: ``(N, L, K)`` int64: where each layer's router sends the tokens of the layer before; of the first layer
            -1. ``None``: not recorded.
        guessed_in_two: The same of two layers before; of the first two layers -1.
    """

    ids: Tensor
    weights: Tensor
    num_experts: int
    guessed: Tensor | None = None
    guessed_in_two: Tensor | None = None

    def save(self, path: Path) -> None:
        """Write it to a file, numbers of experts in 16 bits."""
        fields = {name: getattr(self, name) for name in FIELDS}
        torch.save(
            {name: value.short() if name in IDS and value is not None else value for name, value in fields.items()},
            path,
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what ``save`` wrote.

        Raises:
            ValueError: If there is no such file, or it is no trace.
        """
        require(path.is_file(), f"trace={str(path)!r} must be a file that bench.py speculation wrote (routing.pt)")
        found = torch.load(path, weights_only=True)
        known = isinstance(found, dict) and set(found) == set(FIELDS)
        require(known, f"trace={str(path)!r} must hold {', '.join(FIELDS)}, as bench.py speculation writes it")
        return cls(
            **{name: value.long() if name in IDS and value is not None else value for name, value in found.items()}
        )


def made_trace(config: MoEConfig, num_layers: int, num_steps: int, sticky: float) -> Tensor:
    """``(N, L, K)`` ids: an expert stays with probability ``sticky``, the others are drawn by a layer's Zipf law."""
    made = torch.Generator().manual_seed(0)
    popularity = torch.stack([torch.randperm(config.num_experts, generator=made) + 1.0 for _ in range(num_layers)])
    ids = torch.multinomial(1 / popularity, config.top_k, generator=made)
    steps = []
    for _ in range(num_steps):
        keeps = torch.rand(ids.shape, generator=made) < sticky
        chances = (1 / popularity).scatter(1, ids, 0.0)  # what was dropped comes back only if it was kept
        drawn = torch.multinomial(chances, config.top_k, generator=made)
        ids = torch.where(keeps, ids, drawn)
        steps.append(ids)
    return torch.stack(steps)


class UsedLast:
    """Slots that keep what was used last.

    Args:
        size: How many; a step that needs more leaves the last of what it needs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, experts: Iterable[Hashable]) -> int:
        """Take a step; returns how many of its experts had no slot."""
        missing = 0
        for expert in dict.fromkeys(experts):
            missing += expert not in self._held
            self._held[expert] = None
            self._held.move_to_end(expert)
        while len(self._held) > self.size:
            self._held.popitem(last=False)
        return missing


def reuse_distances(ids: Sequence[Sequence[int]], num_experts: int) -> list[list[int]]:
    """How many other experts of a layer were used since each expert of a step was; the step itself does not count.

    Example (E = 4, experts never used stand in the order of their numbers): steps ``[[2], [0], [2]]`` give
    ``[[2], [1], [1]]``: 0 and 1 stand before 2, then 2 before 0, then 0 before 2.

    Args:
        ids: N steps of one layer, K ids each.
        num_experts: E.

    Returns:
        N lists of K distances in ``[0, E)``, as the ids stand.
    """
    stack, found = list(range(num_experts)), []
    for step in ids:
        found.append([stack.index(expert) for expert in step])
        stack = [*step, *(expert for expert in stack if expert not in step)]
    return found


def resized_trace(trace: Trace, config: MoEConfig, num_layers: int, num_steps: int) -> Tensor:
    """A trace for another shape that repeats experts as a recorded one does: ``(N, L, K)`` ids.

    Layer l takes the reuse distances of recorded layer l modulo their number, step by step, and in each step K of them:
    every one once where there are enough, drawn again where there are not. A distance d of E' recorded experts becomes
    a draw from ``[d, d + 1) * E / E'``, and the expert that stands there among those used last. So least-recently-used
    slots for a share of the experts hit as they did in the recording, whatever E is.

    Args:
        trace: Recorded.
        config: Of the shape.
        num_layers: L.
        num_steps: N, at most those recorded, behind which the recording starts again.
    """
    drawn = torch.Generator().manual_seed(0)
    layers = []
    for layer in range(num_layers):
        recorded = trace.ids[:, layer % trace.ids.shape[1]].tolist()
        distances = torch.tensor(reuse_distances(recorded, trace.num_experts))
        stack = torch.randperm(config.num_experts, generator=drawn).tolist()
        steps = []
        for number in range(num_steps):
            of_step = distances[number % len(distances)]
            chosen = torch.cat(
                [torch.randperm(len(of_step), generator=drawn) for _ in range(-(-config.top_k // len(of_step)))]
            )
            places = of_step[chosen[: config.top_k]] + torch.rand(config.top_k, generator=drawn)
            step = _experts_at((places * config.num_experts / trace.num_experts).long().tolist(), stack)
            stack = [*step, *(expert for expert in stack if expert not in step)]
            steps.append(step)
        layers.append(steps)
    return torch.tensor(layers).transpose(0, 1)


def resized_guesses(trace: Trace, ids: Tensor, num_experts: int) -> Tensor:
    """What is guessed of a trace for another shape: ``(N, L, K)`` ids, of ``resized_trace``.

    Of each step and layer as large a share is right as was in the recording, rounded up or down by chance; the others
    are experts that the step does not need.

    Args:
        trace: Recorded.
        ids: ``(N, L, K)`` that are needed.
        num_experts: E of the shape.
    """
    require(trace.guessed is not None, "guessed=None must be recorded")
    assert trace.guessed is not None
    drawn = torch.Generator().manual_seed(1)
    right = (trace.guessed[..., None] == trace.ids[..., None, :]).any(-1).float().mean(-1)
    num_steps, num_layers, top_k = ids.shape
    shares = right[torch.arange(num_steps) % len(right)][:, torch.arange(num_layers) % right.shape[1]]
    if num_layers > right.shape[1]:  # of a layer that follows the last one, which nothing guessed
        shares[:, right.shape[1] :: right.shape[1]] = right[:, 1:].mean()
    counts = (shares * top_k + torch.rand(shares.shape, generator=drawn)).long().clamp(max=top_k)
    others = torch.rand(num_steps, num_layers, num_experts, generator=drawn).scatter(2, ids, -1.0).topk(top_k).indices
    return torch.where(torch.arange(top_k) < counts[..., None], ids, others)


def _experts_at(places: Sequence[int], stack: Sequence[int]) -> list[int]:
    """The experts at these places; where one is taken, the next that is free.

    Example: places ``[1, 1, 3]`` of ``[7, 5, 6, 4]``: ``[5, 6, 4]``.
    """
    taken: list[int] = []
    for place in places:
        while place in taken:
            place = (place + 1) % len(stack)
        taken.append(place)
    return [stack[place] for place in taken]


def reuse_by_distance(trace: Trace, longest: int) -> tuple[list[float], list[float]]:
    """Share of a step's experts that the step d before used, and that any of the last d used, for d = 1 to longest."""
    used = one_hot(trace)
    size = trace.ids.shape[2]
    exactly: list[float] = []
    within: list[float] = []
    any_before = torch.zeros_like(used)
    for distance in range(1, longest + 1):
        before = torch.zeros_like(used)
        before[distance:] = used[:-distance]
        any_before |= before
        for shares, those in ((exactly, before), (within, any_before)):
            shares.append(float((used & those)[longest:].sum()) / (size * used[longest:, :, 0].numel()))
    return exactly, within


def replayed_hits(trace: Trace, slots: Sequence[int], policy: str) -> list[float]:
    """Share of needed experts that have a slot, for caches of these numbers of slots, empty at first.

    Args:
        trace: What is needed.
        slots: Numbers of slots, each at least K.
        policy: One of ``POLICIES``, or ``BEST``.
    """
    used = one_hot(trace)
    hits = [(held & now).flatten(1).sum(1) for held, now in zip(replay(trace, slots, policy), used, strict=True)]
    return (torch.stack(hits).sum(0) / used.sum()).tolist()


def replay(trace: Trace, slots: Sequence[int] | Tensor, policy: str) -> Iterator[Tensor]:
    """Before each step ``(C, L, E)`` bool, which experts have a slot in each of C caches, empty at first.

    As the kernels decide (``comet.kernels.experts.cache``), but that of experts worth the same the one of the lower
    number stays.

    Args:
        trace: What is needed.
        slots: C numbers of slots of every layer, or ``(C, L)``, of each; at least K.
        policy: One of ``POLICIES``, or ``BEST``.
    """
    require(policy in (*POLICIES, BEST), f"policy={policy!r} must be one of {', '.join((*POLICIES, BEST))}")
    used, sizes = one_hot(trace), torch.as_tensor(slots).view(len(slots), -1, 1)
    num_steps, num_layers, num_experts = used.shape
    held = torch.zeros(len(slots), num_layers, num_experts, dtype=torch.bool)
    worth = torch.zeros(num_layers, num_experts)
    gains = torch.zeros_like(used, dtype=torch.float32)
    gains.scatter_(2, trace.ids, torch.ones_like(trace.weights) if policy == "lfu" else trace.weights)
    following = next_uses(used) if policy == BEST else used
    for step in range(num_steps):
        needed = used[step]
        yield held
        if policy == "lru":
            worth = worth.masked_fill(needed, step + 1.0)
        elif policy == BEST:
            worth = -following[step].float()
        else:
            worth = worth * KEPT.value + gains[step]
        kept = worth.masked_fill(needed, torch.inf).where(held | needed, -torch.inf)
        ranks = kept.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        held = (held | needed) & (ranks < sizes)


def next_uses(used: Tensor) -> Tensor:
    """``(N, L, E)`` int32 of ``used (N, L, E)`` bool: number of the next step in which an expert is used."""
    found = torch.full(used.shape, NEVER, dtype=torch.int32)
    for step in range(len(used) - 2, -1, -1):
        found[step] = found[step + 1].masked_fill(used[step + 1], step + 1)
    return found


def one_hot(trace: Trace) -> Tensor:
    """``(N, L, E)`` bool: which experts each step needs."""
    used = torch.zeros(*trace.ids.shape[:2], trace.num_experts, dtype=torch.bool)
    return used.scatter(2, trace.ids, True)
