"""Which experts the tokens of a text go to, one after the other: made, or recorded from a trained model and replayed.

A trace is ``(steps, layers, K)`` int64 expert ids, one token a step. Letters: N steps, L layers, E experts, K experts
of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from comet.config import MoEConfig, require
from comet.models.gpt import GPT
from comet.router.router import Router, Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The routing of a text."""

    ids: Tensor  # (N, L, K) int64, best first
    num_experts: int  # E
    # (N, L, K) int64: where each layer's router sends the tokens of the layer before; of the first layer -1
    guessed: Tensor

    def save(self, path: Path) -> None:
        torch.save(asdict(self) | {"ids": self.ids.short(), "guessed": self.guessed.short()}, path)

    @classmethod
    def load(cls, path: Path) -> Trace:
        require(path.is_file(), f"trace={str(path)!r} must be a file that bench.py experts --source wrote (routing.pt)")
        found, names = torch.load(path, weights_only=True), [field.name for field in fields(cls)]
        known = isinstance(found, dict) and set(found) >= set(names)
        require(known, f"trace={str(path)!r} must hold {', '.join(names)}, as bench.py experts --source writes it")
        ids, guessed = found["ids"].long(), found["guessed"].long()
        return cls(ids=ids, num_experts=found["num_experts"], guessed=guessed)


def record_routing(model: GPT, texts: Sequence[Tensor]) -> Trace:
    """The routing of texts ``(B, P)``, one behind the other; each router is asked a layer ahead, too."""
    routers = [layer.router for layer in model.moe_layers()]
    ids: list[list[Tensor]] = [[] for _ in routers]
    guessed: list[list[Tensor]] = [[] for _ in routers]

    def note(number: int, _: Router, given: tuple[Tensor], routing: Routing) -> None:
        ids[number].append(routing.top_k_ids.cpu())
        if number + 1 < len(routers):
            guessed[number + 1].append(routers[number + 1].forward(*given).top_k_ids.cpu())

    hooks = [router.register_forward_hook(partial(note, number)) for number, router in enumerate(routers)]
    try:
        for text in texts:
            model(text)
    finally:
        for hook in hooks:
            hook.remove()
    first, *others = (torch.cat(layer) for layer in ids)
    found = torch.stack([first, *others], dim=1).long()
    guesses = torch.stack([torch.full_like(first, -1), *map(torch.cat, guessed[1:])], dim=1).long()
    return Trace(ids=found, num_experts=model.config.moe.num_experts, guessed=guesses)


def made_trace(config: MoEConfig, num_layers: int, num_steps: int, sticky: float) -> Tensor:
    """``(N, L, K)`` ids: an expert stays with probability ``sticky``, the others are drawn by a layer's Zipf law."""
    made = torch.Generator().manual_seed(0)
    popularity = torch.stack([torch.randperm(config.num_experts, generator=made) + 1.0 for _ in range(num_layers)])
    ids = torch.multinomial(1 / popularity, config.top_k, generator=made)
    steps = []
    for _ in range(num_steps):
        keeps = torch.rand(ids.shape, generator=made) < sticky
        chances = (1 / popularity).scatter(1, ids, 0.0)  # a dropped expert does not come back in the same step
        drawn = torch.multinomial(chances, config.top_k, generator=made)
        ids = torch.where(keeps, ids, drawn)
        steps.append(ids)
    return torch.stack(steps)


def reuse_distances(ids: Sequence[Sequence[int]], num_experts: int) -> list[list[int]]:
    """How many other experts of a layer were used since each of ``(N, K)`` was; the step itself does not count.

    Example (E = 4, experts never used stand in the order of their numbers): steps ``[[2], [0], [2]]`` give ``[[2], [1],
    [1]]``: 0 and 1 stand before 2, then 2 before 0, then 0 before 2.
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
    slots for a share of the experts hit as they did in the recording, whatever E is. Behind the last step the recording
    starts again.
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
    """Guesses ``(N, L, K)`` of ``ids (N, L, K)``, which ``resized_trace`` made of a trace, of E experts.

    Of each step and layer as large a share is right as was in the recording, rounded up or down by chance; the others
    are experts that the step does not need.
    """
    drawn = torch.Generator().manual_seed(1)
    right = (trace.guessed[..., None] == trace.ids[..., None, :]).any(-1).float().mean(-1)
    num_steps, num_layers, top_k = ids.shape
    shares = right[torch.arange(num_steps) % len(right)][:, torch.arange(num_layers) % right.shape[1]]
    if num_layers > right.shape[1]:  # nothing guessed the layer that follows the last one
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
