"""The experts of a model's layers as its store holds them, each layer with slots on the device (collective)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from comet.decode.runners import Runner
from comet.experts.cache import CachedExperts, CacheReport, ExpertCache, report_of
from comet.experts.fitting import fit_slots, least_of_ranks
from comet.experts.staged import Stage, StagedCache, StagedExperts, staged_report_of
from comet.experts.store import ExpertReader, HeldExperts, warn_pageable
from comet.group import ExpertGroup
from comet.layout import ExpertLayout

CachedPath = CachedExperts | StagedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Where the slots of a model's layers are, and what reads them.

    Args:
        num_slots: S, asked for in each layer; fewer where memory does not hold them (``fit_slots``).
        layout: This rank's place among the experts.
        runner: Of all layers; its ``decode`` computes from the slots.
        dtype: Of experts that are not quantised.
        device: Of the slots.
        group: The ranks, which all open the same layers; ``None``: this rank alone.
    """

    num_slots: int
    layout: ExpertLayout
    runner: Runner
    dtype: torch.dtype
    device: torch.device
    group: ExpertGroup | None = None

    def over_host(self, layers: Sequence[HeldExperts]) -> list[CachedPath]:
        """The layers with their experts in host memory; where a rank cannot pin it, the host copies on all ranks.

        Raises:
            NotImplementedError: If quantised experts are in memory that the device does not read.
            ValueError: If the device's memory does not hold a layer's fewest slots.
        """
        if least_of_ranks(all(layer.readable for layer in layers), self.group):
            makers = [partial(self._cache, layer) for layer in layers]
            caches = fit_slots(makers, self.num_slots, self._least, self.group)
            return [CachedExperts(cache, self.runner, self.layout.top_k) for cache in caches]
        pageable = sum(layer.num_bytes for layer in layers if not layer.readable)
        if layers[0].w1_scales is not None:
            raise NotImplementedError(
                f"quantised experts are not copied by the host yet, and {pageable:,} bytes of memory for them cannot "
                "be pinned (ulimit -l, or a container's limit): allow that, or keep the experts in the model's type"
            )
        if pageable:
            warn_pageable(pageable, layers[0], self.device)
        return self.over_readers(layers, self.num_slots)

    def over_readers(
        self, layers: Sequence[ExpertReader], num_places: int, files: ExitStack | None = None
    ) -> list[CachedPath]:
        """The layers with their experts read when they are needed, into host memory for so many of all layers.

        Raises:
            ValueError: If the device's memory does not hold a layer's fewest slots.
        """
        (_, *w1), (_, *w2) = layers[0].shapes
        stage = Stage(num_places, (tuple(w1), tuple(w2)), self.dtype, self.device)
        stage.files = None if files is None else files.pop_all()
        makers = [partial(self._staged, layer, stage, number) for number, layer in enumerate(layers)]
        caches = fit_slots(makers, self.num_slots, self._least, self.group)
        return [StagedExperts(cache, self.runner, self.layout.top_k) for cache in caches]

    @property
    def _least(self) -> int:
        return min(self.layout.top_k, self.layout.experts_local)

    @property
    def _place(self) -> dict[str, Any]:
        return {"num_experts": self.layout.num_experts, "first_expert": self.layout.first_expert}

    def _cache(self, layer: HeldExperts, num_slots: int) -> ExpertCache:
        return ExpertCache(**layer.parts, num_slots=num_slots, device=self.device, **self._place)

    def _staged(self, layer: ExpertReader, stage: Stage, number: int, num_slots: int) -> StagedCache:
        return StagedCache(layer, stage, number, num_slots, self.dtype, self.device, **self._place)


def report_of_caches(caches: Sequence[ExpertCache | StagedCache]) -> CacheReport | None:
    """What the caches of all layers did so far; ``None`` without any. Waits for their device."""
    staged = [cache for cache in caches if isinstance(cache, StagedCache)]
    if staged:
        return staged_report_of(staged)
    return report_of([cache for cache in caches if isinstance(cache, ExpertCache)]) if caches else None
