"""Every way to run the layer, as a variant of the timing loop.

A variant is a function of the number of the input set; it returns what has to agree with the plain path: the output,
or, forward + backward, the output and the gradients of tokens, routing weights, w1 and w2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from comet.config import MoEConfig
from comet.graphed.training import TrainingGraphs
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layout import ExpertLayout
from comet.measure.timing import Variant, capture
from comet.moe import MoE
from comet.reference.plain import make_exchange, plain_experts

from baselines.layer import all_gather_experts, exchange_alone, gemm_variants, pipelined_experts, split_evenly
from lib.moe.layer import Inputs, Layer, Settings, make_inputs, reroute
from lib.moe.report import FP8_VARIANTS, balanced_rows
from lib.ranks import Ranks

LayerVariant = Callable[[int], tuple[Tensor, ...]]
FORWARD_ONLY = ("pipelined", "all_gather")


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


@dataclass(slots=True)
class Shared:
    """What all routings of one number of tokens have in common.

    Args:
        inputs: Their ids and weights are overwritten in place by those of the next routing.
        graphs: Recorded with these inputs; nothing in them depends on the routing but what the device reads.
    """

    inputs: Inputs | None = None
    graphs: dict[str, Graph] = field(default_factory=dict)

    def draw(self, config: MoEConfig, num_tokens: int, settings: Settings, ranks: Ranks) -> Inputs:
        """The inputs of ``settings.routing``."""
        if self.inputs is None:
            self.inputs = make_inputs(config, num_tokens, settings, ranks)
        else:
            reroute(self.inputs, config, settings, ranks)
        return self.inputs


class GraphedExperts:
    """The layer for a given routing, replayed forward and backward as ``comet.GraphedMoE`` replays a whole layer.

    Each call copies what it is given to where the graphs read it, and what they made away from there, as a user's does.
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


def layer_variants(layer: Layer, inputs: Inputs, settings: Settings, ranks: Ranks) -> dict[str, LayerVariant]:
    """Every asked-for way to run the layer that exists here; the plain path first, to compare with."""
    layout, group = layer.layout, ranks.process_group
    w1, w2 = (weight.detach().requires_grad_(settings.backward) for weight in (layer.w1, layer.w2))
    experts = {"plain": plain_experts, "pipelined": pipelined_experts, "all_gather": all_gather_experts}
    variants = {
        name: _variant(partial(_with_weights, run, (w1, w2), layout, group), (w1, w2), inputs, settings.backward)
        for name, run in experts.items()
        if name in settings.variants and not (settings.backward and name in FORWARD_ONLY)
    }
    if layer.moe is not None:
        of_comet = partial(
            _variant, parameters=layer.moe.expert_parameters(), inputs=inputs, backward=settings.backward
        )
        variants["comet"] = comet = of_comet(layer.moe.routed_experts)
        if "comet_graph" in settings.variants and ranks.device.type == "cuda":
            variants["comet_graph"] = of_comet(GraphedExperts(layer.moe)) if settings.backward else comet
        if "comm_comet" in settings.variants and isinstance(layer.moe.experts, SymmetricPath) and not settings.backward:
            variants["comm_comet"] = exchange_alone(
                layer.moe.experts, inputs.tokens, inputs.ids, inputs.weights, layer.w2
            )
    if layer.fp8 is not None and not settings.backward:
        asked = [name for name in FP8_VARIANTS if name in settings.variants]
        on_gpu = ranks.device.type == "cuda"
        fp8 = _variant(layer.fp8, (), inputs, False)
        variants |= {name: fp8 for name in asked if on_gpu or not name.endswith("graph")}
    return variants


def floor_variants(layer: Layer, inputs: Inputs, settings: Settings, ranks: Ranks) -> dict[str, Variant]:
    """The GEMMs alone: on balanced rows for uniform routing, else on the rows that reach this rank."""
    if not {"gemm_comet", "gemm_torch"} & set(settings.variants):
        return {}
    if settings.routing == "uniform":
        counts = split_evenly(balanced_rows(len(inputs.ids[0]), layer.layout), layer.layout.experts_local)
    else:
        counts = make_exchange(inputs.ids[0], layer.layout, ranks.process_group).expert_counts
    variants = gemm_variants(layer.w1, layer.w2, counts)
    return {name: variant for name, variant in variants.items() if name in settings.variants}


def _with_weights(
    run: Callable[..., Tensor],
    weights: tuple[Tensor, Tensor],
    layout: ExpertLayout,
    group: ProcessGroup | None,
    *routed: Tensor,
) -> Tensor:
    return run(*routed, *weights, layout, group)


def _variant(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    parameters: tuple[Tensor, ...],
    inputs: Inputs,
    backward: bool,
) -> LayerVariant:
    """``experts(tokens, ids, weights)`` on input set ``index``, with the backward pass if asked for."""

    def forward(index: int) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (experts(inputs.tokens[index], inputs.ids[index], inputs.weights[index]),)

    def forward_backward(index: int) -> tuple[Tensor, ...]:
        leaves = [inputs.tokens[index].detach().requires_grad_(), inputs.weights[index].detach().requires_grad_()]
        output = experts(leaves[0], inputs.ids[index], leaves[1])
        return output, *map(local, torch.autograd.grad(output, (*leaves, *parameters), inputs.grads[index]))

    return forward_backward if backward else forward
