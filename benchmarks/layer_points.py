"""One point of the per-layer benchmark: a model at one number of tokens, planned for every way to split the GPU.

A launch needs an epoch of its own and counters at zero. ``prepare`` gives it both, and stands for the barrier of the
timing loop, because it lets no rank pass before all have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from points import Layer, Ranks, attempt
from routing import make_routing
from torch import Tensor

from comet.config import OverlapConfig, Transport
from comet.group import ExpertGroup
from comet.paths import SymmetricPath
from comet.plan import Plan
from comet.workspace import Workspace

T = TypeVar("T")


class Split(NamedTuple):
    """How work is shared, in the values that take effect: no more panels than column blocks, phases than ranks."""

    comm_blocks: int
    num_panels: int
    num_phases: int
    beside: int = 1
    transport: Transport = "push"

    def __str__(self) -> str:
        """Example: ``Split(16, 4, 2)`` is ``comm_blocks=16,num_panels=4,num_phases=2,beside=1,transport=push``."""
        return ",".join(f"{name}={value}" for name, value in self._asdict().items())

    def launches(self) -> tuple[str, str]:
        """Names of its layer 0, which has no panels, and of its layer 1; equal launches have equal names.

        Copy engines leave layer 0 without comm blocks, and layer 1 as it is. ``beside=0`` keeps both to Triton.
        """
        mover = f"comm_blocks={self.comm_blocks}" if self.transport == "push" else f"transport={self.transport}"
        layer0 = f"layer0 {mover},num_phases={self.num_phases},beside={self.beside}"
        return layer0, f"layer1 {self._replace(transport='push')}"

    @property
    def plan(self) -> tuple[int, Transport]:
        """What its plan depends on."""
        return self.num_phases, self.transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One model at one number of tokens.

    Args:
        layer: The weights.
        workspace: The pool.
        tokens: ``(T, D)``.
        ids: ``(T, K)`` int32.
        weights: ``(T, K)`` float32.
        paths: Comet's path for every split; the first is the default.
        plans: The plan for every ``Split.plan``.
        hidden: Output ``(Q, F/TP)`` of layer 0 for every number of phases, filled by ``checked_launches``.
    """

    layer: Layer
    workspace: Workspace
    tokens: Tensor
    ids: Tensor
    weights: Tensor
    paths: dict[Split, SymmetricPath]
    plans: dict[tuple[int, Transport], Plan]
    hidden: dict[int, Tensor] = field(default_factory=dict)


def open_point(
    layer: Layer, group: ExpertGroup, num_tokens: int, routing: str, tries: list[OverlapConfig], ranks: Ranks
) -> Point:
    """Draw this rank's inputs and plan for every split of ``tries`` (collective).

    One grid serves every world size: more phases than ranks become as many, and equal splits become one.
    """
    config, device = layer.config, ranks.device
    generator = torch.Generator(device).manual_seed(ranks.rank)
    tokens = torch.randn(num_tokens, config.hidden_size, generator=generator, device=device).to(ranks.dtype)
    sizes = dict(num_tokens=num_tokens, num_experts=config.num_experts, top_k=config.top_k)
    ids, weights = make_routing(routing, **sizes, seed=ranks.rank, device=device)
    paths: dict[Split, SymmetricPath] = {}
    for wanted in tries:
        overlap = replace(wanted, num_phases=min(wanted.num_phases, group.parallel.world_size))
        path = SymmetricPath(config, group, overlap, use_kernels=device.type == "cuda")
        settings = path.settings
        split = Split(
            comm_blocks=settings.comm_blocks,
            num_panels=settings.layer1.num_panels,
            num_phases=path.overlap.num_phases,
            beside=int(settings.beside),
            transport=path.overlap.transport,
        )
        paths.setdefault(split, path)
    for path in {(split.beside, split.transport): path for split, path in paths.items()}.values():
        compile_kernels(layer, path, tokens, ids, weights, ranks)
    plans = {split.plan: path.plan(ids, weights) for split, path in paths.items()}
    group.workspace.check()
    return Point(
        layer=layer, workspace=group.workspace, tokens=tokens, ids=ids, weights=weights, paths=paths, plans=plans
    )


def compile_kernels(
    layer: Layer, path: SymmetricPath, tokens: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks
) -> None:
    """Launch each kernel once on a plan without rows, in which no rank waits for another however long it compiles.

    What cannot be launched is found again, and reported, when it is checked.
    """
    ops, workspace, settings = path.ops, path.workspace, path.settings
    plan = path.plan(torch.full_like(ids, -1), weights)
    hidden = tokens.new_zeros(plan.routed_row_ids.numel(), layer.w2.shape[2])
    attempt(partial(ops.layer0, tokens, layer.w1, plan, workspace, settings, save_pre=False), ranks, workspace)
    attempt(partial(ops.layer1, hidden, layer.w2, plan, workspace, settings), ranks, workspace)
    attempt(partial(ops.dispatch, tokens, plan, workspace, settings), ranks, workspace)


def prepare(point: Point) -> None:
    """Make the pool ready for one launch: counters at zero, and a barrier of the ranks that advances the epoch."""
    for plan in point.plans.values():
        plan.counters.zero_()
    next(iter(point.paths.values())).ops.barrier(point.workspace)


def try_launch(launch: Callable[[], T], point: Point, ranks: Ranks) -> tuple[T | None, str]:
    """Value of one launch and "", or ``None`` and why not; from a failure the ranks recover (collective)."""

    def action() -> T:
        prepare(point)
        value = launch()
        point.workspace.check()
        return value

    return attempt(action, ranks, point.workspace)
