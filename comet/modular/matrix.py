"""Which prepare/finalize goes with which experts, and why the others do not: asked of the parts themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comet.config import MoEConfig
from comet.errors import UnavailableError
from comet.layer.group import ExpertGroup
from comet.modular import EXPERTS, PREPARE_FINALIZE
from comet.modular.composer import incompatibility
from comet.quantization.formats import WEIGHT_TYPES
from comet.utils.tables import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One prepare/finalize with one kind of experts, each as made by default."""

    prepare_finalize: str
    experts: str
    weights: tuple[str, ...]  # names of the types of weights the pair computes with; empty where it does not fit
    reason: str | None  # why not; None where it fits


def pairs(config: MoEConfig, group: ExpertGroup) -> list[Pair]:
    """All pairs of the registries (collective), for this layer over these ranks."""
    made = {kind: make(kind, config, group) for kind in (*EXPERTS, *PREPARE_FINALIZE)}
    return [_pair(left, made[left], right, made[right]) for left in PREPARE_FINALIZE for right in EXPERTS]


def make(kind: Any, config: MoEConfig, group: ExpertGroup) -> Any:
    """A part, or the reason why it cannot be made here."""
    try:
        return kind(config, group)
    except (ValueError, UnavailableError) as error:
        return str(error)


def table(found: Sequence[Pair]) -> str:
    """One line for each pair: both names, then the types of weights, or why they do not fit."""
    fits = (f"no: {pair.reason}" if pair.reason else f"fits: {', '.join(pair.weights)} weights" for pair in found)
    rows = [(pair.prepare_finalize, pair.experts, fit) for pair, fit in zip(found, fits, strict=True)]
    return "\n".join(aligned(rows, left=(0, 1, 2)))


def _pair(left: type, transport: Any, right: type, experts: Any) -> Pair:
    names = dict(prepare_finalize=left.__name__, experts=right.__name__)
    for part in (transport, experts):
        if isinstance(part, str):
            return Pair(**names, weights=(), reason=part)
    reasons = {kind.__name__: incompatibility(transport, experts, kind) for kind in WEIGHT_TYPES}
    weights = tuple(name for name, reason in reasons.items() if reason is None)
    return Pair(**names, weights=weights, reason=None if weights else next(iter(reasons.values())))
