"""Every way to run the layer, as a variant of the timing loop.

A variant is a function of the number of the input set; it returns what has to agree with the plain path: the output,
or, forward + backward, the output and the gradients of tokens, routing weights, w1, w2 and biases.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from comet.graphed.training import TrainingGraphs
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layout import Biases
from comet.measure.timing import Variant
from comet.moe import MoE
from comet.reference.plain import make_exchange, plain_experts

from baselines.layer import all_gather_experts, exchange_alone, gemm_variants, pipelined_experts, split_evenly
from lib.moe.layer import Inputs, Layer
from lib.moe.report import FP8_VARIANTS, balanced_rows
from lib.ranks import Ranks

LayerVariant = Callable[[int], tuple[Tensor, ...]]
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens (T, D), ids and weights (T, K) to (T, D)
FORWARD_ONLY = ("pipelined", "all_gather")


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


def layer_variants(
    layer: Layer, inputs: Inputs, arguments: argparse.Namespace, ranks: Ranks
) -> dict[str, LayerVariant]:
    """Every asked-for way to run the layer that exists here; the plain path first, to compare with."""
    layout, group, moe = layer.layout, ranks.process_group, layer.moe
    weights = (layer.w1, layer.w2, *(layer.biases or ()))
    w1, w2, *given = (weight.detach().requires_grad_(arguments.backward) for weight in weights)
    biases = Biases(*given) if given else None
    baselines = {"plain": plain_experts, "pipelined": pipelined_experts, "all_gather": all_gather_experts}
    experts: dict[str, Experts] = {
        name: lambda *routed, run=run: run(*routed, w1, w2, layout, group, layer.config.activation, biases)
        for name, run in baselines.items()
        if name in arguments.variants and not (arguments.backward and name in FORWARD_ONLY)
    }
    if moe is not None:
        experts["comet"] = moe.routed_experts
        if "comet_graph" in arguments.variants and ranks.device.type == "cuda":
            experts["comet_graph"] = GraphedExperts(moe) if arguments.backward else moe.routed_experts
    if layer.fp8 is not None and moe is not None and not arguments.backward:
        assert isinstance(moe.experts, SymmetricPath)
        in_fp8, fp8_w1, fp8_w2 = moe.experts.fp8, *layer.fp8
        names = [name for name in FP8_VARIANTS if ranks.device.type == "cuda" or not name.endswith("graph")]
        run_fp8: Experts = lambda tokens, ids, weights: in_fp8(tokens, ids, weights, fp8_w1, fp8_w2, biases)  # noqa: E731
        experts |= {name: run_fp8 for name in names if name in arguments.variants}
    found: dict[str, LayerVariant] = {}
    for name, run in experts.items():
        parameters = moe.expert_parameters() if moe is not None and name.startswith("comet") else (w1, w2, *given)
        found[name] = partial(_trained, run, parameters, inputs) if arguments.backward else partial(_run, run, inputs)
    path = None if moe is None or arguments.backward else moe.experts
    if "comm_comet" in arguments.variants and isinstance(path, SymmetricPath):
        found["comm_comet"] = exchange_alone(path, inputs.tokens, inputs.ids, inputs.weights, layer.w2)
    return found


def floor_variants(
    layer: Layer, inputs: Inputs, routing: str, arguments: argparse.Namespace, ranks: Ranks
) -> dict[str, Variant]:
    """The GEMMs alone: on balanced rows for uniform routing, else on the rows that reach this rank."""
    if not {"gemm_comet", "gemm_torch"} & set(arguments.variants):
        return {}
    if routing == "uniform":
        counts = split_evenly(balanced_rows(len(inputs.ids[0]), layer.layout), layer.layout.experts_local)
    else:
        counts = make_exchange(inputs.ids[0], layer.layout, ranks.process_group).expert_counts
    variants = gemm_variants(layer.w1, layer.w2, counts)
    return {name: variant for name, variant in variants.items() if name in arguments.variants}


def _run(experts: Experts, inputs: Inputs, index: int) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (experts(inputs.tokens[index], inputs.ids[index], inputs.weights[index]),)


def _trained(experts: Experts, parameters: tuple[Tensor, ...], inputs: Inputs, index: int) -> tuple[Tensor, ...]:
    """With the backward pass."""
    leaves = [inputs.tokens[index].detach().requires_grad_(), inputs.weights[index].detach().requires_grad_()]
    output = experts(leaves[0], inputs.ids[index], leaves[1])
    return output, *map(local, torch.autograd.grad(output, (*leaves, *parameters), inputs.grads[index]))
