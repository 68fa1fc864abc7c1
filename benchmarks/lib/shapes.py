"""What is measured: MoE layers, of which only the four sizes matter, the routing of their tokens, their splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, require

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


NUMBERS = ("comm_blocks", "num_panels", "num_phases", "beside")
RULE = "must be comm_blocks=N, num_panels=N, num_phases=N, beside=0 or transport=copy"


def parse_overlap(text: str, option: str) -> OverlapConfig:
    """Read ``comm_blocks=16,beside=0``: 16 comm blocks, not beside compute blocks, and the defaults of all else.

    Args:
        text: Pairs of name and value between commas.
        option: Name of the command line's option, for the message.

    Raises:
        ValueError: If a pair is none, its name is unknown or its value impossible.
    """
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        known = value.isalpha() if name == "transport" else name in NUMBERS and value.isdigit()
        require(known, f"{option}={pair!r} {RULE}")
        values[name] = value if name == "transport" else bool(int(value)) if name == "beside" else int(value)
    return OverlapConfig(**values)


MODELS = {
    "mixtral_8x7b": MoEConfig(num_experts=8, top_k=2, hidden_size=4096, ffn_size=14336),
    "qwen2_moe": MoEConfig(num_experts=64, top_k=4, hidden_size=2048, ffn_size=1408),
    "phi35_moe": MoEConfig(num_experts=16, top_k=2, hidden_size=4096, ffn_size=6400),
    "qwen3_30b_a3b": MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768),
    "deepseek_v3": MoEConfig(num_experts=256, top_k=8, hidden_size=7168, ffn_size=2048),
    "tiny": MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64),
}


def model(name: str) -> MoEConfig:
    """The layer called ``name``, or one rank's share of its experts: ``mixtral_8x7b/4`` has 2 of the 8.

    Raises:
        ValueError: If there is no such layer, or its experts do not divide into so many shares that hold top-k.
    """
    whole, _, ranks = name.partition("/")
    require(whole in MODELS, f"models={name!r} must be one of {', '.join(MODELS)}")
    if not ranks:
        return MODELS[whole]
    num_experts = MODELS[whole].num_experts
    require(
        ranks.isdigit() and int(ranks) > 0 and num_experts % int(ranks) == 0,
        f"models={name!r}: {num_experts} experts must be divisible by the number after '/'",
    )
    return replace(MODELS[whole], num_experts=num_experts // int(ranks))
