"""Plans for tests: made at once, and one rank's from the ids of all ranks, which is the specification of plans."""

from __future__ import annotations

from torch import Tensor

from comet.config import MoEConfig, OverlapConfig
from comet.layer.backend import Backend
from comet.layer.plan import Plan, PlanRules
from comet.layer.twin.layer import Twin
from comet.layer.twin.plan import plan_tensors
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout
from comet.schedule.settings import LayerSettings


def backend_class(*, use_kernels: bool) -> type[Backend]:
    if use_kernels:
        from comet.layer.fused import Fused  # needs Triton

        return Fused
    return Twin


def plan_backend(layout: ExpertLayout, workspace: Workspace, rules: PlanRules, *, use_kernels: bool) -> Backend:
    """A backend that is good for plans; its GEMMs are set up for experts of 16 hidden columns."""
    shape = workspace.shape
    moe = MoEConfig(
        hidden_size=shape.hidden_size, ffn_size=16 * layout.tp, num_experts=layout.num_experts, top_k=layout.top_k
    )
    settings = LayerSettings.create(moe, layout, OverlapConfig(), shape.dtype)
    return backend_class(use_kernels=use_kernels)(layout, workspace, rules, settings)


def plan_from_ids(
    ids: Tensor,
    weights: Tensor,
    layout: ExpertLayout,
    *,
    num_tokens: int,
    block_rows: int,
    max_routed_rows: int,
    expert_capacity: int | None = None,
) -> Plan:
    """One rank's plan from the ids of all ranks, in plain torch and without communication: the specification.

    Args:
        ids: ``(W, M, K)`` int32 ids of all ranks, -1 in masked slots and past the tokens of a rank.
        weights: ``(W, M, K)`` float32.
        layout: Whose plan.
        num_tokens: T of that rank.
        block_rows: Rows of a tile.
        max_routed_rows: Q.
        expert_capacity: Routed rows each expert keeps; ``None``: all.

    Returns:
        The plan; entries past the used routed rows are -1 and past the used tiles 0 (kernels leave them unspecified).

    Example:
        EP=2, K=1, E=2, M=128, block_rows=16, rank 1, ids [[1], [0], [1], -1 ...] of rank 0 and [[0], [1], -1 ...] of
        rank 1: rank 0 sends tokens 0 and 2, so received rows 0 and 1; own token 1 is received row 128 + 1 = 129.
        Expert 1 has the routed rows 0 (row 129, phase 0), 1 and 2 (rows 0 and 1, phase 1) in one tile of phase 1:
        segment_starts [0, 16], segment_counts [3], tiles [[0, 0, 3, 1]], tile_starts [0, 0, 1],
        recv_counts [2, 1], send_counts [1, 1], send_token_ids[0] = [0, -1, ...], send_token_ids[1] = [-1, 1, -1, ...].
    """
    rules = PlanRules.create(block_rows, expert_capacity, max_routed_rows)
    sizes = dict(num_tokens=num_tokens, max_tokens=ids.shape[1], block_rows=block_rows)
    return Plan(layout=layout, **sizes, **plan_tensors(ids, weights, layout, rules))
