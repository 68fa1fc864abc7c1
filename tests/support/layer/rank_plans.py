"""Plans for tests: made at once, and one rank's from the ids of all ranks, which is the specification of plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comet.config import OverlapConfig
from comet.layer.plan import Plan, PlanRules, begin_plan, plan_of
from comet.layer.twin.plan import plan_tensors
from comet.layout import ExpertLayout


def make_plan(*routing: Any, **settings: Any) -> Plan:
    """The plan of this rank (collective); arguments as for ``begin_plan``."""
    return begin_plan(*routing, at_once=True, **settings)()


def plan_from_ids(
    ids: Tensor,
    weights: Tensor,
    layout: ExpertLayout,
    *,
    num_tokens: int,
    overlap: OverlapConfig,
    expert_capacity: int | None,
    max_routed_rows: int,
) -> Plan:
    """One rank's plan from the ids of all ranks, in plain torch and without communication: the specification.

    Args:
        ids: ``(W, M, K)`` int32 ids of all ranks, -1 in masked slots and past the tokens of a rank.
        weights: ``(W, M, K)`` float32.
        layout: Whose plan.
        num_tokens: T of that rank.
        overlap: As for ``begin_plan``.
        expert_capacity: As for ``begin_plan``.
        max_routed_rows: As for ``begin_plan``.

    Returns:
        The plan; entries past the used routed rows are -1 and past the used tiles 0 (kernels leave them unspecified).

    Example:
        EP=2, K=1, E=2, M=128, block_rows=16, rank 1, ids [[1], [0], [1], -1 ...] of rank 0 and [[0], [1], -1 ...] of
        rank 1: rank 0 sends tokens 0 and 2, so received rows 0 and 1; own token 1 is received row 128 + 1 = 129.
        Expert 1 has the routed rows 0 (row 129, phase 0), 1 and 2 (rows 0 and 1, phase 1) in one tile of phase 1:
        segment_starts [0, 16], segment_counts [3], tiles [[0, 0, 3, 1]], tile_starts [0, 0, 1],
        recv_counts [2, 1], send_counts [1, 1], send_token_ids[0] = [0, -1, ...], send_token_ids[1] = [-1, 1, -1, ...].
    """
    rules = PlanRules.create(overlap, expert_capacity, max_routed_rows)
    tensors = plan_tensors(ids, weights, layout, rules)
    return plan_of(layout, num_tokens, ids.shape[1], rules, tensors)
