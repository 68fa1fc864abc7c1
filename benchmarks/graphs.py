"""CUDA graphs of the MoE benchmark: variants whose output can be compared, and a layer as a user trains with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comet.moe import MoE
from comet.training_graphs import TrainingGraphs
from comet.tuner.timing import Variant, capture

LayerVariant = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Graph:
    """A variant recorded for all input sets, kept with what it reads; a replay of set 0 writes ``output``."""

    variant: LayerVariant
    replay: Variant
    output: tuple[Tensor, ...]

    def first(self) -> tuple[Tensor, ...]:
        """Replay input set 0."""
        self.replay(0)
        return self.output


def record(variant: LayerVariant, rotate: int) -> Graph:
    """Capture a variant as CUDA graphs that keep the output of input set 0.

    Args:
        variant: A function of the input set that never makes the host wait for the device.
        rotate: Number of input sets.

    Returns:
        The graphs.
    """
    kept: list[tuple[Tensor, ...]] = []

    def run(index: int) -> None:
        output = variant(index)
        if index == 0:
            kept[:] = [output]

    replay = capture(run, rotate=rotate)
    return Graph(variant, replay, kept[0])


class GraphedExperts:
    """The layer for a given routing, replayed forward and backward as ``comet.GraphedMoE`` replays a whole layer.

    Each call copies what it is given to where the graphs read it, and what they made away from there, as a user's does.

    Args:
        moe: The layer.
    """

    def __init__(self, moe: MoE) -> None:
        self.moe = moe
        self.module = _Routed(moe)
        self.stream = torch.cuda.Stream() if moe.group.device.type == "cuda" else None
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.replay: TrainingGraphs | None = None

    def __call__(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``(T, D)``, as ``MoE.routed_experts``; all calls have the same number of tokens."""
        inputs = (tokens, ids, weights)
        if self.replay is None:
            output = self.moe.routed_experts(*inputs)  # compiles the kernels
            torch.autograd.grad(output, (tokens, weights, *self.moe.expert_parameters()), torch.zeros_like(output))
            self.replay = TrainingGraphs(self.module, self.moe, inputs, self.stream, self.graphs)
        return self.replay(*inputs)[0]


class _Routed(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor]:
        return (self.moe.routed_experts(tokens, ids, weights),)
