"""The ranks, sets of weights and steps with their routing that the decode benchmark runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.decode import DecodeWeights, RankDecode, rank_slots
from comet.decode.twin import slot_weights
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import make_path
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, MXFP4, MXFP8, quantize_fp8, quantize_mxfp4, quantize_mxfp8
from comet.reference.layer import rank_partial

from lib.ranks import Ranks, attempt
from lib.shapes import SEEDS_PER_RANK, make_routing, make_weights, quantize_experts

PREFIX = "transformers_"
OWN = ("own", "own_nccl", "own_fused")
TIMEOUT_S = 30.0
QUANTISERS: dict[str, Callable[[Tensor], MXFP8 | MXFP4 | FP8]] = {
    "mxfp8": quantize_mxfp8, "mxfp4": quantize_mxfp4, "fp8": quantize_fp8
}  # fmt: skip
WEIGHTS = ("bf16", *QUANTISERS)
StepRun = Callable[[int], Tensor]  # a way to run a step, by its number


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """One model on this rank; ``group`` is ``None`` where no variant needs it or for the reason in ``failures``."""

    config: MoEConfig
    layout: ExpertLayout
    ranks: Ranks
    group: ExpertGroup | None = None
    fused: ExpertPath | None = None  # Comet's, on a CPU the twin; there with the group
    decodes: dict[tuple[int, bool], RankDecode] = field(default_factory=dict)  # by the arguments of ``decode``
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_alone(self) -> bool:
        return self.layout.world_size == 1

    def total(self, part: Tensor) -> Tensor:
        if not self.is_alone:
            dist.all_reduce(part, group=self.ranks.process_group)
        return part

    def decode(self, max_tokens: int, *, replicated: bool) -> RankDecode:
        """Return the decode over ranks for at most ``max_tokens``; the first call makes it (collective).

        All ranks hold the same tokens if ``replicated``, else their own. A step has blocks for all ``max_tokens``.
        """
        assert self.group is not None
        made = self.decodes.get((max_tokens, replicated))
        if made is None:
            size = self.config.hidden_size
            made = RankDecode(self.group.comm, hidden_size=size, max_tokens=max_tokens, replicated=replicated)
            self.decodes[max_tokens, replicated] = made
        return made

    def check(self) -> None:
        if self.group is not None:
            self.group.workspace.check()
            for decode in self.decodes.values():
                decode.check()

    @property
    def pool(self) -> Workspace | None:
        return None if self.group is None else self.group.workspace


@contextmanager
def open_team(
    config: MoEConfig, parallel: ParallelConfig, *, max_tokens: int, wants_fused: bool, ranks: Ranks
) -> Iterator[Team]:
    team = Team(config=config, layout=ExpertLayout.create(config, parallel, ranks.rank), ranks=ranks)

    def build() -> Team:
        most, kind = -(-max_tokens // parallel.world_size), "fused" if ranks.device.type == "cuda" else "twin"
        group = make_expert_group(
            config, parallel, max_tokens=most, dtype=ranks.dtype, device=ranks.device, timeout_s=TIMEOUT_S
        )
        return replace(team, group=group, fused=make_path(kind, config, group))

    if wants_fused or not team.is_alone:
        built, failure = attempt(build, ranks)
        team = built or replace(team, failures={"group": failure})
    yield team
    if team.group is not None:
        team.group.close()


class WeightSet(NamedTuple):
    """Both are one without quantisation."""

    weights: DecodeWeights  # that are decoded
    plain: DecodeWeights  # the same numbers, of block FP8 rounded, in the dtype of the tokens, for other paths


@dataclass(frozen=True)
class Step:
    """One step's inputs, equal on all ranks, with this rank's part of one set of weights."""

    tokens: Tensor
    ids: Tensor
    routing_weights: Tensor
    set: WeightSet
    layout: ExpertLayout

    @property
    def weights(self) -> DecodeWeights:
        return self.set.weights

    @property
    def touched(self) -> list[int]:
        first = self.layout.first_expert
        return [expert for expert in self.ids.unique().tolist() if 0 <= expert - first < self.layout.experts_local]

    @property
    def touched_bytes(self) -> int:
        weights = self.weights
        tensors = (weights.w1, weights.w2, weights.w1_scales, weights.w2_scales)
        return len(self.touched) * sum(tensor[0].nbytes for tensor in tensors if tensor is not None)

    def exact(self) -> Tensor:
        """Compute this rank's part of the output in float64, without the slot table, which may be wrong."""
        touched, first = self.touched, self.layout.first_expert
        tokens = self.tokens.double()
        if not touched:
            return torch.zeros_like(tokens)
        by_slot = [slot_weights(self.weights, expert - first, torch.float64) for expert in touched]
        w1, w2 = (torch.stack(of_slots) for of_slots in zip(*by_slot, strict=True))
        places = torch.full((self.layout.num_experts,), -1, device=tokens.device)
        places[touched] = torch.arange(len(touched), device=tokens.device)
        ids = places[self.ids.long()]
        return rank_partial(tokens, ids, self.routing_weights.double(), w1, w2, first_expert=0)


def make_set(
    config: MoEConfig, layout: ExpertLayout, device: torch.device, dtype: torch.dtype, seed: int, kind: str
) -> WeightSet:
    """One rank's part of random weights, drawn by itself, and quantised for the ``WEIGHTS`` that ``QUANTISERS`` has."""
    w1, w2 = make_weights(config, layout, device, dtype, seed + SEEDS_PER_RANK * layout.rank)
    plain = DecodeWeights(w1=w1, w2=w2, slots=rank_slots(layout, device))
    if kind not in QUANTISERS:
        return WeightSet(plain, plain)

    def quantise(expert: Tensor) -> MXFP8 | MXFP4 | FP8:
        packed = QUANTISERS[kind](expert)
        expert.copy_(packed.dequantize(dtype))
        return packed

    of_w1, of_w2 = quantize_experts(w1, quantise), quantize_experts(w2, quantise)
    stored = replace(plain, w1=of_w1.elements, w2=of_w2.elements, w1_scales=of_w1.scales, w2_scales=of_w2.scales)
    return WeightSet(stored, plain)


def make_steps(
    config: MoEConfig, layout: ExpertLayout, sets: Sequence[WeightSet], num_tokens: int, routing: str
) -> list[Step]:
    """Make one step per set of weights, each with its own tokens and routing, equal on all ranks.

    So one rank is the slowest in every step, and a sum of steps is as long as on this rank.
    """
    steps = []
    for seed, weight_set in enumerate(sets):
        device, dtype = weight_set.plain.w1.device, weight_set.plain.w1.dtype
        ids, routing_weights = make_routing(
            routing,
            num_tokens=num_tokens,
            num_experts=config.num_experts,
            top_k=config.top_k,
            seed=seed if layout.world_size == 1 else 0,
            device=device,
        )
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.randn(num_tokens, config.hidden_size, device=device, generator=generator).to(dtype)
        steps.append(Step(tokens, ids, routing_weights, weight_set, layout))
    return steps
