"""What follows from the distributions p and q of a text's positions about rounds of drafts, with no draw.

``conservative`` keeps a drafted x with probability min(1, p / q); ``adaptive`` where ``q(x) > tau`` and
``p(x) > (1 - T) q(x)``. So ``kept(x)``, the probability that x is drafted and kept, is ``min(p, q)``, or q where the
rule holds. The token of a place has the distribution ``kept + (1 - sum(kept)) p`` in adaptive mode and p in the other.

A round goes on behind a kept draft of ``q >= tau``. That its drafts are those of the text, which has the distribution
p, weighs the next place by ``kept(x) / p(x)`` of the text's x. Each place that is reached makes a token, and one more
comes from p where the last draft was kept and none followed. Rounds begin at all positions alike. Acceptance is that of
drafts behind kept ones; reports of whole runs count those behind a refused one, too.

Letters: B sequences, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lib.report import Row

BINS = 10  # of a draft's confidence


def kept_drafts(p: Tensor, q: Tensor, tau: float, tolerance: float | None) -> Tensor:
    """``(..., V)``: the probability of every token to be drafted and kept.

    Example (tau = 0.5): p = ``[0.4, 0.6]``, q = ``[0.8, 0.2]``: ``conservative`` keeps ``[0.4, 0.2]``, ``adaptive``
    with T = 0.6 ``[0.8, 0]`` (0.4 > 0.4 * 0.8, and 0.2 is not above tau), with T = 0.4 nothing.

    Args:
        p: ``(..., V)`` float64.
        q: ``(..., V)`` float64.
        tau: See above.
        tolerance: T; ``None``: conservative mode.
    """
    if tolerance is None:
        return torch.minimum(p, q)
    return q * ((q > tau) & (p > (1 - tolerance) * q))


def of_positions(p: Tensor, q: Tensor, targets: Tensor, tau: float, tolerance: float | None) -> dict[str, Tensor]:
    """What a mode does at every position.

    Example (tau = 0.5, T = 0.6): p = ``[0.4, 0.6]``, q = ``[0.8, 0.2]`` accept 0.8; the token is 0 with 0.8 + 0.2 * 0.4
    = 0.88, and 1 - |0.88 - 0.4| = 0.52 of the tokens are what p gives. Where the text has token 0, ``log(0.4 / 0.88)``
    is the loss it adds, and the next place weighs 0.8 / 0.4 = 2.

    Args:
        p: ``(B, P, V)`` float64.
        q: ``(B, P, V)`` float64.
        targets: ``(B, P)`` int64, tokens of the text.
        tau: See above.
        tolerance: T; ``None``: conservative mode.

    Returns:
        ``(B, P)`` each: ``accepted``, ``nll_added``, ``agreement``, ``goes_on``.
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
    """Means over the rounds of a mode that begin at all positions of some texts.

    Args:
        tau: See above.
        tolerance: T; ``None``: conservative mode.
        depth: Longest draft; the first so many positions of a text are left out.
    """

    def __init__(self, tau: float, tolerance: float | None, depth: int) -> None:
        self.tau, self.tolerance, self.depth = tau, tolerance, depth
        self._found: list[list[Tensor]] = [[] for _ in range(depth)]
        self._weight = torch.empty(0)

    def add(self, place: int, p: Tensor, q: Tensor, targets: Tensor) -> None:
        """Count drafts number ``place``, from 0 on, of texts; see ``of_positions``. Those of a text come in order."""
        found = of_positions(p, q, targets, self.tau, self.tolerance)
        weight = torch.ones_like(found["accepted"]) if place == 0 else self._weight
        kept = torch.stack([weight, *(found[name] for name in ("accepted", "nll_added", "agreement"))])
        self._found[place].append(kept[..., self.depth :].flatten(1).cpu())
        self._weight = (weight * found["goes_on"]).roll(1, dims=1)
        self._weight[:, 0] = 0

    def by_position(self) -> list[Row]:
        """A row for each place: how often it is reached, and means where it is."""
        rows = []
        for place, parts in enumerate(self._found):
            weight, accepted, added, agreement = torch.cat(parts, dim=1)
            total = weight.sum()
            row: Row = {"tolerance": self.tolerance, "position": place + 1, "reached": float(weight.mean())}
            if total > 0:
                mean = (weight * added).sum() / total
                row |= {
                    "acceptance": float((weight * accepted).sum() / total),
                    "nll_added": float(mean),
                    "standard_error": float((weight * (added - mean)).square().sum().sqrt() / total),
                    "agreement": float((weight * agreement).sum() / total),
                }
            rows.append(row)
        return rows

    def summary(self) -> Row:
        """Per token of whole rounds; what comes behind them from p adds no loss and agrees."""
        rows = [row for row in self.by_position() if row["reached"] > 0]
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


def by_confidence(p: Tensor, q: Tensor) -> Tensor:
    """``(2, BINS)`` float64: expected drafts whose q is in each tenth, and those that conservative mode accepts."""
    places = (q * BINS).long().clamp(max=BINS - 1).flatten()
    found = torch.zeros(2, BINS, dtype=q.dtype, device=q.device)
    return found.scatter_add(1, places.expand(2, -1), torch.stack([q.flatten(), torch.minimum(p, q).flatten()]))


def confidence_rows(bins: Tensor) -> Sequence[Row]:
    """Rows of ``by_confidence``."""
    return [
        {"from": number / BINS, "drafts": drafts, "acceptance": accepted / drafts if drafts else None}
        for number, (drafts, accepted) in enumerate(bins.T.tolist())
    ]
