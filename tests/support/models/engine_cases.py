"""Engines of comet's GPT and of converted transformers models, and the tokens they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hf_cases import FAMILIES, make_group, tiny_model
from torch import Tensor
from training_cases import GPT_OSS, MODEL, MOE, awake_model

from comet.config import MoEConfig, SpeculationConfig
from comet.generation.engine import Engine, GPTEngine
from comet.generation.hf import HFEngine
from comet.integrations import hf

EXPERTS = MoEConfig(hidden_size=32, ffn_size=32, num_experts=8, top_k=4)
MODELS = {
    "shared expert in decode steps": replace(MODEL, dense_layers=1, moe=replace(MOE, shared_ffn_size=32)),
    "softmax": replace(MODEL, moe=EXPERTS),
    "sigmoid, groups, bias": replace(
        MODEL, moe=replace(EXPERTS, score="sigmoid", balance="bias", num_groups=2, top_groups=1, renormalize=False)
    ),
    "gpt-oss": GPT_OSS,
}
ENGINES = (*MODELS, *FAMILIES)
SHARED = ("shared expert in decode steps", "deepseek_v3", "qwen2_moe")
PROMPTS, LENGTHS = torch.tensor([[5, 6, 7, 8, 9], [11, 3, 0, 0, 0]]), torch.tensor([5, 2])
STEPS = 9
DRAFTS = SpeculationConfig(draft_experts=(1,), tau=0.0)


def plain_model(
    name: str, ep: int = 1, tp: int = 1, node_size: int | None = None, **changes: Any
) -> tuple[Callable[[Tensor], Any], Any]:
    """A model as whole forward passes compute it, and the group that its engine takes; transformers' need none."""
    if name in MODELS:
        return awake_model(MODELS[name], ep=ep, tp=tp, max_tokens=64, node_size=node_size)
    model = tiny_model(name, **changes)
    return model, make_group(model, ep, tp, node_size=node_size) if ep * tp > 1 else None


def engine_of(
    name: str, cuda_graph: Any = "auto", *, decode_tokens: int = 64, drafts: Any = None, **model: Any
) -> Engine:
    made, group = plain_model(name, **model)
    if name in MODELS:
        settings = dict(cuda_graph=cuda_graph, decode_tokens=decode_tokens, speculation=drafts)
        return GPTEngine(made, group, **settings)
    converted = hf.convert(made, group, decode_tokens=decode_tokens)
    return HFEngine(converted, cuda_graph=cuda_graph, speculation=drafts)


def tokens_of(engine: Engine) -> Tensor:
    chosen = [engine.prefill(PROMPTS, LENGTHS, 16).argmax(-1)]
    while len(chosen) < STEPS:
        chosen.append(engine.decode(chosen[-1]).argmax(-1))
    return torch.stack(chosen, dim=1)
