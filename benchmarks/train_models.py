"""The model of the training benchmark: one GPT, whose MoE layers are switched from path to path between two steps.

One model and not one for each variant: weights, gradients and moments of the large shapes fit once, and every variant
trains the very same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from generate_models import draws_on
from shapes import model
from torch import Tensor, nn

from comet.group import ExpertGroup
from comet.models.config import NUM_BYTE_VALUES, ModelConfig
from comet.models.gpt import GPT
from comet.paths import ExpertPath, make_path
from comet.sharding import local
from comet.training.config import TrainConfig
from comet.training.loop import StepMetrics, Trainer
from comet.training.optimizer import make_optimizer

VARIANTS = ("comet", "comet_graph", "plain", "rest")
# Fields of ModelConfig: the attention in front of each layer, as in ``configs/model``.
HEADS: dict[str, dict[str, int]] = {
    "mixtral_8x7b": dict(num_heads=32, num_kv_heads=8),
    "qwen2_moe": dict(num_heads=16, num_kv_heads=16),
    "phi35_moe": dict(num_heads=32, num_kv_heads=8),
    "qwen3_30b_a3b": dict(num_heads=32, num_kv_heads=4, head_dim=128),
    "deepseek_v3": dict(num_heads=128, num_kv_heads=128),
    "tiny": dict(num_heads=4, num_kv_heads=4),
}
CHECKED_STEPS = 3  # graphs are captured in the second and replayed from then on
LEARNING_RATE = 1e-4
SCHEDULE_STEPS = 1000  # far more than the batches that are rotated: the learning rate stays where it starts
TEXT_BYTES = 2**20

# Losses, and of each step and parameter the norms of its gradient's rows.
FirstSteps = tuple[Tensor, tuple[Tensor, ...]]


def model_config(name: str, num_layers: int, context: int) -> ModelConfig:
    """A GPT of layers called ``name`` (see ``shapes.model``) over bytes."""
    moe, heads = model(name), HEADS[name.partition("/")[0]]
    return ModelConfig(name=name, context=context, hidden_size=moe.hidden_size, num_layers=num_layers, moe=moe, **heads)


class SwitchedModel:
    """A model, its optimizer and its trainer; every step names the variant that runs the MoE layers.

    Args:
        config: Shape.
        group: The ranks; all parameters have the type of its workspace.
        batch_size: Sequences of ``config.context`` tokens per rank and step.
        path: Path of the variants ``comet`` and ``comet_graph``.
    """

    def __init__(self, config: ModelConfig, group: ExpertGroup, *, batch_size: int, path: str = "auto") -> None:
        self.group = group
        with draws_on(group.device):
            self.gpt = GPT(config, group, path=path)
        cast_parameters(self.gpt, self.gpt.dtype)
        settings = TrainConfig(steps=SCHEDULE_STEPS, batch_size=batch_size, lr=LEARNING_RATE)
        self.optimizer = make_optimizer(self.gpt, settings)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(NUM_BYTE_VALUES, (TEXT_BYTES,), generator=generator, dtype=torch.uint8)
        make = partial(Trainer, self.gpt, self.optimizer, group, text)
        self.trainer, self.replaying = make(replace(settings, cuda_graph="off")), make(settings)
        self.layers = self.gpt.moe_layers()
        self.own_paths: list[ExpertPath] = [layer.experts for layer in self.layers]
        self.other_paths: dict[str, ExpertPath] = {"plain": make_path("plain", config.moe, group), "rest": no_experts}

    def step(self, variant: str, index: int) -> StepMetrics:
        """One optimizer step on batch ``index`` of each rank (collective)."""
        for layer, own in zip(self.layers, self.own_paths, strict=True):
            layer.experts = self.other_paths.get(variant, own)
        return (self.replaying if variant == "comet_graph" else self.trainer).step(index)

    @torch.no_grad()
    def start_anew(self) -> None:
        """Draw the weights of the start once more, where they are, and forget the moments.

        The head is drawn too, which a GPT starts at zero: its first loss would depend on nothing else.
        """
        with draws_on(self.group.device):
            for layer in self.layers:
                layer.reset_parameters(0)
            self.gpt.reset_parameters(0)
            self.gpt.head.weight.copy_(torch.randn(self.gpt.head.weight.shape) * self.gpt.config.hidden_size**-0.5)
        for parameter in self.gpt.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # gains of norms
        for moments in self.optimizer.state.values():
            for each in moments.values():
                each.zero_()

    def first_steps(self, variant: str) -> FirstSteps:
        """Take steps from the start (collective).

        Raises:
            RuntimeError: If graphs were wanted and a step cannot be captured.
        """
        self.start_anew()
        with noted_gradients(self.optimizer) as norms:
            losses = [self.step(variant, index).loss for index in range(CHECKED_STEPS)]
        if variant == "comet_graph" and self.replaying.why_eager:
            raise RuntimeError(f"there are no graphs: {self.replaying.why_eager}")
        return torch.stack(losses), tuple(norms)


class NoExperts(torch.autograd.Function):
    """Stands in for the experts where everything else of a step is timed: the tokens come back.

    Gradients of the experts are written, as experts do, but with one number everywhere. Zeros would make AdamW slower,
    whose divisions then take a longer way.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ctx.save_for_backward(w1, w2)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.full_like(each, 1e-4) for each in ctx.saved_tensors)


def no_experts(tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """An ``ExpertPath``; see ``NoExperts``."""
    found: Tensor = NoExperts.apply(tokens, w1, w2)
    return found


@torch.no_grad()
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters a type; tables such as the rotary one keep theirs."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, nn.Parameter(parameter.to(dtype)))


@contextmanager
def noted_gradients(optimizer: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """A list that gets, before each step taken inside, the norms of the rows of every gradient.

    Rows count along the first dimension: of the experts' weights each expert is one.
    """
    norms: list[Tensor] = []

    def note(*_: Any) -> None:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        norms.extend(row_norms(local(each.grad)) for each in parameters)

    handle = optimizer.register_step_pre_hook(note)
    try:
        yield norms
    finally:
        handle.remove()


def row_norms(gradient: Tensor) -> Tensor:
    """``(N,)`` float32 of ``(N, ...)``; ``[[3, 4], [0, 1]]`` gives ``[5, 1]``."""
    return torch.linalg.vector_norm(gradient.reshape(gradient.shape[0], -1), dim=1, dtype=torch.float32)
