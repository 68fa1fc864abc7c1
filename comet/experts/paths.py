"""How layers compute experts from a store: a GPU reads the missing ones itself, or the host brings them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comet.decode.runners import Runner
from comet.decode.scales import mx_name
from comet.errors import UnavailableError
from comet.experts.cache import CachedExperts, CacheReport, ExpertCache, report_of
from comet.experts.host_cores import HostCores, started
from comet.experts.staged import Stage, StagedCache, StagedExperts, staged_report_of
from comet.experts.store import ExpertReader, HeldExperts, warn_pageable
from comet.kernels.expert_tables import Policy
from comet.layout import ExpertLayout


def open_host_store(
    held: Sequence[HeldExperts],
    layout: ExpertLayout,
    num_slots: int,
    runner: Runner,
    device: torch.device,
    *,
    policy: Policy = "lru",
    cores: HostCores | None = None,
) -> list[CachedExperts] | list[StagedExperts]:
    """The paths of layers whose experts are in host memory; where ``device`` cannot read it, that is said once.

    Args:
        held: This rank's experts of each layer.
        layout: Of these.
        num_slots: S, experts of a layer on the device.
        runner: Of all layers.
        device: Of the slots.
        policy: Whose slot is given away.
        cores: That compute some of the missing experts; the store is in their file.

    Raises:
        NotImplementedError: If memory cannot be pinned, and experts are quantised or the policy is not ``lru``.
        UnavailableError: If memory cannot be pinned, and there are several ranks, or cores that are to compute.
    """
    pageable = sum(layer.num_bytes for layer in held if not layer.readable)
    if not pageable:
        place: dict[str, Any] = dict(policy=policy, num_experts=layout.num_experts, first_expert=layout.first_expert)
        caches = [ExpertCache(**layer.named_parts, num_slots=num_slots, device=device, **place) for layer in held]
        cores = started(cores, held)
        if cores is not None:
            for number, cache in enumerate(caches):
                cache.share_with(cores, number)
        return [CachedExperts(cache, runner, layout.top_k) for cache in caches]
    refused = f"{pageable:,} bytes of memory for them cannot be pinned (ulimit -l, or a container's limit): allow that"
    if cores is not None:
        cores.close()
        if cores.insists:
            raise UnavailableError(f"host_cores computes from pinned memory, and {refused}, or set host_cores=off")
    scales = held[0].w1_scales
    if scales is not None:
        kind = mx_name(held[0].w1).lower() if scales.dtype == torch.uint8 else "fp8"
        raise NotImplementedError(
            f"experts in {kind} are not copied by the host yet, and {refused}, or keep the experts in the model's type"
        )
    if policy != "lru":
        raise NotImplementedError(f"expert_policy={policy!r} is for pinned memory, and {refused}, or take 'lru'")
    if layout.world_size > 1:
        raise UnavailableError(f"experts of several ranks are not copied by the host yet, and {refused}")
    warn_pageable(pageable)
    w1, w2 = held[0].w1[0], held[0].w2[0]
    stage = Stage(num_slots, (tuple(w1.shape), tuple(w2.shape)), w1.dtype, device)
    return open_staged(held, stage, layout.top_k, num_slots, w1.dtype, device, runner)


def open_staged(
    readers: Sequence[ExpertReader],
    stage: Stage,
    top_k: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    runner: Runner,
) -> list[StagedExperts]:
    """The paths of layers whose experts the host brings through a stage; arguments as of ``StagedCache``."""
    caches = [StagedCache(reader, stage, number, num_slots, dtype, device) for number, reader in enumerate(readers)]
    return [StagedExperts(cache, runner.decode, top_k) for cache in caches]


def report_of_paths(paths: Sequence[CachedExperts | StagedExperts]) -> CacheReport | None:
    """What the caches of all layers did so far; ``None`` without a layer. Waits for their device."""
    staged = [path.cache for path in paths if isinstance(path, StagedExperts)]
    if staged:
        return staged_report_of(staged)
    cached = [path.cache for path in paths if isinstance(path, CachedExperts)]
    return report_of(cached) if cached else None


def cores_of_paths(paths: Sequence[CachedExperts | StagedExperts]) -> HostCores | None:
    """The host's cores that compute some of the experts of all layers, if there are any."""
    cores = (path.cache.cores for path in paths if isinstance(path, CachedExperts))
    return next(cores, None)
