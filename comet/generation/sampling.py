"""Choosing tokens from logits: the most probable one, or a draw among the likely ones.

Draws come from uniform numbers made on the CPU before the first step, so neither the device nor the other sequences of
the batch change what a sequence draws, and a step asks the host nothing.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from comet.comm.collectives import of_first_rank
from comet.jobs.generate import GenerateConfig

NO_TOKEN = -1  # stands in the place of a token where the model made NaN or infinity


class Sampler:
    """Chooses the next token of every sequence.

    Args:
        num_tokens: Logits of higher ids are no tokens; ``None``: all are.
        seen: ``(B, num_tokens)`` bool, tokens that each sequence has, which ``repetition_penalty`` is for
            (``tokens_seen``); ``None``: nothing is penalised.
    """

    def __init__(
        self,
        config: GenerateConfig,
        num_sequences: int,
        device: torch.device,
        *,
        num_tokens: int | None = None,
        seen: Tensor | None = None,
    ) -> None:
        self.config = config
        self.num_tokens = num_tokens
        self.seen = seen
        draws = [uniform_draws(config.seed, index, config.max_new_tokens) for index in range(num_sequences)]
        self.draws = torch.stack(draws, dim=1).to(device)

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """Choose token number ``step`` of each sequence, the same on every rank, and note it.

        ``(B, V)`` float32 -> ``(B,)`` int64; ``NO_TOKEN`` where logits are not ``finite``.
        """
        scaled = self.scaled(logits, self.seen)
        if self.config.temperature == 0:
            tokens = scaled.argmax(dim=-1)
        else:
            tokens = draw(scaled, self.draws[step], self.config.top_k, self.config.top_p)
        chosen = of_first_rank(token_or_none(tokens, finite(logits, scaled)))
        self.seen = with_token(self.seen, chosen)
        return chosen

    def probabilities(self, logits: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Probabilities ``(..., V)`` float64 after penalties for ``seen (..., V)``, temperature, top-k and top-p; and
        whether each row is of ``finite`` logits: others have no probabilities.
        """
        scaled = self.scaled(logits, seen)
        rows = scaled.flatten(0, -2)
        kept, ids = likely(rows, self.config.top_k, self.config.top_p)
        kept = kept / kept.sum(dim=-1, keepdim=True)
        found = torch.zeros_like(rows, dtype=kept.dtype).scatter(1, ids, kept).view(scaled.shape)
        return found, finite(logits, scaled)

    def scaled(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """``penalised`` logits divided by the temperature, where that is not 0."""
        penalised = self.penalised(logits, seen)
        return penalised / self.config.temperature if self.config.temperature else penalised

    def certain(self, probabilities: Tensor) -> Tensor:
        """Return the distribution that tokens are drawn from: at temperature 0 the most probable one has all of it."""
        if self.config.temperature > 0:
            return probabilities
        best = probabilities.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, best, 1.0)

    def penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Logits ``(..., V)`` of all tokens, those ``seen (..., V)`` made less likely."""
        logits, penalty = logits[..., : self.num_tokens], self.config.repetition_penalty
        if seen is None:
            return logits
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def tokens_seen(ids: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """``(B, num_tokens)`` bool: the tokens of prompts ``ids (B, S)`` of ``lengths (B,)``."""
    behind = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
    table = torch.zeros(ids.shape[0], num_tokens + 1, dtype=torch.bool, device=ids.device)
    return table.scatter(1, ids.masked_fill(behind, num_tokens), True)[:, :num_tokens]


def uniform_draws(seed: int, sequence: int, count: int) -> Tensor:
    """``(count,)`` float64 in [0, 1) that depend on seed and number of the sequence only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{sequence}".encode()))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, uniform: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Draw ``(B,)`` tokens of logits ``(B, V)`` by ``uniform (B,)`` float64 in [0, 1), the most probable ones first.

    Example: probabilities 0.5, 0.125, 0.375 and top_p 0.8 keep tokens 0 and 2 with 4/7 and 3/7, so the draw 0.5 gives
    token 0 and the draw 0.6 token 2.
    """
    kept, ids = likely(logits, top_k, top_p)
    return ids.gather(1, pick(kept, uniform)[:, None])[:, 0]


def likely(logits: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The ``top_k`` most probable tokens and, of their distribution, the fewest with at least ``top_p`` of it.

    Probabilities ``(B, top_k)`` float64, the most probable first, 0 for what ``top_p`` leaves out, not renormalised;
    and the ids, of which equally probable ones stay in their order.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    ordered, ids = ordered[:, :top_k].double(), ids[:, :top_k]
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return probabilities.where(before < top_p, 0.0), ids


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverting the cumulative sum of weights; one of weight 0 is never drawn.

    Example: weights ``[1, 0, 3]`` give 0 for the draw 0.2 and 2 for the draws 0.25 and 0.9.
    """
    cumulative = weights.cumsum(dim=-1)
    passed = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(dim=-1)
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1)
    return passed.minimum(last)


def with_token(seen: Tensor | None, tokens: Tensor) -> Tensor | None:
    """``seen (B, V)`` with one more token ``(B,)`` of each sequence; ``None`` stays."""
    return None if seen is None else seen.scatter(1, tokens.clamp(min=0)[:, None], True)


def finite(logits: Tensor, scaled: Tensor) -> Tensor:
    """``(...)``: whether the largest of the logits ``(..., V)``, and of the scaled ones, is finite.

    Minus infinity rules a token out, and is no fault unless all tokens are ruled out.
    """
    return logits.amax(-1).isfinite() & scaled.amax(-1).isfinite()


def token_or_none(tokens: Tensor, is_finite: Tensor) -> Tensor:
    """``tokens (B,)``, and ``NO_TOKEN`` unless the logits that they were chosen by are ``finite``."""
    return torch.where(is_finite, tokens, NO_TOKEN)
