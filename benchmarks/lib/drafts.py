"""What drafts with few experts are worth on text that the model has not seen, and what adaptive mode costs there.

The text is given, not generated (teacher forcing), so that every position has the distribution p of all K experts and
those of drafts: q_d is what the d-th drafted token of a round is drawn from. As in decoding, its pass sees keys and
values of the r-expert passes at the d - 1 positions before it and its own, and those of all K experts at all earlier
ones. That the drafts before it are those of the text is the condition that they were right. All at temperature 1.

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

from lib.report import Row
from lib.traces import Trace

KeysValues = tuple[Tensor, Tensor]


class RecordingRouter:
    """A layer's router, which keeps its last decision, and what that of the next layer says of the same tokens."""

    def __init__(self, router: Router, following: Router | None) -> None:
        self.router = router
        self.following = following
        self.measure = router.measure
        self.ids = self.guessed = torch.empty(0)

    def __call__(self, tokens: Tensor) -> Routing:
        routing = self.router(tokens)
        self.ids = routing.top_k_ids
        self.guessed = torch.full_like(self.ids, -1) if self.following is None else self.following(tokens).top_k_ids
        return routing


def record_routing(model: GPT, batches: Sequence[Tensor]) -> Trace:
    """The routing of texts ``(B, P)`` by all K experts, one text behind the other."""
    routers = [layer.router for layer in model.moe_layers()]
    recording = [RecordingRouter(*pair) for pair in zip(routers, [*routers[1:], None], strict=True)]
    ids, guessed = [], []
    for batch in batches:
        whole_pass(model, batch, recording)
        ids.append(torch.stack([router.ids for router in recording], dim=1).cpu())
        guessed.append(torch.stack([router.guessed for router in recording], dim=1).roll(1, dims=1).cpu())
    experts = model.config.moe.num_experts
    return Trace(ids=torch.cat(ids).long(), num_experts=experts, guessed=torch.cat(guessed).long())


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
        query: ``(B, H, P, w)``, as the result.
        key: ``(B, G, P, w)``.
        value: ``(B, G, P, w)``.
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


def measure_drafts(
    model: GPT, batches: Sequence[Tensor], config: SpeculationConfig, tolerances: Sequence[float], num_tokens: int
) -> list[Row]:
    """What the modes make of drafts: conservative mode, whose ``tolerance`` is ``None``, and adaptive mode at each T.

    Args:
        model: With experts for any number of tokens.
        batches: ``(B, P + 1)`` int64 texts that training has not seen.
        config: r, the longest draft and tau.
        tolerances: T.
        num_tokens: Logits of higher ids are no tokens.
    """
    layers, depth = model.moe_layers(), config.draft_tokens
    chosen = config.experts_per_layer(model.config.moe.top_k, len(layers))
    routers = [DraftRouter(layer.router, r) for layer, r in zip(layers, chosen, strict=True)]
    modes = [Rounds(config.tau, tolerance, depth) for tolerance in (None, *tolerances)]
    for batch in batches:
        ids, targets = batch[:, :-1], batch[:, 1:]
        logits, whole = whole_pass(model, ids)
        p = logits[..., :num_tokens].double().softmax(-1)
        for place, drafted in enumerate(draft_passes(model, ids, whole, routers, depth)):
            q = drafted[..., :num_tokens].double().softmax(-1)
            for mode in modes:
                mode.add(place, p, q, targets)
    return [mode.summary() for mode in modes]


def kept_drafts(p: Tensor, q: Tensor, tau: float, tolerance: float | None) -> Tensor:
    """``(..., V)`` of p and q ``(..., V)``: the probability of every token to be drafted and kept, with no draw.

    Conservative mode (``tolerance=None``) keeps a drafted x with probability min(1, p / q); adaptive mode with T where
    ``q(x) > tau`` and ``p(x) > (1 - T) q(x)``.

    Example (tau = 0.5): p = ``[0.4, 0.6]``, q = ``[0.8, 0.2]``: conservative keeps ``[0.4, 0.2]``, adaptive with T =
    0.6 ``[0.8, 0]`` (0.4 > 0.4 * 0.8, and 0.2 is not above tau), with T = 0.4 nothing.
    """
    if tolerance is None:
        return torch.minimum(p, q)
    return q * ((q > tau) & (p > (1 - tolerance) * q))


def of_positions(p: Tensor, q: Tensor, targets: Tensor, tau: float, tolerance: float | None) -> dict[str, Tensor]:
    """What a mode does at every position, ``(B, P)`` each: ``accepted``, ``nll_added``, ``agreement``, ``goes_on``.

    The token of a place has the distribution ``kept + (1 - sum(kept)) p`` in adaptive mode and p in the other. A round
    goes on behind a kept draft of ``q >= tau``. That its drafts are those of the text, which has the distribution p,
    weighs the next place by ``kept(x) / p(x)`` of the text's x.

    Example (tau = 0.5, T = 0.6): p = ``[0.4, 0.6]``, q = ``[0.8, 0.2]`` accept 0.8; the token is 0 with 0.8 + 0.2 * 0.4
    = 0.88, and 1 - |0.88 - 0.4| = 0.52 of the tokens are what p gives. Where the text has token 0, ``log(0.4 / 0.88)``
    is the loss it adds, and the next place weighs 0.8 / 0.4 = 2.

    Args:
        p: ``(B, P, V)`` float64.
        q: ``(B, P, V)`` float64.
        targets: ``(B, P)`` int64, tokens of the text.
        tau: Least confidence of a draft.
        tolerance: T; ``None``: conservative mode.
    """
    kept = kept_drafts(p, q, tau, tolerance)
    accepted = kept.sum(-1)
    mixed = p if tolerance is None else kept + (1 - accepted)[..., None] * p
    kept_text, p_text, q_text, mixed_text = (
        each.gather(-1, targets[..., None])[..., 0] for each in (kept, p, q, mixed)
    )
    return {
        "accepted": accepted,
        "nll_added": (p_text / mixed_text).log(),
        "agreement": torch.minimum(p, mixed).sum(-1),
        "goes_on": kept_text / p_text * (q_text >= tau),
    }


class Rounds:
    """Means over the rounds of a mode that begin at all positions of some texts, but the first ``depth``."""

    def __init__(self, tau: float, tolerance: float | None, depth: int) -> None:
        self.tau, self.tolerance, self.depth = tau, tolerance, depth
        self._found: list[list[Tensor]] = [[] for _ in range(depth)]
        self._weight = torch.empty(0)

    def add(self, place: int, p: Tensor, q: Tensor, targets: Tensor) -> None:
        """Count drafts number ``place``, from 0 on, of texts; those of a text come in order."""
        found = of_positions(p, q, targets, self.tau, self.tolerance)
        weight = torch.ones_like(found["accepted"]) if place == 0 else self._weight
        kept = torch.stack([weight, *(found[name] for name in ("accepted", "nll_added", "agreement"))])
        self._found[place].append(kept[..., self.depth :].flatten(1).cpu())
        self._weight = (weight * found["goes_on"]).roll(1, dims=1)
        self._weight[:, 0] = 0

    def by_position(self) -> list[Row]:
        """A row for each place that is reached: how often, and means where it is."""
        rows = []
        for parts in self._found:
            weight, accepted, added, agreement = torch.cat(parts, dim=1)
            total = weight.sum()
            if total > 0:
                mean = (weight * added).sum() / total
                rows.append({
                    "reached": float(weight.mean()),
                    "acceptance": float((weight * accepted).sum() / total),
                    "nll_added": float(mean),
                    "standard_error": float((weight * (added - mean)).square().sum().sqrt() / total),
                    "agreement": float((weight * agreement).sum() / total),
                })  # fmt: skip
        return rows

    def summary(self) -> Row:
        """Per token of whole rounds, each with one token from p behind its drafts, which adds no loss and agrees.

        Acceptance is that of drafts behind kept ones; reports of whole runs count those behind a refused one, too.
        """
        rows = self.by_position()
        drafted = sum(row["reached"] for row in rows)
        accepted = sum(row["reached"] * row["acceptance"] for row in rows)
        tokens = 1 + accepted
        return {
            "tolerance": self.tolerance,
            "tokens_per_round": tokens,
            "drafted_per_round": drafted,
            "acceptance": accepted / drafted,
            "nll_added": sum(row["reached"] * row["nll_added"] for row in rows) / tokens,
            "standard_error": sum((row["reached"] * row["standard_error"]) ** 2 for row in rows) ** 0.5 / tokens,
            "agreement": 1 - sum(row["reached"] * (1 - row["agreement"]) for row in rows) / tokens,
        }
