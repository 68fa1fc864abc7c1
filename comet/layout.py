"""The experts of a layer over the W = EP x TP ranks of its group: which rank owns which part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig, require


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``; ``round_up(129, 128) == 256``."""
    return -(-value // multiple) * multiple


def positions_in_groups(groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Position of each element among those of its group, and the size of each group; nothing waits for a GPU.

    Example: groups [1, 0, 1, 1] of 2: positions [0, 0, 1, 2], sizes [1, 3].
    """
    sizes = groups.new_zeros(num_groups).scatter_add_(0, groups, torch.ones_like(groups))
    order = groups.argsort(stable=True)
    positions = torch.empty_like(groups)
    ranks = torch.arange(groups.numel(), device=groups.device)
    positions[order] = ranks - (sizes.cumsum(0) - sizes)[groups[order]]
    return positions, sizes


class RoutedTokens(NamedTuple):
    """The tokens that a rank passes to a layer, and where they go."""

    tokens: Tensor  # (T, D)
    top_k_ids: Tensor  # (T, K) int32 global experts, none twice in a row; -1 masks a slot
    top_k_weights: Tensor  # (T, K) float32

    def part(self, rows: slice) -> RoutedTokens:
        return RoutedTokens(*(each[rows] for each in self))


class Biases(NamedTuple):
    """Addends of the products of both projections of some experts."""

    b1: Tensor  # (e, 2F/TP), gate, then up, before the activation
    # (e, D), to each expert output before it is weighted; under TP all ranks of a shard hold it, and the first one
    # alone adds it
    b2: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """One rank's place among the experts.

    EP shard ``s`` owns the experts ``s*e .. s*e + e - 1`` (e = E / EP). The TP ranks of a shard are consecutive ranks
    of the group, and each holds F / TP columns of gate, of up, and of the down projection's contraction. An expert's
    destination is therefore the set of ranks ``s*TP .. s*TP + TP - 1``.

    Example: E = 8, EP = 2, TP = 2: expert 5 belongs to shard 1, so its rows travel to ranks 2 and 3.
    """

    num_experts: int  # E
    top_k: int  # K
    ep: int  # EP
    tp: int  # TP
    rank: int  # this rank, 0 .. W-1

    @classmethod
    def create(cls, moe: MoEConfig, parallel: ParallelConfig, rank: int) -> ExpertLayout:
        """Place ``rank`` among the experts of ``moe``; raises ``ValueError`` where they do not divide."""
        parallel.check(moe)
        require(0 <= rank < parallel.world_size, f"rank={rank} must be below ep x tp = {parallel.world_size}")
        return cls(num_experts=moe.num_experts, top_k=moe.top_k, ep=parallel.ep, tp=parallel.tp, rank=rank)

    @property
    def world_size(self) -> int:
        return self.ep * self.tp

    @property
    def num_phases(self) -> int:
        """P: layer 0 computes rows of this rank, phase 0, before those of all others, phase 1."""
        return min(self.world_size, 2)

    @property
    def experts_local(self) -> int:
        """e, the experts of one EP shard."""
        return self.num_experts // self.ep

    @property
    def ep_rank(self) -> int:
        """This rank's EP shard."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """This rank's slice of F."""
        return self.rank % self.tp

    @property
    def first_expert(self) -> int:
        return self.ep_rank * self.experts_local


def added_biases(biases: Biases | None, layout: ExpertLayout) -> tuple[Tensor | None, Tensor | None]:
    """b1 and b2 as one rank adds them to its experts: b2 on the first TP rank of a shard alone."""
    if biases is None:
        return None, None
    return biases.b1, biases.b2 if layout.tp_rank == 0 else None


def gate_first(rows: Tensor, dim: int) -> Tensor:
    """Gate, then up, of 2F along ``dim``, which is negative, that are gate and up in turn; a copy.

    Example: ``[g0, u0, g1, u1]`` becomes ``[g0, g1, u0, u1]``.
    """
    return rows.unflatten(dim, (-1, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)
