"""Shape of a model, a frozen dataclass that validates itself, and how many weights one has."""

from __future__ import annotations

from dataclasses import dataclass

from comet.config import MoEConfig, check_numbers, require

NUM_BYTE_VALUES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a GPT whose feed-forward layers are MoE layers.

    Args:
        name: Goes into checkpoints and messages.
        vocab_size: Token ids; at least 256, because training reads bytes.
        context: Longest sequence, in tokens.
        hidden_size: D, equal to ``moe.hidden_size``.
        num_layers: Transformer blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; must divide ``num_heads``.
        moe: The MoE layer of every block but the first ``dense_layers``.
        dense_layers: Leading blocks with a dense MLP as wide as the experts one token uses.
        head_dim: Width of a head, even; ``None`` means ``hidden_size / num_heads``.
        rope_base: Base of the rotary frequencies.

    Raises:
        ValueError: If a field breaks its rule; the message names field, value and rule.
    """

    name: str
    vocab_size: int = NUM_BYTE_VALUES
    context: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    moe: MoEConfig
    dense_layers: int = 0
    head_dim: int | None = None
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        check_numbers(self)
        require(bool(self.name), f"name={self.name!r} must not be empty")
        require(
            self.vocab_size >= NUM_BYTE_VALUES,
            f"vocab_size={self.vocab_size} must be at least {NUM_BYTE_VALUES}: training reads bytes",
        )
        for name in ("context", "num_layers", "num_heads", "num_kv_heads"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(
            self.hidden_size == self.moe.hidden_size,
            f"hidden_size={self.hidden_size} must equal moe.hidden_size={self.moe.hidden_size}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}",
        )
        require(
            0 <= self.dense_layers <= self.num_layers,
            f"dense_layers={self.dense_layers} must be between 0 and num_layers={self.num_layers}",
        )
        require(self.rope_base > 1, f"rope_base={self.rope_base} must be above 1")
        width, heads = self.head_dim, self.num_heads
        require(width is None or (width >= 2 and width % 2 == 0), f"head_dim={width} must be positive and even")
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
