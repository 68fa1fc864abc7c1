"""The plan: who goes where, built on the device from the top-k ids of all ranks, without the host.

Letters: T tokens on this rank, M their static maximum (``max_tokens``, a multiple of 128, equal on all ranks), K, E, e,
W; P phases, 1 for a rank alone, else 2; R = W*M received-row slots; Q static capacity of routed rows on this rank.

Row numbering, the same on every rank:

* *Received row* ``r = s*M + i``: the i-th row that source rank s sent to this rank. A token that goes to several
  experts of this rank is sent once (rank-deduplicated). Rows of one source are in the order of buckets, then tokens:
  the *bucket* of a token at a rank is that of the first of its experts that needs it (``twin.plan.buckets``), so that
  rows arrive in the order in which layer 0 goes through the experts. Rows of this rank to itself do not travel: there
  ``i`` is simply the token, so received row ``rank*M + t`` *is* token t of this rank.
* *Routed row* ``q``: one (received row, expert slot) pair computed here. Routed rows are laid out by local expert, then
  phase (rows of this rank, then all others), then source and token; the segment of every expert starts at a multiple of
  ``block_rows``. A tile is computed in the phase of its last row, so a phase costs no padding of its own.
* *Combine slot* ``d*M + i`` at the source: where rank d puts the partial sum of received row ``s*M + i``: the same i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.kernels.runtime.limits import CHUNK_ROWS
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout, round_up

INT32_MAX = 2**31 - 1


class Launch(IntEnum):
    """The launches that follow a plan: layer 0, layer 1, and the gradients of layer 1 and of layer 0.

    Each has counters of its own, which the weight gradient that comes behind it shares.
    """

    DISPATCH_GEMM = 0
    GEMM_COMBINE = 1
    DISPATCH_DGRAD = 2
    DGRAD_COMBINE = 3


COUNTERS_PER_LAUNCH = 32
NUM_COUNTERS = len(Launch) * COUNTERS_PER_LAUNCH


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules that, with the layout, shape a plan; equal on all ranks but for ``max_routed_rows``."""

    block_rows: int  # rows of a GEMM tile
    expert_capacity: int  # routed rows each expert keeps
    max_routed_rows: int  # Q

    @classmethod
    def create(cls, block_rows: int, expert_capacity: int | None, max_routed_rows: int) -> PlanRules:
        """The rules of one layer; a capacity of ``None`` keeps every routed row."""
        return cls(block_rows, INT32_MAX if expert_capacity is None else expert_capacity, max_routed_rows)

    def check(self, layout: ExpertLayout, workspace: Workspace) -> None:
        """Raise ``ValueError`` unless the rules fit layout and pool."""
        shape, comm = workspace.shape, workspace.comm
        require(
            layout.world_size == comm.world_size and layout.rank == comm.rank,
            f"rank={layout.rank} of {layout.world_size} in the layout must be the communicator's "
            f"{comm.rank} of {comm.world_size}",
        )
        require(
            layout.top_k <= shape.top_k, f"top_k={layout.top_k} must be at most the workspace's top_k={shape.top_k}"
        )
        require(
            1 <= self.expert_capacity <= INT32_MAX,
            f"expert_capacity={self.expert_capacity} must be at least 1 and fit 32 bits, or None",
        )
        require(
            0 < self.max_routed_rows <= INT32_MAX and self.max_routed_rows % self.block_rows == 0,
            f"max_routed_rows={self.max_routed_rows} must be a positive multiple of block_rows={self.block_rows}",
        )
        pool = 2 * layout.world_size * workspace.max_tokens * shape.top_k
        require(
            pool <= INT32_MAX,
            f"max_tokens={workspace.max_tokens} with {layout.world_size} ranks and top_k={shape.top_k} makes "
            f"{pool} ids, must be at most {INT32_MAX}",
        )


def check_routing(ids: Tensor, weights: Tensor, layout: ExpertLayout, workspace: Workspace) -> None:
    """Raise ``ValueError`` unless ids and weights fit the layout and the pool."""
    _check_placed("top_k_ids", ids, torch.int32, workspace)
    _check_placed("top_k_weights", weights, torch.float32, workspace)
    require(
        ids.dim() == 2 and ids.shape[1] == layout.top_k,
        lambda: f"shape={tuple(ids.shape)} of top_k_ids must be (tokens, top_k={layout.top_k})",
    )
    require(
        weights.shape == ids.shape,
        lambda: f"shape={tuple(weights.shape)} of top_k_weights must equal {tuple(ids.shape)} of top_k_ids",
    )
    require(
        ids.shape[0] <= workspace.max_tokens,
        lambda: (
            f"num_tokens={ids.shape[0]} must be at most max_tokens={workspace.max_tokens} of the workspace; "
            "raise max_tokens when it is made"
        ),
    )


def check_tokens(tokens: Tensor, ids: Tensor, workspace: Workspace) -> None:
    """Raise ``ValueError`` unless tokens fit the pool and are as many as rows of ids: kernels read what they name."""
    hidden_size = workspace.shape.hidden_size
    require(
        tokens.shape == (*ids.shape[:1], hidden_size),
        lambda: (
            f"shape={tuple(tokens.shape)} of tokens must be (T, hidden_size={hidden_size}), with the T of top_k_ids of "
            f"shape={tuple(ids.shape)}"
        ),
    )
    _check_placed("tokens", tokens, workspace.shape.dtype, workspace, whose="the group's ")


def _check_placed(name: str, tensor: Tensor, dtype: torch.dtype, workspace: Workspace, whose: str = "") -> None:
    device = workspace.ids.local.device
    require(tensor.dtype == dtype, lambda: f"dtype={tensor.dtype} of {name} must be {whose}{dtype}")
    require(tensor.device == device, lambda: f"device={tensor.device} of {name} must be the group's {device}")


def num_counters(world_size: int, max_tokens: int) -> int:
    """Counters of a plan: those of the launches, then one of each chunk of rows that goes to a rank.

    Example: W=4 and M=2048 make 128 + 4 * 16 = 192.
    """
    return NUM_COUNTERS + world_size * (max_tokens // CHUNK_ROWS)


def plan_shapes(layout: ExpertLayout, max_tokens: int, rules: PlanRules) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a plan, by field; all are int32 but ``row_weights``."""
    ranks, rows, top_k = layout.world_size, layout.world_size * max_tokens, layout.top_k
    return {
        "send_token_ids": (ranks, max_tokens),
        "send_counts": (ranks,),
        "send_rows": (max_tokens, ranks),
        "recv_counts": (ranks,),
        "row_slots": (rows, top_k),
        "row_weights": (rows, top_k),
        "routed_row_ids": (rules.max_routed_rows,),
        "routed_slots": (rules.max_routed_rows,),
        "segment_starts": (layout.experts_local + 1,),
        "segment_counts": (layout.experts_local,),
        "tiles": (rules.max_routed_rows // rules.block_rows, 4),
        "segment_tiles": (rules.max_routed_rows // rules.block_rows, 4),
        "tile_starts": (layout.num_phases + 1,),
        "status": (4,),
        "counters": (num_counters(layout.world_size, max_tokens),),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The destination of every row of one MoE layer call."""

    layout: ExpertLayout  # the experts over the ranks
    num_tokens: int  # T, this rank's tokens in this call
    max_tokens: int  # M
    block_rows: int  # rows of a GEMM tile; segments start at its multiples
    # (W, M) int32: token whose row is the i-th sent to rank d; -1 past the end. For d = rank it is the identity on the
    # tokens that stay, -1 elsewhere
    send_token_ids: Tensor
    send_counts: Tensor  # (W,) int32: rows sent to each rank (for d = rank: tokens that stay)
    send_rows: Tensor  # (M, W) int32: the i of token t in the list of rank d, or -1; inverse of send_token_ids
    recv_counts: Tensor  # (W,) int32: rows received from each source (from itself: tokens that stay)
    # (R, K) int32: the routed row of (received row, expert slot k), or -1 when slot k is masked, dropped or not
    # computed here
    row_slots: Tensor
    row_weights: Tensor  # (R, K) float32: the routing weight of slot k, 0 where row_slots is -1
    routed_row_ids: Tensor  # (Q,) int32: received row of each routed row; -1 in the padding of a segment
    routed_slots: Tensor  # (Q,) int32: expert slot k of each routed row; -1 in the padding of a segment
    segment_starts: Tensor  # (e + 1,) int32: first routed row of each local expert's segment; last: rows used
    segment_counts: Tensor  # (e,) int32: valid routed rows of each segment
    # (max_tiles, 4) int32: local expert, first routed row, valid rows, phase of the last row; phase-major, then by
    # expert and row
    tiles: Tensor
    segment_tiles: Tensor  # (max_tiles, 4) int32: the same tiles by expert and row, whatever their phase
    tile_starts: Tensor  # (P + 1,) int32: first tile of each phase; last: number of tiles
    # (4,) int32: routed rows needed (with padding), routed rows dropped by the capacity mode, 1 if the rows needed
    # exceed Q (then the surplus was left out and the host raises), the epoch of the exchange (0 after a failed wait)
    status: Tensor
    # (128 + W * C,) int32 zeros: ticket and panel counters of the fused kernels, 32 for each launch, then of each chunk
    # of sent rows the tickets that were done
    counters: Tensor
    memory: Tensor  # (...) int32: what all of these tensors lie in

    @property
    def own_rows(self) -> slice:
        """The received rows that are this rank's own tokens."""
        first = self.layout.rank * self.max_tokens
        return slice(first, first + self.num_tokens)

    def counters_of(self, launch: Launch) -> Tensor:
        """``(32,)`` int32: what the blocks of one launch count."""
        return self.counters[launch * COUNTERS_PER_LAUNCH :][:COUNTERS_PER_LAUNCH]

    def for_backward(self, memory: Tensor) -> Plan:
        """The plan of a backward pass: with counters of its own, all of them zero, and else what ``memory`` says.

        Args:
            memory: What autograd kept as the plan's ``memory``. It is another tensor where a checkpoint ran the forward
                pass again, with what may have been another routing.
        """
        kept = self if memory.data_ptr() == self.memory.data_ptr() else self._read(memory)
        return replace(kept, counters=torch.zeros_like(kept.counters))

    def _read(self, memory: Tensor) -> Plan:
        moved = memory.storage_offset() - self.memory.storage_offset()  # in elements of 4 bytes, as of every tensor
        tensors: dict[str, Any] = {
            field.name: memory.view(here.dtype).as_strided(here.shape, here.stride(), here.storage_offset() + moved)
            for field in fields(self)
            if isinstance(here := getattr(self, field.name), Tensor) and field.name != "memory"
        }
        return replace(self, **tensors, memory=memory)


def routed_row_capacity(layout: ExpertLayout, max_tokens: int, block_rows: int, max_imbalance: float | None) -> int:
    """Q: routed rows to reserve on a rank.

    Args:
        max_imbalance: Largest load of a rank over the mean load that must fit; ``None`` means that any routing of K
            distinct experts fits.

    Example: E=8, K=2, EP=4, M=128, block_rows=16: worst case 4*128*2 = 1024 rows, 2 segments of 15 more at most: 1054,
    rounded up to 1056. With max_imbalance 1.5: 1.5*1024/4 = 384 + 30, rounded up to 416.
    """
    routed = layout.world_size * max_tokens
    rows = routed * min(layout.top_k, layout.experts_local)
    if max_imbalance is not None:
        rows = min(rows, math.ceil(max_imbalance * routed * layout.top_k / layout.ep))
    return round_up(rows + layout.experts_local * (block_rows - 1), block_rows)
