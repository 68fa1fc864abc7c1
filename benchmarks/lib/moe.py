"""The layer that suites measure, with inputs of its ranks; letters: T tokens per rank, K, D, F, E, TP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig
from comet.layer.nodes import NodesPath
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layer.workspace import Workspace
from comet.layout import Biases, ExpertLayout
from comet.moe import MoE
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_fp8
from comet.utils.choices import CommBackend

from lib.ranks import Ranks, attempt
from lib.shapes import SEEDS_PER_RANK, draw_weights, make_routing, make_weights, parse_overlap, quantize_experts
from lib.suite import Suite, option

FP8_VARIANTS = ("comet_fp8", "comet_fp8_graph")
BASELINES = ("plain", "pipelined", "all_gather")
ROTATE = 4  # input sets: with outputs and weights more than the 50 MB of L2 in every real shape
WEIGHT_SEED = 1_000_000  # far from those of tokens, which would be rows of the weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The layer under test: ``w1 (e, 2F/TP, D)``, ``w2 (e, D, F/TP)``, biases, and Comet's module over the same memory.

    ``moe`` is ``None`` if it was not asked for or failed, for the reason in ``failures``. ``fp8``, the same weights in
    block FP8, exists if asked for, on Comet's own path, and if D and F/TP are multiples of 128.
    """

    config: MoEConfig
    layout: ExpertLayout
    w1: Tensor
    w2: Tensor
    biases: Biases | None = None
    moe: MoE | None = None
    fp8: tuple[FP8, FP8] | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def pool(self) -> Workspace | None:
        return None if self.moe is None else self.moe.group.workspace


class Inputs(NamedTuple):
    tokens: Tensor  # (T, D)
    ids: Tensor  # (T, K)
    weights: Tensor  # (T, K)
    grad: Tensor  # (T, D), of the output


class DrawnInPlace(MoE):
    """Comet's layer with weights drawn on its device: on the host, billions of numbers take longer than a run."""

    def reset_parameters(self, seed: int) -> None:
        """Draw the experts; routing is given, so what the router holds does not matter."""
        draw_weights(*self.expert_weights(), self.config, WEIGHT_SEED + self.group.rank, biases_of(self))


def biases_of(moe: MoE) -> Biases | None:
    if moe.b1 is None or moe.b2 is None:
        return None
    return Biases(local(moe.b1).detach().flatten(1), local(moe.b2).detach())


@dataclass(frozen=True, kw_only=True)
class LayerSuite(Suite):
    """A suite of one layer; ``path`` and ``overlap`` are those of Comet's variants."""

    path: str = "auto"
    overlap: str = ""
    backend: str = option(
        "auto", "of the group's memory, between nodes what tokens travel by", of=get_args(CommBackend)
    )
    variants: tuple[str, ...] = ("comet",)

    @property
    def split(self) -> OverlapConfig | None:
        """The split of Comet's layer; ``None``: the tuner's."""
        return parse_overlap(self.overlap) if self.overlap else None

    @contextmanager
    def open_layer(self, config: MoEConfig, max_tokens: int, ranks: Ranks) -> Iterator[Layer]:
        """Build the layer, release its memory at the end; a layer Comet cannot build still serves the baselines."""
        layout = ExpertLayout.create(config, self.parallel, ranks.rank)
        moe, failure = None, ""
        if any(name.startswith("comet") for name in self.variants):
            moe, failure = attempt(partial(self._build, config, max_tokens, ranks), ranks)
        if moe is None:
            w1, w2 = make_weights(config, layout, ranks.device, ranks.dtype, WEIGHT_SEED + ranks.rank)
            biases = Biases(w1.new_empty(w1.shape[:2]), w2.new_empty(w2.shape[:2])) if config.expert_bias else None
            draw_weights(w1, w2, config, WEIGHT_SEED + ranks.rank, biases)
            failures = {"comet": failure} if failure else {}
            yield Layer(config=config, layout=layout, w1=w1, w2=w2, biases=biases, failures=failures)
            return
        w1, w2 = moe.expert_weights()
        w1 = w1.flatten(1, 2)
        wanted = set(FP8_VARIANTS) & set(self.variants) and isinstance(moe.experts, SymmetricPath | NodesPath)
        in_blocks = w1.shape[2] % FP8_BLOCK == w2.shape[2] % FP8_BLOCK == 0
        fp8 = (quantize_experts(w1, quantize_fp8), quantize_experts(w2, quantize_fp8)) if wanted and in_blocks else None
        yield Layer(config=config, layout=layout, w1=w1, w2=w2, biases=biases_of(moe), moe=moe, fp8=fp8)
        moe.group.close()

    def _build(self, config: MoEConfig, max_tokens: int, ranks: Ranks) -> MoE:
        group = ranks.make_group(config, self.parallel, max_tokens, self.backend)
        return DrawnInPlace(config, group, path=self.path, overlap=self.split, param_dtype=ranks.dtype)


def make_inputs(config: MoEConfig, num_tokens: int, routing: str, ranks: Ranks) -> list[Inputs]:
    sets = []
    for seed in range(ranks.rank * SEEDS_PER_RANK, ranks.rank * SEEDS_PER_RANK + ROTATE):
        generator = torch.Generator(ranks.device).manual_seed(seed)
        shape = num_tokens, config.hidden_size
        tokens, grad = (torch.randn(shape, generator=generator, device=ranks.device).to(ranks.dtype) for _ in range(2))
        sizes: dict[str, Any] = {"num_experts": config.num_experts, "top_k": config.top_k, "device": ranks.device}
        sets.append(Inputs(tokens, *make_routing(routing, num_tokens=num_tokens, seed=seed, **sizes), grad))
    return sets


def relative_error(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest deviation relative to the root mean square, over all tensors; ``[3, 5]`` against ``[3, 4]``: 0.283."""
    errors = [0.0]
    for one, other in zip(actual, wanted, strict=True):
        one, other = one.detach().flatten().float(), other.detach().flatten().float()
        scale = max(other.norm().item() / math.sqrt(max(other.numel(), 1)), 1e-30)
        deviation = (one - other).abs().max().item() if one.numel() else 0.0
        errors.append(deviation / scale if math.isfinite(deviation) else math.inf)
    return max(errors)
