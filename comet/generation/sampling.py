"""Choosing tokens from logits: the most probable one, or a draw among the likely ones.

Draws come from uniform numbers made on the CPU before the first step, so neither the device nor the other sequences of
the batch change what a sequence draws, and a step asks the host nothing.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from comet.generation.config import GenerateConfig


class Sampler:
    """Chooses the next token of every sequence.

    Args:
        config: Read for ``temperature``, ``top_k``, ``top_p``, ``seed`` and ``max_new_tokens``.
        num_sequences: B.
        device: Of the logits.
    """

    def __init__(self, config: GenerateConfig, num_sequences: int, device: torch.device) -> None:
        self.config = config
        draws = [uniform_draws(config.seed, index, config.max_new_tokens) for index in range(num_sequences)]
        self.draws = torch.stack(draws, dim=1).to(device)

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """Choose token number ``step`` of each sequence: ``(B, V)`` float32 -> ``(B,)`` int64."""
        if self.config.temperature == 0:
            return logits.argmax(dim=-1)
        return draw(logits / self.config.temperature, self.draws[step], self.config.top_k, self.config.top_p)


def uniform_draws(seed: int, sequence: int, count: int) -> Tensor:
    """``(count,)`` float64 in [0, 1) that depend on seed and number of the sequence only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{sequence}".encode()))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, uniform: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Draw by inverting the cumulative distribution of the kept tokens, the most probable one first.

    Kept are the ``top_k`` most probable tokens and, of their distribution, the fewest that have at least ``top_p`` of
    the probability. Equal logits keep the order of their ids.

    Example: probabilities 0.5, 0.125, 0.375 and top_p 0.8 keep tokens 0 and 2 with 4/7 and 3/7, so the draw 0.5 gives
    token 0 and the draw 0.6 token 2.

    Args:
        logits: ``(B, V)``.
        uniform: ``(B,)`` float64 in [0, 1).
        top_k: At least 1; ``None`` keeps all.
        top_p: Above 0, at most 1.

    Returns:
        ``(B,)`` int64.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    ordered, ids = ordered[:, :top_k].double(), ids[:, :top_k]
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.where(before < top_p, 0.0)
    cumulative = kept.cumsum(dim=-1)
    passed = cumulative <= uniform[:, None] * cumulative[:, -1:]
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1
    place = passed.sum(dim=-1, keepdim=True).minimum(last)
    return ids.gather(1, place)[:, 0]
