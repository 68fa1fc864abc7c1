"""Models for the generation benchmark: Comet's GPT with random weights made on the device, and transformers' Qwen3-MoE.

The second stands on the tensors of the first. They differ in details: Comet keeps residual stream, router and norms in
float32, transformers keeps them in the model's dtype.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shapes import MODELS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from comet.config import MoEConfig
from comet.generation.engine import GPTEngine
from comet.group import ExpertGroup
from comet.models.config import ModelConfig
from comet.models.gpt import GPT

# Fields of ModelConfig beside name, context, layers and the MoE layer, with which hidden_size goes.
ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": dict(vocab_size=151_936, num_heads=32, num_kv_heads=4, head_dim=128),
    "tiny": dict(vocab_size=256, num_heads=4, num_kv_heads=2),
}
NORM_EPSILON = torch.finfo(torch.float32).eps


def model_config(name: str, num_layers: int, context: int) -> ModelConfig:
    """The shape called ``name``, with this many layers and room for this many positions."""
    moe: MoEConfig = MODELS[name]
    return ModelConfig(
        name=name, context=context, hidden_size=moe.hidden_size, num_layers=num_layers, moe=moe, **ATTENTION[name]
    )


def make_gpt(config: ModelConfig, group: ExpertGroup) -> GPT:
    """Comet's GPT with random weights, ready to generate; experts of different EP ranks are drawn alike."""
    with draws_on(group.device):
        model = GPT(config, group)
    nn.init.normal_(model.head.weight, std=config.hidden_size**-0.5)
    GPTEngine(model, group, cuda_graph="off")  # freezes the weights and puts warp decode under the layers
    return model


@contextmanager
def draws_on(device: torch.device) -> Iterator[None]:
    """Let ``torch.randn`` draw on a device: billions of weights take a CPU minutes."""
    torch.manual_seed(0)
    with _DrawsOn(device):
        yield


class _DrawsOn(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            return torch.randn(*args, device=self.device)
        return func(*args, **(kwargs or {}))


def library_version() -> str | None:
    """The installed transformers, if any."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    return str(transformers.__version__)


def make_library_model(gpt: GPT, experts: str | None) -> Any:
    """transformers' Qwen3-MoE with the weights of ``gpt``, in evaluation mode; the experts take no further memory.

    Args:
        gpt: From ``make_gpt``.
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
    """The same shape as transformers describes it."""
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
