"""The routers of a transformers model as Comet's: drafts put them in the place of its own, prefetch asks them early."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from comet.config import MoEConfig, require
from comet.experts.prefetch import PrefetchSetting, prefetch_wanted
from comet.integrations.hf.families import moe_config
from comet.integrations.hf.standin import DraftingGate
from comet.router.router import Router, Routes

logger = logging.getLogger(__name__)

GATE = "gate"  # in the MoE blocks of all families, beside their experts
BIAS = "e_score_correction_bias"


def gate_beside(model: nn.Module, experts: str) -> nn.Module:
    """The router of the MoE block whose experts have this name.

    Raises:
        ValueError: If there is none with the weight of one.
    """
    name = f"{experts.rpartition('.')[0]}.{GATE}"
    try:
        gate = model.get_submodule(name)
    except AttributeError:
        gate = nn.Identity()
    weight = getattr(gate, "weight", None)
    require(
        isinstance(weight, Tensor) and weight.ndim == 2,
        f"{name} ({type(gate).__name__}) must have a weight (E, D), by which drafts and prefetch route: set "
        "speculate='off' and expert_prefetch=false",
    )
    return gate


def routing_config(config: Any) -> MoEConfig:
    """How models of a supported family route.

    Example: DeepSeek-V3 scores by sigmoids, chooses 8 experts in 4 of 8 groups, and scales by 2.5.
    """
    moe = moe_config(config)
    if config.model_type != "deepseek_v3":
        return replace(moe, renormalize=getattr(config, "norm_topk_prob", True))
    return replace(
        moe,
        score="sigmoid",
        balance="bias",
        renormalize=config.norm_topk_prob,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        routed_scale=config.routed_scaling_factor,
    )


def router_of(gate: nn.Module, config: MoEConfig) -> Router:
    """A router with the weight of a gate, and its selection bias if it has one; both stay the gate's own."""
    router = Router(config, device="meta")
    router.weight = gate.weight  # type: ignore[assignment]
    router.selection_bias = getattr(gate, BIAS, None)
    return router


def routers_beside(model: Any, experts: Sequence[str], expert_prefetch: PrefetchSetting) -> list[Router]:
    """The routers by which the experts of all layers, given by name, are prefetched.

    Raises:
        ValueError: See ``gate_beside``; with ``auto`` the log says it, and there are no routers.
    """
    config = routing_config(model.config)
    try:
        return [router_of(gate_beside(model, name), config) for name in experts]
    except ValueError as error:
        if prefetch_wanted(expert_prefetch):
            raise
        logger.warning("expert_prefetch=auto prefetches no expert: %s", error)
        return []


def drafting_gate(model: nn.Module, experts: str) -> DraftingGate:
    """A gate that can draft, put in the place of the one beside the experts of this name.

    Raises:
        ValueError: If there is none with the weight of one.
    """
    gate = gate_beside(model, experts)
    if not isinstance(gate, DraftingGate):
        gate = DraftingGate(gate)
        model.set_submodule(f"{experts.rpartition('.')[0]}.{GATE}", gate)
    return gate


@contextmanager
def routed_by(gates: Sequence[DraftingGate], routers: Sequence[Routes]) -> Iterator[None]:
    """Let routers decide in the place of gates, for as long as this lasts."""
    for gate, router in zip(gates, routers, strict=True):
        gate.router = router
    try:
        yield
    finally:
        for gate in gates:
            gate.router = None
