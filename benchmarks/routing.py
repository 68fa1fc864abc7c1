"""Synthetic routing, drawn on the device from a seed: uniform, Zipf, or with one hot expert."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.config import require

ROUTINGS = ("uniform", "zipf", "hot")
PERMUTATION_SEED = 20_000


def make_routing(
    kind: str, *, num_tokens: int, num_experts: int, top_k: int, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Draw K distinct experts for each token, and weights that add up to 1.

    ``uniform``: all experts alike. ``zipf``: sampled without replacement, the n-th most popular expert with weight
    1 / n; which one that is comes from one permutation, equal for all seeds and ranks. ``hot``: expert 0 is always the
    first of the K, the others are uniform.

    Args:
        kind: One of the three.
        num_tokens: T.
        num_experts: E.
        top_k: K, at most E.
        seed: Seed of this rank and input set.
        device: Where to draw.

    Returns:
        ``(T, K)`` int32 ids and ``(T, K)`` float32 weights.

    Raises:
        ValueError: If ``kind`` is not one of the three.
    """
    require(kind in ROUTINGS, f"routing={kind!r} must be one of {', '.join(ROUTINGS)}")
    generator = torch.Generator(device).manual_seed(seed)
    # The K largest of log-weight + Gumbel noise are a sample without replacement, in proportion to the weights.
    uniform = torch.rand(num_tokens, num_experts, generator=generator, device=device).clamp_(1e-20, 1 - 1e-7)
    scores = popularity(kind, num_experts, device) - (-uniform.log()).log()
    ids = scores.topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, top_k, generator=generator, device=device) + 0.1
    return ids, weights / weights.sum(1, keepdim=True)


def popularity(kind: str, num_experts: int, device: torch.device | str) -> Tensor:
    """Log-weight of every expert, ``(E,)`` float32, before noise."""
    if kind == "uniform":
        return torch.zeros(num_experts, device=device)
    if kind == "hot":
        return torch.tensor([1e6] + [0.0] * (num_experts - 1), device=device)
    # Drawn on the CPU, so that all devices agree on it.
    place = torch.randperm(num_experts, generator=torch.Generator().manual_seed(PERMUTATION_SEED))
    return -(place + 1).float().log().to(device)
