"""GPTs of the shapes, with random weights made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from comet.config import MoEConfig
from comet.generation.engine import GPTEngine
from comet.group import ExpertGroup
from comet.models.config import ModelConfig
from comet.models.gpt import GPT

from lib.shapes import MODELS

# Fields of ModelConfig beside name, context, layers and the MoE layer, with which hidden_size goes.
ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": dict(vocab_size=151_936, num_heads=32, num_kv_heads=4, head_dim=128),
    "tiny": dict(vocab_size=256, num_heads=4, num_kv_heads=2),
}


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
