"""Shape of a model, a frozen dataclass that validates itself, and how many weights one has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from comet import limits
from comet.config import MoEConfig, require

NUM_BYTE_VALUES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a GPT whose feed-forward layers are MoE layers.

    Args:
        name: Goes into checkpoints and messages.
        vocab_size: Token ids.
        context: Longest sequence, in tokens.
        hidden_size: D.
        num_layers: Transformer blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        moe: The MoE layer of every block but the first ``dense_layers``.
        dense_layers: Leading blocks with a dense MLP as wide as the experts one token uses.
        head_dim: Width of a head; ``None`` means ``hidden_size / num_heads``.
        rope_base: Base of the rotary frequencies.
    """

    name: Annotated[str, limits.filled("at least one character")]
    vocab_size: Annotated[int, limits.at_least(NUM_BYTE_VALUES, "training reads bytes")] = NUM_BYTE_VALUES
    context: limits.Count
    hidden_size: Annotated[int, limits.equal_to("moe.hidden_size")]
    num_layers: limits.Count
    num_heads: limits.Count
    num_kv_heads: Annotated[int, limits.divisor_of("num_heads")]
    moe: MoEConfig
    dense_layers: Annotated[int, limits.at_least(0), limits.at_most("num_layers")] = 0
    head_dim: Annotated[int, limits.at_least(2), limits.multiple_of(2)] | None = None
    rope_base: Annotated[float, limits.above(1)] = 10_000.0

    def __post_init__(self) -> None:
        limits.check(self)
        width, heads = self.head_dim, self.num_heads
        require(
            width is not None or self.hidden_size % (2 * heads) == 0,
            f"num_heads={heads} must divide hidden_size={self.hidden_size} into even heads (or give head_dim)",
        )

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def dense_ffn_size(self) -> int:
        """Width of the MLP of a dense block: ``top_k * ffn_size + shared_ffn_size`` of the MoE layer.

        Example: DeepSeek-V3: 8 * 2048 + 2048 = 18432, its published width.
        """
        return self.moe.top_k * self.moe.ffn_size + self.moe.shared_ffn_size


def dense_elements(model: ModelConfig) -> int:
    """Weights that a decode step reads whatever the routing: all but the embedding and the routed experts.

    Example: vocabulary 256, D=128, 4 layers of 4 heads, 8 experts: 32768 elements of the head, per layer 65536
    attention, 1024 router and 256 norm elements, 128 in the last norm: 300160 in all.
    """
    width, moe = model.hidden_size, model.moe
    attention = 2 * width * model.head_width * (model.num_heads + model.num_kv_heads)
    sparse = width * moe.num_experts + 3 * width * moe.shared_ffn_size
    dense = 3 * width * model.dense_ffn_size
    sparse_layers = model.num_layers - model.dense_layers
    layers = model.num_layers * (attention + 2 * width) + sparse_layers * sparse + model.dense_layers * dense
    return model.vocab_size * width + layers + width


def expert_elements(model: ModelConfig) -> int:
    """Weights of the routed experts of all layers.

    Example: 8 of D=128, F=128 in each of 4 layers: 1572864, with biases 1585152.
    """
    moe, width = model.moe, model.hidden_size
    expert = 3 * width * moe.ffn_size + (2 * moe.ffn_size + width if moe.expert_bias else 0)
    return (model.num_layers - model.dense_layers) * moe.num_experts * expert
