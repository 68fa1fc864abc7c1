"""transformers' Qwen3-MoE on the tensors of Comet's GPT, and decode steps by its ``generate``.

They differ in details: Comet keeps residual stream, router and norms in float32, transformers in the model's dtype.

Letters: L layers, B sequences, G key and value heads, C positions of the context, w width, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from comet.models.config import ModelConfig
from comet.models.gpt import GPT

NORM_EPSILON = torch.finfo(torch.float32).eps


def library_version() -> str | None:
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    return str(transformers.__version__)


def make_library_model(gpt: GPT, experts: str | None) -> Any:
    """transformers' Qwen3-MoE with the weights of ``gpt``, in evaluation mode; the experts take no further memory.

    Args:
        experts: An experts implementation of transformers; ``None``: the one it takes by itself; ``comet``: Comet's.
    """
    from transformers import AutoModelForCausalLM

    from comet.integrations import hf

    config = library_config(gpt.config)
    chosen = {} if experts is None else {"experts_implementation": "eager" if experts == "comet" else experts}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=gpt.dtype, **chosen)
    model.load_state_dict(library_state(gpt), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(gpt.rotary.device)
    model.requires_grad_(False)
    return hf.convert(model.eval()) if experts == "comet" else model.eval()


def library_config(config: ModelConfig) -> Any:
    from transformers import AutoConfig

    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=config.vocab_size,
        max_position_embeddings=config.context,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_width,
        intermediate_size=config.moe.ffn_size,
        moe_intermediate_size=config.moe.ffn_size,
        num_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.top_k,
        norm_topk_prob=config.moe.renormalize,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=False,
        **no_tokens,
    )


def library_state(gpt: GPT) -> dict[str, Tensor]:
    """The weights under the names of transformers; the large ones are views."""
    config, dtype = gpt.config, gpt.dtype
    width = config.head_width
    rows = [config.num_heads * width, config.num_kv_heads * width, config.num_kv_heads * width]
    ones = torch.ones(width, dtype=dtype, device=gpt.rotary.device)
    state = {
        "model.embed_tokens.weight": gpt.embedding.weight.to(dtype),
        "model.norm.weight": gpt.norm.weight.to(dtype),
        "lm_head.weight": gpt.head.weight,
    }
    blocks: Any = gpt.blocks
    for index, (block, moe) in enumerate(zip(blocks, gpt.moe_layers(), strict=True)):
        attention = block.attention
        parts = attention.qkv.weight.split(rows)
        of_layer = {f"self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        of_layer |= {
            "self_attn.o_proj.weight": attention.out.weight,
            "self_attn.q_norm.weight": ones,
            "self_attn.k_norm.weight": ones,
            "input_layernorm.weight": block.attention_norm.weight.to(dtype),
            "post_attention_layernorm.weight": block.ffn_norm.weight.to(dtype),
            "mlp.gate.weight": moe.router.weight.to(dtype),
            "mlp.experts.gate_up_proj": moe.expert_weights()[0].flatten(1, 2),
            "mlp.experts.down_proj": moe.expert_weights()[1],
        }
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in of_layer.items()}
    return state


class Library:
    """``model.generate`` of transformers as a user calls it, from a context on, without its compiler.

    ``static`` is its static cache, which holds the context.
    """

    def __init__(self, model: Any, static: Any, contents: Tensor) -> None:
        self.model, self.static = model, static
        batch, self._positions = contents.shape[2], contents.shape[4]
        self._ids = torch.zeros(batch, self._positions + 1, dtype=torch.int64, device=contents.device)
        self._mask = torch.ones_like(self._ids)

    def rewind(self) -> None:
        rewind_library(self.static, self._positions)

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        """Append tokens as ``Stepwise.decode`` does; the library's work once for each call counts, too."""
        self._ids[:, -1] = ids
        made: Tensor = self.model.generate(
            self._ids,
            attention_mask=self._mask,
            past_key_values=self.static,
            max_new_tokens=num_steps,
            do_sample=False,
            disable_compile=True,
            pad_token_id=0,
        )
        return made[:, -1]


def fill_library(static: Any, contents: Tensor) -> None:
    """Put the context ``(2, L, B, G, C, w)`` into a static cache of transformers."""
    _, _, batch, num_heads, positions, width = contents.shape
    static.early_initialization(batch, num_heads, width, contents.dtype, contents.device)
    for layer, keys, values in zip(static.layers, *contents, strict=True):
        layer.keys[:, :, :positions], layer.values[:, :, :positions] = keys, values


def rewind_library(static: Any, positions: int) -> None:
    for layer in static.layers:
        layer.cumulative_length.fill_(positions)
