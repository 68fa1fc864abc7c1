"""Routing of a draft: the r best experts of a layer instead of its K, or the r best among those that are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from comet.config import SpeculationConfig, require
from comet.layer.group import ExpertGroup
from comet.router.router import Router, Routing


class DraftRouter:
    """Routes a layer's tokens to fewer experts, by the layer's own scores; a ``comet.router.router.Routes``.

    Routing weights follow the layer's rule: where it renormalises its K weights to sum to one, the r weights do; where
    it does not, they are the scores as they are, and their sum is smaller than that of K.

    Args:
        draft_experts: r, at least 1 and at most K.
        slots: ``(E,)`` int32, -1 for experts that are not cached (``ExpertCache.weights.slots``, or a row of
            ``CachedOnRanks.table``). Only cached experts are chosen then; where a token finds fewer than r of them, the
            rest of its row is masked. Read on the device at every step. ``None``: all experts are chosen from.
    """

    def __init__(self, router: Router, draft_experts: int, slots: Tensor | None = None) -> None:
        self.router = router
        self.config = replace(router.config, top_k=draft_experts)
        self.slots = slots
        self.measure = router.measure

    def __call__(self, tokens: Tensor) -> Routing:
        """``(T, D)`` -> a ``Routing`` with ids ``(T, r)``, of which -1 is masked with weight 0."""
        bias = self.router.selection_bias
        if self.slots is None:
            return self.router.route(tokens, self.config, bias)
        even = self.router.weight.new_zeros(self.config.num_experts) if bias is None else bias
        bias = even.masked_fill(self.slots < 0, float("-inf"))
        routing = self.router.route(tokens, self.config, bias)
        missing = self.slots[routing.top_k_ids.long()] < 0
        return replace(
            routing,
            top_k_ids=routing.top_k_ids.masked_fill(missing, -1),
            top_k_weights=routing.top_k_weights.masked_fill(missing, 0.0),
        )


class CachedOnRanks:
    """Which experts the ranks of a group have cached, in one table that is equal on all of them.

    An expert counts as cached, whichever rank holds it, where all ranks that hold a part of it (the TP ranks of its EP
    rank) have that part in a slot.

    Example: EP2 x TP2, two experts on each EP rank. Expert 0 is cached on ranks 0 and 1, expert 1 on rank 0 only and
    expert 3 on ranks 2 and 3: the table is ``[[0, -1, -1, 0]]``.

    Args:
        slots: ``(E,)`` int32 of each layer: this rank's slot of every expert, -1: not cached, or another rank's.
    """

    def __init__(self, slots: Sequence[Tensor], group: ExpertGroup) -> None:
        self._slots = slots
        self._group = group
        self.table = torch.full((len(slots), len(slots[0])), -1, dtype=torch.int32, device=group.device)

    def refresh(self) -> None:
        """Ask all ranks, in one collective that no host waits for; ``table``, which graphs may read, stays in place."""
        parts = (torch.stack(list(self._slots)) >= 0).int()
        dist.all_reduce(parts, group=self._group.process_group)
        self.table.copy_((parts == self._group.parallel.tp).int() - 1)


class DraftRouters:
    """Routes the drafts of all layers of a model.

    Args:
        slots: ``(E,)`` int32 of each layer, see ``CachedOnRanks``; empty without caches.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        config: SpeculationConfig,
        slots: Sequence[Tensor],
        group: ExpertGroup | None,
    ) -> None:
        require(
            bool(slots) or not config.draft_cached_only,
            "draft_cached_only=True must come with expert_budget: without one all experts are in GPU memory",
        )
        self.cached: CachedOnRanks | None = None  # which experts drafts choose from, over ranks
        # whether drafts bring experts for their verification, which displace others (expect_drafts)
        self.brings = False
        chosen: Sequence[Tensor | None] = [None] * len(routers)
        if config.draft_cached_only:
            chosen = slots
            if group is not None and group.parallel.world_size > 1:
                self.cached = CachedOnRanks(slots, group)
                chosen = [*self.cached.table]
        numbers = config.experts_per_layer(min((each.config.top_k for each in routers), default=2), len(routers))
        self.layers = [DraftRouter(*each) for each in zip(routers, numbers, chosen, strict=True)]

    def refresh(self, *, behind_draft: bool) -> None:
        """Ask all ranks what is cached, where drafts depend on it (collective); due before every draft.

        A draft ``behind_draft`` needs it only where drafts fetch experts, which those with cached experts alone do not.
        """
        if self.cached is not None and (self.brings or not behind_draft):
            self.cached.refresh()
