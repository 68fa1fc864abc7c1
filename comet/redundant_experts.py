"""Copies of hot experts on several ranks, for inference: the ranks that hold an expert share its tokens.

Each rank holds its ``e`` experts and ``copies`` slots for experts of other ranks. To the layer inside, a layer of
EP * (e + copies) experts, a copy is an expert of its own; only the ids of the routing change before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from comet.comm.collectives import wants_grad
from comet.config import require
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.paths import make_path
from comet.layer.sharding import expert_parameter, local, version_of
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.moe import MoE
from comet.schedule.placement import redundant_experts


def add_redundant_experts(layer: MoE, loads: Sequence[float] | Tensor, copies: int = 1) -> list[list[int]]:
    """Let each rank hold up to ``copies`` experts of other ranks, the hot ones, too (collective; for inference).

    Args:
        loads: ``(E,)`` routed rows of each expert, equal on all ranks. A layer returns those of a call as
            ``stats.expert_load``, ``comet train`` writes them to ``metrics.jsonl``.
        copies: Slots for copies on each rank; each takes the memory of an expert.

    Returns:
        For each EP shard the experts of which it holds copies; ``comet.schedule.placement`` chooses them.

    Raises:
        ValueError: If the layer drops rows, has weights of another type than its tokens, or is one shard; or if the
            loads are not those of its experts.
    """
    config, layout, dtype = layer.config, layer.layout, layer.group.workspace.shape.dtype
    rows = torch.as_tensor(loads, dtype=torch.float64).tolist()
    require(len(rows) == config.num_experts, f"loads of {len(rows)} experts must be of {config.num_experts}")
    require(layout.ep > 1, f"ep={layout.ep} must be at least 2: one shard holds every expert already")
    require(
        config.capacity_factor is None, f"capacity_factor={config.capacity_factor} must be None: a copy would drop rows"
    )
    require(layer.w1.dtype == dtype, f"param_dtype={layer.w1.dtype} must be the tokens' {dtype}: copies are not cast")
    held = redundant_experts(rows, layout.ep, copies)
    layer.experts = RedundantExperts(layer, held, copies)
    return held


class RedundantExperts(ExpertPath):
    """The path of a layer whose ranks hold copies.

    The layer's parameters become views of the first ``e`` experts of this path's weights, so nothing is held twice.

    Args:
        held: For each EP shard the experts of which it holds copies, at most ``copies``.
    """

    def __init__(self, layer: MoE, held: Sequence[Sequence[int]], copies: int) -> None:
        group, layout = layer.group, layer.layout
        num_experts = layout.ep * (layout.experts_local + copies)
        inner = replace(layer.config, num_experts=num_experts, num_groups=1, top_groups=1)
        self.path, self.rank = make_path(layer.path, inner, group), group.rank
        self.choices = torch.tensor(expert_choices(held, layout, copies), dtype=torch.int32, device=group.device)
        self.weights = []
        for name, parameter in zip(("w1", "w2", "b1", "b2"), layer.expert_parameters(), strict=False):
            whole = with_copies(local(parameter).detach(), held, copies, layout, group)
            self.weights.append(whole)
            own = expert_parameter(whole[: layout.experts_local], group.mesh)
            setattr(layer, name, own.requires_grad_(parameter.requires_grad))
        self.parameters = layer.expert_parameters()
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [version_of(each) for tensor in self.parameters for each in (tensor, local(tensor))]

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        require(
            not wants_grad(*routed, w1, w2, *(biases or ())),
            "a layer with redundant experts is for inference: call it under torch.no_grad(), or build another to train",
        )
        given = [each.data_ptr() for each in (w1, w2, *(biases or ()))]
        require(
            given == [each.data_ptr() for each in self.weights] and self.versions == self._versions(),
            "expert weights have changed since comet.add_redundant_experts copied the hot ones: call it again",
        )
        w1, w2, *others = self.weights
        biases = Biases(others[0].flatten(1), others[1]) if others else None
        ids = holder_ids(routed.top_k_ids, self.choices, self.rank)
        return self.path(routed._replace(top_k_ids=ids), w1.flatten(1, 2), w2, biases)


def expert_choices(held: Sequence[Sequence[int]], layout: ExpertLayout, copies: int) -> list[list[int]]:
    """``(E, C)``: the numbers of each expert and its copies in the layer inside, in turn up to C places.

    C is a common multiple of the numbers of holders, so that the holders of an expert come equally often.

    Example: 4 experts over two shards, one copy each, shard 0 with a copy of expert 3: the shards hold 0, 1, 3 and 2, 3
    and an empty slot; the layer inside calls these 0 to 5, so the rows are ``[0, 0], [1, 1], [3, 3], [4, 2]``.
    """
    size = layout.experts_local + copies
    places = [
        [expert // layout.experts_local * size + expert % layout.experts_local] for expert in range(layout.num_experts)
    ]
    for shard, experts in enumerate(held):
        for slot, expert in enumerate(experts):
            places[expert].append(shard * size + layout.experts_local + slot)
    most = math.lcm(*(len(each) for each in places))
    return [each * (most // len(each)) for each in places]


def holder_ids(top_k_ids: Tensor, choices: Tensor, rank: int) -> Tensor:
    """``(T, K)`` ids of the layer inside: a rank's tokens take the holders of an expert in turn, from its rank on.

    Example: choices of expert 3 ``[4, 2]``, ids ``[[3], [3], [-1]]`` of rank 0: ``[[4], [2], [-1]]``.
    """
    turns = torch.arange(rank, rank + len(top_k_ids), device=top_k_ids.device)[:, None] % choices.shape[1]
    experts = top_k_ids.clamp(0, len(choices) - 1).long()
    return choices[experts, turns].where((top_k_ids >= 0) & (top_k_ids < len(choices)), -1)


def with_copies(
    own: Tensor, held: Sequence[Sequence[int]], copies: int, layout: ExpertLayout, group: ExpertGroup
) -> Tensor:
    """``(e + copies, ..)``: own experts, then the copies that this rank holds, then zeros (collective).

    A copy comes from the rank of the owning shard with the same part of F.
    """
    size, tp = layout.experts_local, layout.tp_rank
    whole = torch.cat([own, own.new_zeros(copies, *own.shape[1:])])
    moves = []
    for shard, experts in enumerate(held):
        for slot, expert in enumerate(experts):
            source, target = (
                dist.get_global_rank(group.process_group, each * layout.tp + tp) for each in (expert // size, shard)
            )
            if layout.ep_rank == expert // size:
                moves.append(dist.P2POp(dist.isend, whole[expert % size], target))
            if layout.ep_rank == shard:
                moves.append(dist.P2POp(dist.irecv, whole[size + slot], source))
    for work in dist.batch_isend_irecv(moves) if moves else ():
        work.wait()
    return whole
