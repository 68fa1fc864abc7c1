"""How layers compute experts from a store: a GPU reads the missing ones itself, or the host brings them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from comet.decode.runners import Runner
from comet.decode.scales import mx_name
from comet.errors import UnavailableError
from comet.experts.cache import CachedExperts, CacheReport, ExpertCache, report_of
from comet.experts.fitting import fit_slots, least_of_ranks
from comet.experts.host_cores import HostCores, started
from comet.experts.staged import Stage, StagedCache, StagedExperts, staged_report_of
from comet.experts.store import ExpertReader, HeldExperts, warn_pageable
from comet.group import ExpertGroup
from comet.kernels.expert_tables import Policy
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
        policy: Whose slot is given away.
        cores: That compute some of the missing experts; the host's store is in their file.
    """

    num_slots: int
    layout: ExpertLayout
    runner: Runner
    dtype: torch.dtype
    device: torch.device
    group: ExpertGroup | None = None
    policy: Policy = "lru"
    cores: HostCores | None = None

    def over_host(self, layers: Sequence[HeldExperts]) -> Sequence[CachedPath]:
        """The paths of layers whose experts are in host memory (collective).

        Where a rank's device cannot read its own, that is said once, and the host copies on all ranks.

        Raises:
            NotImplementedError: If memory cannot be pinned, and experts are quantised or the policy is not ``lru``.
            UnavailableError: If memory cannot be pinned, and there are cores that are to compute.
            ValueError: If the device's memory does not hold a layer's fewest slots.
        """
        if least_of_ranks(all(layer.readable for layer in layers), self.group):
            caches = self._fitting([partial(self._cache, layer) for layer in layers])
            cores = started(self.cores, layers)
            if cores is not None:
                for number, cache in enumerate(caches):
                    cache.share_with(cores, number)
            return [CachedExperts(cache, self.runner, self.layout.top_k) for cache in caches]
        pageable = sum(layer.num_bytes for layer in layers if not layer.readable)
        self._check_pageable(layers[0], pageable)
        if pageable:
            warn_pageable(pageable, layers[0], self.device)
        return self.over_readers(layers, self.num_slots)

    def over_readers(
        self, layers: Sequence[ExpertReader], num_places: int, files: ExitStack | None = None
    ) -> Sequence[CachedPath]:
        """The paths of layers whose experts the host brings (collective).

        Args:
            layers: Where they are read.
            num_places: Experts of all layers together that the memory holds which is copied from.
            files: Open ones that are read, if any; they stay open as long as the paths.

        Raises:
            ValueError: If the device's memory does not hold a layer's fewest slots.
        """
        (_, *w1), (_, *w2) = layers[0].shapes
        stage = Stage(num_places, (tuple(w1), tuple(w2)), self.dtype, self.device)
        stage.files = None if files is None else files.pop_all()
        caches = self._fitting([partial(self._staged, layer, stage, number) for number, layer in enumerate(layers)])
        return [StagedExperts(cache, self.runner, self.layout.top_k) for cache in caches]

    def _fitting(self, makers: Sequence[Any]) -> list[Any]:
        least = min(self.layout.top_k, self.layout.experts_local)
        return fit_slots(makers, self.num_slots, least, self.group)

    def _cache(self, layer: HeldExperts, num_slots: int) -> ExpertCache:
        return ExpertCache(
            **layer.named_parts, num_slots=num_slots, device=self.device, policy=self.policy, **self._place
        )

    def _staged(self, layer: ExpertReader, stage: Stage, number: int, num_slots: int) -> StagedCache:
        return StagedCache(layer, stage, number, num_slots, self.dtype, self.device, **self._place)

    @property
    def _place(self) -> dict[str, Any]:
        return {"num_experts": self.layout.num_experts, "first_expert": self.layout.first_expert}

    def _check_pageable(self, layer: HeldExperts, num_bytes: int) -> None:
        refused = f"{num_bytes:,} bytes of memory for them cannot be pinned (ulimit -l, or a container's limit)"
        if self.cores is not None:
            self.cores.close()
            if self.cores.insists:
                raise UnavailableError(
                    f"host_cores computes from pinned memory, and {refused}: allow that, or set host_cores=off"
                )
        scales = layer.w1_scales
        if scales is not None:
            kind = mx_name(layer.w1).lower() if scales.dtype == torch.uint8 else "fp8"
            raise NotImplementedError(
                f"experts in {kind} are not copied by the host yet, and {refused}: allow that, or keep the experts in "
                "the model's type"
            )
        if self.policy != "lru":
            raise NotImplementedError(
                f"expert_policy={self.policy!r} is for pinned memory, and {refused}: allow that, or take 'lru'"
            )


def report_of_paths(paths: Sequence[CachedPath]) -> CacheReport | None:
    """What the caches of all layers did so far; ``None`` without a layer. Waits for their device."""
    staged = [path.cache for path in paths if isinstance(path, StagedExperts)]
    if staged:
        return staged_report_of(staged)
    cached = [path.cache for path in paths if isinstance(path, CachedExperts)]
    return report_of(cached) if cached else None


def cores_of_paths(paths: Sequence[CachedPath]) -> HostCores | None:
    """The host's cores that compute some of the experts of all layers, if there are any."""
    cores = (path.cache.cores for path in paths if isinstance(path, CachedExperts))
    return next(cores, None)
