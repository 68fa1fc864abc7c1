"""How many weights a model has."""

from __future__ import annotations

from comet.models.config import ModelConfig


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
