"""Checks of the router's kernels, shared by the interpreter and the GPU tests."""

from __future__ import annotations

import math

import torch

from comet.kernels.router import router_logits, top_k_ids

# T, E, D: tails along every axis, one expert, more tokens than a block.
SIZES = [(1, 8, 64), (17, 16, 48), (70, 60, 112), (33, 1, 16), (5, 130, 64)]


def check_logits(num_tokens: int, num_experts: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    """At most twice as far from float64 as float32 products are; weights of very different sizes."""
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16().to(device)
    scale = 2.0 ** torch.randint(-20, 3, (num_experts, 1), generator=generator)
    weight = (torch.randn(num_experts, hidden_size, generator=generator) * scale).to(dtype).to(device)
    exact = tokens.double() @ weight.double().T
    unit = tokens.double().abs() @ weight.double().abs().T * 2.0**-24  # one rounding of the largest partial sum
    limit = 2 * ((tokens.float() @ weight.float().T - exact).abs() / unit).max() + math.log2(hidden_size)
    error = ((router_logits(tokens, weight) - exact).abs() / unit).max()
    where = f"T={num_tokens} E={num_experts} D={hidden_size} {dtype}"
    assert error <= limit, f"{where}: {error:.1f} units of float32, limit {limit:.1f}"


def draw_scores(num_tokens: int, num_experts: int, seed: int) -> torch.Tensor:
    """Few different values, so that there are ties; infinities of both signs, both zeros, subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, 1e-40, -1e-40, 3.4e38])
    ties = values[torch.randint(0, len(values), (num_tokens, num_experts), generator=generator)]
    numbers = torch.randn(num_tokens, num_experts, generator=generator)
    return torch.where(torch.rand(num_tokens, 1, generator=generator) < 0.5, ties, numbers)


def check_top_k(num_tokens: int, num_experts: int, top_k: int, device: str) -> None:
    """What a stable sort says; with NaN still ids that exist, each once."""
    scores = draw_scores(num_tokens, num_experts, seed=num_tokens + num_experts).to(device)
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    ids = top_k_ids(scores, top_k)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), wanted), f"T={num_tokens} E={num_experts} K={top_k}"
    scores[::2] = math.nan
    scores[1::3, 0] = -math.nan
    ids = top_k_ids(scores, top_k).long()
    assert ((ids >= 0) & (ids < num_experts)).all()
    assert all(row.unique().numel() == top_k for row in ids)
    assert (ids[::2] == torch.arange(top_k, device=device)).all()


def check_top_k_example() -> None:
    assert top_k_ids(torch.tensor([[0.5, 2.0, 0.5, 1.0]]), 3).tolist() == [[1, 3, 0]]
