"""The MoE layers that are measured: routing is given from outside, so only the four sizes matter."""

from __future__ import annotations

from dataclasses import replace

from comet.config import MoEConfig, require

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
