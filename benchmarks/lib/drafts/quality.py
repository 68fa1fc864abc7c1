"""What drafts with few experts are worth on text that the model has not seen, and what adaptive mode costs there.

The text is given, not generated (teacher forcing), so that every position has the distribution p of all K experts and
those of drafts: q_d is what the d-th drafted token of a round is drawn from. As in decoding, its pass sees keys and
values of the r-expert passes at the d - 1 positions before it and its own, and those of all K experts at all earlier
ones. That the drafts before it are those of the text is the condition that they were right.

What follows from p and q is in ``statistics.py``. All at temperature 1.

Letters: B sequences, P positions, V vocabulary, K experts of a token, r of a draft, d depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from comet.config import SpeculationConfig
from comet.experts import DraftRouter
from comet.models.cache import attend_causally
from comet.models.gpt import GPT
from comet.moe import MoE
from comet.router.router import Router, Routes, Routing

from lib.drafts.statistics import BINS, Rounds, by_confidence, confidence_rows
from lib.report import Row
from lib.routing.traces import Trace

KeysValues = tuple[Tensor, Tensor]


class RecordingRouter:
    """A layer's router, which keeps its last decision, and what those of the next layers say of the same tokens.

    Args:
        router: Of the layer.
        following: Of the next two; ``None``: there is none.
    """

    def __init__(self, router: Router, following: Sequence[Router | None]) -> None:
        self.router = router
        self.following = following
        self.measure = router.measure
        self.ids = self.weights = torch.empty(0)
        self.guessed: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> Routing:
        routing = self.router(tokens)
        self.ids, self.weights = routing.top_k_ids, routing.top_k_weights
        self.guessed = [
            torch.full_like(self.ids, -1) if router is None else router(tokens).top_k_ids for router in self.following
        ]
        return routing


def whole_pass(model: GPT, ids: Tensor, routers: Sequence[Routes] | None = None) -> tuple[Tensor, list[KeysValues]]:
    """``(B, P, V)`` logits of ``ids (B, P)``, every position attending to those before it, and all keys and values."""
    kept: list[KeysValues] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.append((key, value))
        return attend_causally(query, key, value)

    return _logits(model, ids, [attend] * len(model.blocks), routers), kept


def draft_passes(
    model: GPT, ids: Tensor, whole: list[KeysValues], routers: Sequence[Routes], depth: int
) -> Iterator[Tensor]:
    """``(B, P, V)`` logits that the 1st, 2nd, ... draft of a round comes from, had it begun so many tokens before.

    Args:
        model: With experts for any number of tokens.
        ids: ``(B, P)`` int64.
        whole: Keys and values of ``whole_pass``.
        routers: Of the drafts.
        depth: How many; positions before d - 1 of the d-th mean nothing.
    """
    earlier: list[list[KeysValues]] = []
    for _ in range(depth):
        mine: list[KeysValues] = []
        sources = [[of_pass[layer] for of_pass in (whole, *earlier)] for layer in range(len(whole))]
        yield _logits(model, ids, [partial(attend_to_drafts, each, mine) for each in sources], routers)
        earlier.append(mine)


def attend_to_drafts(
    sources: Sequence[KeysValues], mine: list[KeysValues], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention of the d-th draft of a round at every position: d - 1 drafts and itself, and the whole model before.

    Example (d = 2): position 5 gathers from positions 0 to 3 of the whole model, 4 of the first drafts, and itself.

    Args:
        sources: Keys and values ``(B, G, P, w)`` of the whole model, then of the 1st to (d - 1)-th drafts.
        mine: These of the d-th are appended.
        query: ``(B, H, P, w)``.
        key: ``(B, G, P, w)``.
        value: ``(B, G, P, w)``.

    Returns:
        ``(B, H, P, w)``.
    """
    mine.append((key, value))
    (whole_keys, whole_values), *drafts = sources
    drafts = [*drafts, (key, value)]
    depth, positions = len(drafts), torch.arange(query.shape[2], device=query.device)
    spread = partial(torch.repeat_interleave, repeats=query.shape[1] // key.shape[1], dim=1)
    unseen = positions > positions[:, None] - depth
    scores = [(query @ spread(whole_keys).mT).float().masked_fill(unseen, -torch.inf)]
    values = []
    for back, (keys, own_values) in zip(range(depth - 1, -1, -1), drafts, strict=True):
        there = (query.float() * spread(keys).float().roll(back, dims=2)).sum(-1, keepdim=True)
        scores.append(there.masked_fill((positions < back)[:, None], -torch.inf))
        values.append(spread(own_values).roll(back, dims=2))
    shares = (torch.cat(scores, dim=-1) * query.shape[3] ** -0.5).softmax(-1).to(value.dtype)
    mixed = shares[..., : len(positions)] @ spread(whole_values)
    return mixed + sum(shares[..., len(positions) + place, None] * each for place, each in enumerate(values))


def _logits(
    model: GPT, ids: Tensor, attends: Sequence[Callable[..., Tensor]], routers: Sequence[Routes] | None
) -> Tensor:
    others = iter(routers or ())
    with torch.autocast(ids.device.type, model.dtype, enabled=model.dtype != torch.float32):
        x = model.embedding(ids)
        for block, attend in zip(model.blocks, attends, strict=True):
            router = next(others, None) if isinstance(block.ffn, MoE) else None
            x, _ = block(x, model.rotary[:, : ids.shape[1]], attend, router)
        return model.head(model.norm(x)).float()


def record_routing(model: GPT, batches: Sequence[Tensor]) -> Trace:
    """The routing of texts ``(B, P)`` by all K experts, one text behind the other."""
    layers = model.moe_layers()
    of_layers = [*(layer.router for layer in layers), None, None]
    routers = [RecordingRouter(layer.router, of_layers[number + 1 : number + 3]) for number, layer in enumerate(layers)]
    ids, weights = [], []
    guesses: tuple[list[Tensor], list[Tensor]] = ([], [])
    for batch in batches:
        whole_pass(model, batch, routers)
        ids.append(torch.stack([router.ids for router in routers], dim=1).cpu())
        weights.append(torch.stack([router.weights for router in routers], dim=1).float().cpu())
        for ahead, found in enumerate(guesses):
            named = torch.stack([router.guessed[ahead] for router in routers], dim=1)
            found.append(named.roll(ahead + 1, dims=1).cpu())
    return Trace(
        ids=torch.cat(ids).long(),
        weights=torch.cat(weights),
        num_experts=layers[0].config.num_experts,
        guessed=torch.cat(guesses[0]).long(),
        guessed_in_two=torch.cat(guesses[1]).long(),
    )


def measure_drafts(
    model: GPT, batches: Sequence[Tensor], config: SpeculationConfig, tolerances: Sequence[float], num_tokens: int
) -> Row:
    """What adaptive mode costs at each T, and how many drafts are accepted, by place and by confidence.

    Args:
        model: With experts for any number of tokens.
        batches: ``(B, P + 1)`` int64 texts that training has not seen.
        config: r, the longest draft and tau.
        tolerances: T.
        num_tokens: Logits of higher ids are no tokens.

    Returns:
        ``nll`` of p in nats a token, and rows ``modes``, ``by_position`` and ``by_confidence``
        (``statistics.py``); conservative mode has ``tolerance`` ``None``.
    """
    layers, depth = model.moe_layers(), config.draft_tokens
    chosen = config.experts_per_layer(model.config.moe.top_k, len(layers))
    routers = [DraftRouter(layer.router, r) for layer, r in zip(layers, chosen, strict=True)]
    modes = [Rounds(config.tau, tolerance, depth) for tolerance in (None, *tolerances)]
    bins, losses = torch.zeros(2, BINS, dtype=torch.float64), []
    for batch in batches:
        ids, targets = batch[:, :-1], batch[:, 1:]
        logits, whole = whole_pass(model, ids)
        p = _probabilities(logits, num_tokens)
        losses.append(-p.gather(2, targets[..., None]).log()[:, depth:].flatten())
        for place, drafted in enumerate(draft_passes(model, ids, whole, routers, depth)):
            q = _probabilities(drafted, num_tokens)
            for mode in modes:
                mode.add(place, p, q, targets)
            if place == 0:
                bins += by_confidence(p[:, depth:], q[:, depth:]).cpu()
    return {
        "draft_experts": list(chosen),
        "tau": config.tau,
        "tokens": sum(map(len, losses)),
        "nll": float(torch.cat(losses).mean()),
        "modes": [mode.summary() for mode in modes],
        "by_position": [row for mode in modes for row in mode.by_position()],
        "by_confidence": confidence_rows(bins),
    }


def measure_top_r(model: GPT, batches: Sequence[Tensor], num_tokens: int) -> list[Row]:
    """Loss with the best r experts of each layer, for r = 1 to K, in nats a token.

    Args:
        model: With experts for any number of tokens.
        batches: ``(B, P + 1)`` int64.
        num_tokens: Logits of higher ids are no tokens.

    Returns:
        A row for each r: ``nll_draft`` where only the newest token has r experts, as in a round's first draft,
        ``nll_all`` where all tokens have, and ``acceptance`` of the first.
    """
    layers, rows = model.moe_layers(), []
    for r in range(1, model.config.moe.top_k + 1):
        routers = [DraftRouter(layer.router, r) for layer in layers]
        losses = []
        for batch in batches:
            ids, targets = batch[:, :-1], batch[:, 1:, None]
            logits, whole = whole_pass(model, ids)
            p = _probabilities(logits, num_tokens)
            q = _probabilities(next(draft_passes(model, ids, whole, routers, 1)), num_tokens)
            everywhere = _probabilities(whole_pass(model, ids, routers)[0], num_tokens)
            found = [
                -q.gather(2, targets).log(),
                -everywhere.gather(2, targets).log(),
                torch.minimum(p, q).sum(2, True),
            ]
            losses.append(torch.stack([each.mean() for each in found]))
        draft, everywhere_nll, acceptance = torch.stack(losses).mean(0).tolist()
        rows.append({"r": r, "nll_draft": draft, "nll_all": everywhere_nll, "acceptance": acceptance})
    return rows


def _probabilities(logits: Tensor, num_tokens: int) -> Tensor:
    return logits[..., :num_tokens].double().softmax(-1)
