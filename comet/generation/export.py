"""``comet export``: a checkpoint of ``comet train`` as a folder that transformers loads, with the same logits.

A model with softmax scores becomes a Qwen3-MoE, one with sigmoid scores a GLM-4-MoE; these have no other arithmetic.

comet export outputs/book book-hf                 # the newest checkpoint of a run
comet export outputs/book/step-000400 book-hf
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.generation.hf import run_tokenizer
from comet.generation.source import Source, find_source, model_of
from comet.integrations.hf.families import require_transformers
from comet.kernels.runtime.activation import SWIGLU
from comet.models.config import ModelConfig
from comet.training.checkpoint import read_whole
from comet.training.checkpoint_folder import choose_checkpoint

# Names in a checkpoint, and those in the models of transformers, where matrices that Comet joins are apart.
NAMES = {
    "embedding.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",), "attention_norm.weight": ("input_layernorm.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",), "attention.out.weight": ("self_attn.o_proj.weight",),
    "attention.qkv.weight": tuple(f"self_attn.{each}_proj.weight" for each in "qkv"),
    "ffn.router.weight": ("mlp.gate.weight",), "ffn.router.selection_bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.w1": ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "ffn.w2": ("mlp.down_proj.weight",),
    "ffn.shared.w1": tuple(f"mlp.shared_experts.{each}_proj.weight" for each in ("gate", "up")),
    "ffn.shared.w2": ("mlp.shared_experts.down_proj.weight",),
}  # fmt: skip
EXPERTS = {"ffn.w1": ("mlp.experts.gate_up_proj",), "ffn.w2": ("mlp.experts.down_proj",)}
PREFIX = re.compile(r"model\.(?:blocks\.(\d+)\.)?")
FIXED = re.compile(r"[qk]_norm|e_score_correction_bias|shared_experts")  # gains of 1, no bias, no columns


def main(words: Sequence[str]) -> int:
    """Run ``comet export`` with the words behind it; return the exit status."""
    parser = argparse.ArgumentParser("comet export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="folder of a run of `comet train`, or one of its checkpoints")
    parser.add_argument("output_dir", type=Path, help="new folder for config.json, weights and tokenizer")
    given = parser.parse_args(words)
    export(given.source, given.output_dir)
    sys.stdout.write(f"AutoModelForCausalLM.from_pretrained({str(given.output_dir)!r}) loads the model\n")
    return 0


def export(source: str, output_dir: Path) -> None:
    """Write a checkpoint as a folder of transformers; nothing of that name is there before it is whole."""
    require(not output_dir.exists(), f"output_dir={str(output_dir)!r} must not be there yet: name a new folder")
    require_transformers()
    found = find_source(source).checkpoint
    if found is None:
        raise ValueError(
            f"source={source!r} must be a checkpoint of comet train: transformers loads this folder as it is"
        )
    model, tokenizer = model_of(Source(found.path, found)), run_tokenizer(found.path)
    made = stock_model(model, tokenizer.eos_token_id)
    choose_checkpoint([found], [])
    fixed = {name: torch.full(each.shape, float("norm" in name)) for name, each in made.state_dict().items()
             if FIXED.search(name)}  # fmt: skip
    made.load_state_dict(fixed | renamed(read_whole(found.path, "model."), model), assign=True)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{output_dir.name}.", dir=output_dir.parent) as folder:
        part = Path(folder, "part")
        made.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(output_dir)


def stock_model(model: ModelConfig, end_id: int | None) -> Any:
    """Make the model of transformers with a GPT's arithmetic, gains of queries and keys 1, its weights not yet set."""
    from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

    moe, kind = model.moe, Qwen3MoeConfig if model.moe.score == "softmax" else Glm4MoeConfig
    _require_stock(model)
    options: dict[str, Any] = {"mlp_only_layers": list(range(model.dense_layers))}
    if kind is Glm4MoeConfig:
        options = dict(
            use_qk_norm=True, partial_rotary_factor=1.0, first_k_dense_replace=model.dense_layers, num_mtp_layers=0,
            n_group=moe.num_groups, topk_group=moe.top_groups, routed_scaling_factor=moe.routed_scale,
            n_shared_experts=moe.shared_ffn_size // moe.ffn_size,
        )  # fmt: skip
    config = kind(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.dense_ffn_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_width, max_position_embeddings=model.context, rms_norm_eps=torch.finfo(torch.float32).eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_base}, tie_word_embeddings=False,
        moe_intermediate_size=moe.ffn_size, num_experts_per_tok=moe.top_k, num_local_experts=moe.num_experts,
        norm_topk_prob=moe.renormalize, eos_token_id=end_id, dtype=torch.float32, **options,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _require_stock(model: ModelConfig) -> None:
    """Raise ``ValueError`` naming the settings that neither Qwen3-MoE nor GLM-4-MoE has."""
    moe, is_softmax = model.moe, model.moe.score == "softmax"
    rules = {
        "activation": (moe.activation == SWIGLU, "swiglu"),
        "expert_bias": (not moe.expert_bias, "false"),
        "balance": (not is_softmax or moe.balance != "bias", "aux or none, with score=softmax"),
        "top_groups": (not is_softmax or moe.top_groups == moe.num_groups, "num_groups, with score=softmax"),
        "routed_scale": (not is_softmax or moe.routed_scale == 1, "1, with score=softmax"),
        "shared_ffn_size": (
            moe.shared_ffn_size % moe.ffn_size == 0 and not (is_softmax and moe.shared_ffn_size),
            "a multiple of ffn_size with score=sigmoid, and 0 with score=softmax",
        ),
    }
    wrong = [
        f"model.moe.{name}={getattr(moe, name)} must be {rule}" for name, (holds, rule) in rules.items() if not holds
    ]
    require(not wrong, f"{'; '.join(wrong)}: no model of transformers is known that computes the same")


def renamed(tensors: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names in transformers; matrices that Comet joins are apart there."""
    heads = [count * model.head_width for count in (model.num_heads, model.num_kv_heads, model.num_kv_heads)]
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own, layer = PREFIX.sub("", name), PREFIX.findall(name)[0]
        names, parts = (
            NAMES[own],
            tensor.split(heads) if own == "attention.qkv.weight" else tensor.chunk(len(NAMES[own])),
        )
        if tensor.dim() > 2:
            names, parts = EXPERTS[own], (tensor.flatten(1, -2),)
        prefix = f"model.layers.{layer}." if layer else ""
        state |= {f"{prefix}{each}": part.contiguous() for each, part in zip(names, parts, strict=True)}
    return state
