"""Copies of hot experts on several ranks, for inference: the ranks that hold an expert share its tokens.

Each rank holds its ``e`` experts and ``copies`` slots for experts of other ranks. To the layer inside, a layer of
EP * (e + copies) experts, a copy is an expert of its own; only the ids of the routing change before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from comet.comm.collectives import all_to_all_rows, wants_grad
from comet.comm.handshake import check_equal, gather, together
from comet.config import require
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.paths import make_path
from comet.layer.sharding import local, move_part, require_held, version_of
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.moe import MoE
from comet.schedule.placement import redundant_experts

LARGEST_ID = torch.iinfo(torch.int32).max


@torch.inference_mode(mode=False)  # torch counts no writes to tensors that are made in this mode
def add_redundant_experts(layer: MoE, loads: Sequence[float] | Tensor, copies: int = 1) -> list[list[int]]:
    """Let each rank hold up to ``copies`` experts of other ranks, the hot ones, too (collective; for inference).

    Args:
        loads: ``(E,)`` routed rows of each expert, equal on all ranks. A layer returns those of a call as
            ``stats.expert_load``, ``comet train`` writes them to ``metrics.jsonl``.
        copies: Slots for copies on each rank; each takes the memory of an expert.

    Returns:
        For each EP shard the experts of which it holds copies; ``comet.schedule.placement`` chooses them.

    Raises:
        ValueError: On all ranks, if the layer drops rows, is one shard, or has weights of another type or device than
            its tokens; or if loads are no loads of its experts or differ between ranks.
    """
    layout, ranks = layer.layout, layer.group.process_group
    require(layout.ep > 1, f"ep={layout.ep} must be at least 2: one shard holds every expert already")
    assert ranks is not None
    rows, held = together(ranks, partial(choose_copies, layer, loads, copies))
    check_equal(ranks, {"layer": layer.number, "copies": copies, "loads": rows})
    held = gather(ranks, held)[0]  # CPUs of another kind may round to another choice
    layer.experts = RedundantExperts(layer, held, copies)
    return held


def choose_copies(layer: MoE, loads: Sequence[float] | Tensor, copies: int) -> tuple[list[float], list[list[int]]]:
    """Return the loads as numbers and the copies that they ask for, unless this layer cannot have copies."""
    config, layout, group = layer.config, layer.layout, layer.group
    rows, dtype = torch.as_tensor(loads, dtype=torch.float64, device="cpu"), group.workspace.shape.dtype
    require(rows.shape == (layout.num_experts,), f"loads of shape {tuple(rows.shape)} must be ({layout.num_experts},)")
    require(
        config.capacity_factor is None, f"capacity_factor={config.capacity_factor} must be None: a copy would drop rows"
    )
    require(layer.w1.dtype == dtype, f"param_dtype={layer.w1.dtype} must be the tokens' {dtype}: copies are not cast")
    device = layer.w1.device
    require(device == group.device, f"expert_device={device} must be the group's {group.device}: copies stay there")
    require_held(*layer.expert_parameters())
    return rows.tolist(), redundant_experts(rows.tolist(), layout.ep, copies)


class RedundantExperts(ExpertPath):
    """The path of a layer whose ranks hold copies.

    The layer's parameters move into the first ``e`` experts of this path's weights, so nothing is held twice.

    Args:
        held: For each EP shard the experts of which it holds copies, at most ``copies``.
    """

    def __init__(self, layer: MoE, held: Sequence[Sequence[int]], copies: int) -> None:
        group, layout = layer.group, layer.layout
        num_experts = layout.ep * (layout.experts_local + copies)
        inner = replace(layer.config, num_experts=num_experts, num_groups=1, top_groups=1)
        self.path, self.rank = make_path(layer.path, inner, group), group.rank
        self.waits_for_counts = self.path.waits_for_counts
        holders = [torch.tensor(each, device=group.device) for each in holders_of(held, layout, copies)]
        self.choices = nn.utils.rnn.pad_sequence(holders, batch_first=True).int()
        self.counts = torch.tensor([len(each) for each in holders], device=group.device)
        self.parameters, self.weights = layer.expert_parameters(), []
        for parameter in self.parameters:
            whole = with_copies(local(parameter).detach(), held, copies, layout, group)
            self.weights.append(whole)
            move_part(parameter, whole[: layout.experts_local])
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [version_of(each) for tensor in self.parameters for each in (tensor, local(tensor))]

    def require_current(self) -> None:
        """Refuse to run after the layer's weights have changed or moved, of which only some experts are copies."""
        self._require_current([local(each) for each in self.parameters])

    def _require_current(self, parts: Sequence[Tensor]) -> None:
        require(
            [each.data_ptr() for each in parts] == [each.data_ptr() for each in self.weights]
            and self.versions == self._versions(),
            "expert weights have changed since comet.add_redundant_experts copied the hot ones: call it again",
        )

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        require(
            not wants_grad(*routed, w1, w2, *(biases or ())),
            "a layer with redundant experts is for inference: call it under torch.no_grad(), or build another to train",
        )
        self._require_current((w1, w2, *(biases or ())))
        w1, w2, *others = self.weights
        biases = Biases(others[0].flatten(1), others[1]) if others else None
        ids = holder_ids(routed.top_k_ids, self.choices, self.counts, self.rank)
        return self.path(routed._replace(top_k_ids=ids), w1.flatten(1, 2), w2, biases)


def holders_of(held: Sequence[Sequence[int]], layout: ExpertLayout, copies: int) -> list[list[int]]:
    """The numbers that each expert and its copies have in the layer inside.

    Example: 4 experts over two shards, one copy each, shard 0 with a copy of expert 3: the shards hold 0, 1, 3 and 2, 3
    and an empty slot; the layer inside calls these 0 to 5, so the numbers are ``[0], [1], [3], [4, 2]``.
    """
    size = layout.experts_local + copies
    holders = [
        [expert // layout.experts_local * size + expert % layout.experts_local] for expert in range(layout.num_experts)
    ]
    for shard, experts in enumerate(held):
        for slot, expert in enumerate(experts):
            holders[expert].append(shard * size + layout.experts_local + slot)
    return holders


def holder_ids(top_k_ids: Tensor, choices: Tensor, counts: Tensor, rank: int) -> Tensor:
    """``(T, K)`` ids of the layer inside: a rank's tokens take the holders of an expert in turn, from its rank on.

    Args:
        choices: ``(E, C)`` holders of each expert, of which the first ``counts (E,)`` are there.

    Example: choices of expert 3 ``[4, 2]``, ids ``[[3], [3], [-1]]`` of rank 0: ``[[4], [2], [-1]]``.
    """
    experts = top_k_ids.clamp(0, len(choices) - 1).long()
    turns = torch.arange(rank, rank + len(top_k_ids), device=top_k_ids.device)[:, None] % counts[experts]
    holders = choices.to(top_k_ids.dtype)[experts, turns]
    # The layer inside refuses ids of no expert: negative ones stay as they are, others become the largest id.
    return holders.where(top_k_ids < len(choices), LARGEST_ID).where(top_k_ids >= 0, top_k_ids)


def with_copies(
    own: Tensor, held: Sequence[Sequence[int]], copies: int, layout: ExpertLayout, group: ExpertGroup
) -> Tensor:
    """``(e + copies, ..)``: own experts, then the copies that this rank holds, then zeros (collective).

    A copy comes from the rank of the owning shard with the same part of F.
    """
    size, mine = layout.experts_local, layout.ep_rank
    sent = [[expert % size for expert in experts if expert // size == mine] for experts in held]
    rows = own[list(chain.from_iterable(sent))]
    send_counts, recv_counts = [0] * layout.world_size, [0] * layout.world_size
    send_counts[layout.tp_rank :: layout.tp] = [len(each) for each in sent]
    owners = [expert // size for expert in held[mine]]
    recv_counts[layout.tp_rank :: layout.tp] = [owners.count(shard) for shard in range(layout.ep)]
    arrived = all_to_all_rows(rows, send_counts, recv_counts, group.process_group)
    return torch.cat([own, arrived, own.new_zeros(copies - len(arrived), *own.shape[1:])])
