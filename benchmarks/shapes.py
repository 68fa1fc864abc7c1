"""The MoE layers that are measured: routing is given from outside, so only the four sizes matter."""

from __future__ import annotations

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
    """The layer called ``name``; raises ``ValueError`` naming those that exist."""
    require(name in MODELS, f"models={name!r} must be one of {', '.join(MODELS)}")
    return MODELS[name]
