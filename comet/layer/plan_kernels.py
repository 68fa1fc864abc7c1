"""The plan by kernels: allocates its tensors and launches ``comet.kernels.plan.metadata``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from comet.kernels.plan.metadata import PlanConfig, PlanScratch, RoutingPool, exchange, place_plan
from comet.kernels.runtime.buffers import allocate, cut
from comet.layer.plan import PlanRules, plan_shapes
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout


def start(
    ids: Tensor,
    weights: Tensor,
    layout: ExpertLayout,
    workspace: Workspace,
    rules: PlanRules,
    *,
    at_once: bool,
    trains: bool,
) -> Callable[[], dict[str, Tensor]]:
    """Launch the exchange of ids and weights ``(T, K)``; the result launches the rest and returns the tensors.

    ``at_once`` the exchange waits for the other ranks' ids as well, which saves a launch; else the result does.
    ``trains`` is not sent: a rank alone in its backward pass meets the barrier's deadline.
    """
    config = PlanConfig(
        top_k=layout.top_k,
        experts_local=layout.experts_local,
        ep=layout.ep,
        tp=layout.tp,
        num_phases=rules.num_phases,
        block_rows=rules.block_rows,
        expert_capacity=rules.expert_capacity,
    )
    pool = RoutingPool(
        ids=workspace.ids.local,
        id_pointers=workspace.ids.pointers,
        weights=workspace.weights.local,
        weight_pointers=workspace.weights.pointers,
        flags=workspace.ids_flags.local,
        flag_pointers=workspace.ids_flags.pointers,
        epoch=workspace.epoch,
        fault=workspace.fault,
        rank=layout.rank,
        timeout_ns=workspace.timeout_ns,
    )
    scratch = PlanScratch.allocate(pool, config)
    shapes = plan_shapes(layout, workspace.max_tokens, rules)
    memory = allocate(shapes, ids.device)
    tensors = cut(memory, shapes)
    tensors["row_weights"] = tensors["row_weights"].view(torch.float32)
    exchanged = (ids, weights, pool, config, scratch, tensors["counters"])
    workspace.comm.in_flight = True
    exchange(*exchanged, part="all" if at_once else "send")

    def finish() -> dict[str, Tensor]:
        if not at_once:
            exchange(*exchanged, part="count")
        place_plan(pool, config, scratch, {name: tensor for name, tensor in tensors.items() if name != "counters"})
        return tensors | {"memory": memory}

    return finish
