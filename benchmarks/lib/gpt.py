"""GPTs of the shapes, with random weights made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from comet.generation.engine import GPTEngine
from comet.layer.group import ExpertGroup
from comet.models.config import NUM_BYTE_VALUES, ModelConfig
from comet.models.gpt import GPT

from lib.shapes import OF_ATTENTION, SHAPES, model

VOCABULARY = {"qwen3_30b_a3b": 151_936, "tiny": 256}  # sizes for the models that are measured


def model_config(name: str, num_layers: int, context: int, vocab_size: int = NUM_BYTE_VALUES) -> ModelConfig:
    """A GPT of layers called ``name`` (see ``lib.shapes.model``), with the attention that ``configs/model`` has."""
    moe, shape = model(name), SHAPES[name.partition("/")[0]]
    return ModelConfig(
        name=name, vocab_size=vocab_size, context=context, hidden_size=moe.hidden_size, num_layers=num_layers, moe=moe,
        **{field: shape[field] for field in OF_ATTENTION if field in shape},
    )  # fmt: skip


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
