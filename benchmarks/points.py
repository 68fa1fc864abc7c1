"""One point of the MoE benchmark: a layer, its inputs, and every way to run it as a variant of the timing loop.

A variant is a function of the number of the input set; it returns what has to agree with the plain path: the output,
or, forward + backward, the output and the gradients of tokens, routing weights, w1 and w2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from baselines import all_gather_experts, exchange_alone, gemm_variants, pipelined_experts, split_evenly
from fp8 import FP8Layer, fits, quantize_layer
from report import FP8_VARIANTS, VARIANTS, balanced_rows
from shapes import make_routing
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from triton import TritonError

from comet.comm.handshake import gather
from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.group import ExpertGroup, make_expert_group
from comet.layout import ExpertLayout
from comet.moe import MoE
from comet.paths import SymmetricPath
from comet.plain import make_exchange, plain_experts
from comet.sharding import local
from comet.training_graphs import TrainingGraphs
from comet.tuner.measure import recover
from comet.tuner.timing import Variant, capture
from comet.workspace import Workspace

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


ROTATE = 4  # input sets: with outputs and weights more than the 50 MB of L2 in every real shape
SEEDS_PER_RANK = 1000
WEIGHT_SEED = 1_000_000  # far from those of tokens, which would be rows of the weights
# What a variant may die of without ending the run; anything else is a mistake of the benchmark itself.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, LookupError, TritonError)
T = TypeVar("T")
ELSEWHERE = "failed on another rank"
FORWARD_ONLY = ("pipelined", "all_gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, apart from model and tokens.

    Args:
        parallel: EP and TP.
        max_tokens: Most tokens of any point.
        routing: Kind of routing (see ``routing.make_routing``) of the inputs drawn next.
        backward: Forward + backward instead of forward.
        path: Path of Comet's layer.
        overlap: How its kernels share the GPU; ``None`` takes the defaults.
        variants: Names of what to measure.
    """

    parallel: ParallelConfig
    max_tokens: int
    routing: str = "uniform"
    backward: bool = False
    path: str = "auto"
    overlap: OverlapConfig | None = None
    variants: tuple[str, ...] = VARIANTS


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank, its device and the group; the group is ``None`` for a rank alone."""

    rank: int
    device: torch.device
    process_group: ProcessGroup | None

    @property
    def dtype(self) -> torch.dtype:
        """What is measured: bf16 on GPUs; float32 on CPUs, which are there to try the benchmark."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def worst(self, value: float) -> float:
        """Maximum over the ranks."""
        on_device = torch.tensor([value], dtype=torch.float32, device=self.device)
        if self.process_group is not None:
            dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=self.process_group)
        return on_device.item()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The layer under test: ``w1 (e, 2F/TP, D)``, ``w2 (e, D, F/TP)``, and Comet's module over the same memory.

    ``moe`` is ``None`` where it could not be built, for the reason in ``failures``, or was not asked for; ``fp8`` where
    it was not, or D or F/TP is no multiple of 128, or the path is another than Comet's own.
    """

    config: MoEConfig
    layout: ExpertLayout
    w1: Tensor
    w2: Tensor
    moe: MoE | None
    fp8: FP8Layer | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def pool(self) -> Workspace | None:
        """What a failure may leave something in."""
        return None if self.moe is None else self.moe.group.workspace


@dataclass(frozen=True, slots=True)
class Inputs:
    """``ROTATE`` sets of tokens ``(T, D)``, ids and weights ``(T, K)``, and output gradients ``(T, D)``."""

    tokens: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    grads: list[Tensor]


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


class DrawnInPlace(MoE):
    """Comet's layer with weights drawn on its device: on the host, billions of numbers take longer than a run."""

    def reset_parameters(self, seed: int) -> None:
        """Draw the experts; routing is given, so what the router holds does not matter."""
        draw_weights(*self.expert_weights(), self.config, self.group.rank)


@contextmanager
def open_layer(config: MoEConfig, settings: Settings, ranks: Ranks) -> Iterator[Layer]:
    """Build the layer, release its memory at the end; a layer Comet cannot build still serves the baselines."""
    layout = ExpertLayout.create(config, settings.parallel, ranks.rank)
    built, failure = None, ""
    if any(name.startswith("comet") for name in settings.variants):
        built, failure = attempt(partial(_build_comet, config, settings, ranks), ranks)
    if built is None:
        w1, w2 = _own_weights(config, layout, ranks)
        yield Layer(
            config=config, layout=layout, w1=w1, w2=w2, moe=None, failures={"comet": failure} if failure else {}
        )
        return
    group, moe = built
    w1, w2 = moe.expert_weights()
    w1 = w1.flatten(1, 2)
    fp8 = None
    if set(FP8_VARIANTS) & set(settings.variants) and isinstance(moe.experts, SymmetricPath) and fits(config, layout):
        fp8 = quantize_layer(moe.experts, w1, w2)
    yield Layer(config=config, layout=layout, w1=w1, w2=w2, moe=moe, fp8=fp8)
    group.close()


@torch.no_grad()
def draw_weights(w1: Tensor, w2: Tensor, config: MoEConfig, rank: int) -> None:
    """Fill both where they are: normal, of variance 1 / D and 1 / F; every rank draws its own."""
    generator = torch.Generator(w1.device).manual_seed(WEIGHT_SEED + rank)
    w1.normal_(0, config.hidden_size**-0.5, generator=generator)
    w2.normal_(0, config.ffn_size**-0.5, generator=generator)


def make_inputs(config: MoEConfig, num_tokens: int, settings: Settings, ranks: Ranks) -> Inputs:
    """Draw the input sets of this rank."""
    inputs = Inputs([], [], [], [])
    for index in range(ROTATE):
        generator = torch.Generator(ranks.device).manual_seed(_seed(index, ranks))
        for tensors in (inputs.tokens, inputs.grads):
            drawn = torch.randn(num_tokens, config.hidden_size, generator=generator, device=ranks.device)
            tensors.append(drawn.to(ranks.dtype))
        ids, weights = _draw_routing(index, config, num_tokens, settings, ranks)
        inputs.ids.append(ids)
        inputs.weights.append(weights)
    return inputs


def reroute(inputs: Inputs, config: MoEConfig, settings: Settings, ranks: Ranks) -> None:
    """Overwrite ids and weights by those ``make_inputs`` draws for ``settings.routing``; tokens are the same anyway."""
    for index, old in enumerate(zip(inputs.ids, inputs.weights, strict=True)):
        new = _draw_routing(index, config, len(old[0]), settings, ranks)
        for before, after in zip(old, new, strict=True):
            before.copy_(after)


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


def attempt(action: Callable[[], T], ranks: Ranks, pool: Workspace | None = None) -> tuple[T | None, str]:
    """Run an action that all ranks run; its value and "" if it succeeded on all of them, else ``None`` and why not.

    From a failure the ranks of ``pool`` recover: whatever it left there, what is tried next finds them in step.
    """
    value: T | None = None
    failure = ""
    try:
        value = action()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
    except FAILURES as error:
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if ranks.worst(float(bool(failure))):
        if pool is not None:
            recover(pool, ranks.process_group)
        return None, failure or ELSEWHERE
    return value, ""


def find_fault(layer: Layer, ranks: Ranks) -> str:
    """What the kernels of any rank have noted to have gone wrong since the layer was made, or ""; collective.

    They give up waiting without an error, and those after them do not even begin: times of such a layer mean nothing.
    """
    if layer.moe is None:
        return ""
    _, failure = attempt(layer.moe.group.workspace.check, ranks)
    if not failure or ranks.process_group is None:
        return failure
    return next(text for text in gather(ranks.process_group, failure) if text != ELSEWHERE)


def relative_error(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest deviation relative to the root mean square, over all tensors; ``[3, 5]`` against ``[3, 4]``: 0.283."""
    errors = [0.0]
    for one, other in zip(actual, wanted, strict=True):
        one, other = one.detach().flatten().float(), other.detach().flatten().float()
        scale = max(other.norm().item() / math.sqrt(max(other.numel(), 1)), 1e-30)
        deviation = (one - other).abs().max().item() if one.numel() else 0.0
        errors.append(deviation / scale if math.isfinite(deviation) else math.inf)
    return max(errors)


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


def _build_comet(config: MoEConfig, settings: Settings, ranks: Ranks) -> tuple[ExpertGroup, MoE]:
    group = make_expert_group(
        config, settings.parallel, max_tokens=settings.max_tokens, dtype=ranks.dtype, device=ranks.device
    )
    moe = DrawnInPlace(config, group, path=settings.path, overlap=settings.overlap, param_dtype=ranks.dtype)
    return group, moe


def _own_weights(config: MoEConfig, layout: ExpertLayout, ranks: Ranks) -> tuple[Tensor, Tensor]:
    experts, width = layout.experts_local, config.ffn_size // layout.tp
    w1 = torch.empty(experts, 2 * width, config.hidden_size, device=ranks.device, dtype=ranks.dtype)
    w2 = torch.empty(experts, config.hidden_size, width, device=ranks.device, dtype=ranks.dtype)
    draw_weights(w1, w2, config, ranks.rank)
    return w1, w2


def _seed(index: int, ranks: Ranks) -> int:
    return ranks.rank * SEEDS_PER_RANK + index


def _draw_routing(
    index: int, config: MoEConfig, num_tokens: int, settings: Settings, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    return make_routing(
        settings.routing,
        num_tokens=num_tokens,
        num_experts=config.num_experts,
        top_k=config.top_k,
        seed=_seed(index, ranks),
        device=ranks.device,
    )
