"""What shapes a plan beside ids and layout: its limits, the shapes of its tensors, and the checks of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comet.config import OverlapConfig, Transport, require
from comet.layout import CHUNK_ROWS, ExpertLayout
from comet.schedule import check_phases
from comet.workspace import Workspace

COUNTERS_PER_LAUNCH = 32
NUM_COUNTERS = 4 * COUNTERS_PER_LAUNCH
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """What shapes a plan beside the layout; equal on all ranks but for ``max_routed_rows``.

    Args:
        num_phases: P.
        block_rows: Rows of a GEMM tile.
        expert_capacity: Routed rows each expert keeps.
        max_routed_rows: Q.
        transport: How layer 0 moves rows, hence where they arrive.
    """

    num_phases: int
    block_rows: int
    expert_capacity: int
    max_routed_rows: int
    transport: Transport

    @classmethod
    def create(cls, overlap: OverlapConfig, expert_capacity: int | None, max_routed_rows: int) -> PlanRules:
        """The rules of one layer; a capacity of ``None`` keeps every routed row."""
        return cls(
            num_phases=overlap.num_phases,
            block_rows=overlap.block_rows,
            expert_capacity=INT32_MAX if expert_capacity is None else expert_capacity,
            max_routed_rows=max_routed_rows,
            transport=overlap.transport,
        )

    def check(self, layout: ExpertLayout, workspace: Workspace) -> None:
        """Raise ``ValueError`` unless the rules fit layout and pool, ``RuntimeError`` if the pool has been closed."""
        shape, comm = workspace.shape, workspace.comm
        comm.require_open()
        require(
            layout.world_size == comm.world_size and layout.rank == comm.rank,
            f"rank={layout.rank} of {layout.world_size} in the layout must be the communicator's "
            f"{comm.rank} of {comm.world_size}",
        )
        require(
            layout.top_k <= shape.top_k, f"top_k={layout.top_k} must be at most the workspace's top_k={shape.top_k}"
        )
        check_phases(self.num_phases, layout.world_size)
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

    Example:
        W=4 and M=2048 make 128 + 4 * 16 = 192.
    """
    return NUM_COUNTERS + world_size * (max_tokens // CHUNK_ROWS)


def plan_shapes(layout: ExpertLayout, max_tokens: int, rules: PlanRules) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a plan, by field; all are int32 but ``row_weights``.

    There is no ``arrival_row_ids`` where rows arrive as the received rows they are (transport ``push``).
    """
    ranks, rows, top_k = layout.world_size, layout.world_size * max_tokens, layout.top_k
    by_token = {"arrival_row_ids": (rules.max_routed_rows,)} if rules.transport == "copy" else {}
    return by_token | {
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
        "tile_starts": (rules.num_phases + 1,),
        "status": (4,),
        "counters": (num_counters(layout.world_size, max_tokens),),
    }
