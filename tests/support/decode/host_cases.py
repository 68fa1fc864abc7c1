"""Caches that leave some of their missing experts to the host's cores, by the real process."""

from __future__ import annotations

from dataclasses import replace

import torch
from cache_cases import CPU, stored_experts
from decode_cases import VECTOR, DecodeCase

from comet.experts import ExpertCache
from comet.experts.host.cores import HostCores
from comet.experts.host.profile import HostProfile, HostSizes
from comet.experts.store import HeldExperts

# Of 1 to 8 missing experts the host computes 0, 1, 1, 1, 2, 2, 3 and 3; where the link is slow, 0, 1, 2, 3, 4, 5, ...
PROFILE = HostProfile(
    link_ns=200, shared_link_ns=200, request_ns=20, expert_ns=290, full_request_ns=20, full_expert_ns=290
)
SLOW_LINK = replace(PROFILE, link_ns=1000, shared_link_ns=1000)
DEADLINE_S = 60.0  # for answers that come
CASE = DecodeCase(name="vector", T=1, K=3, E=9, D=80, F=48, config=VECTOR, seed=1)


def leave_all_to(cores: HostCores) -> None:
    """Whatever a step misses: then no step depends on what an earlier one fetched."""
    cores.mail.share.copy_(torch.arange(cores.mail.share.shape[1]).expand_as(cores.mail.share))


def hosted_cache(
    case: DecodeCase,
    num_slots: int,
    profile: HostProfile | None = PROFILE,
    policy: str = "lru",
    first: int = 0,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> tuple[ExpertCache, HostCores]:
    """An empty cache of the case's experts from ``first`` on, in memory that a process of its own maps as well."""
    places = {"num_experts": case.E, "first_expert": first}
    sizes = HostSizes(**places, hidden_size=case.D, top_k=case.K, max_tokens=case.T, dtype=dtype)
    cores = HostCores(2 if device.type == "cuda" else 1, sizes, device, DEADLINE_S)
    held = HeldExperts.hold(stored_experts(case, (first, case.E), dtype), device, cores.file)
    cache = ExpertCache(**held.named_parts, num_slots=num_slots, device=device, policy=policy, **places)
    cores.start([held], profile)
    cache.share_with(cores, 0)
    return cache, cores


def set_deadline(cache: ExpertCache, cores: HostCores, timeout_ns: int) -> None:
    cores.mail = replace(cores.mail, timeout_ns=timeout_ns)
    cache.host = replace(cache.host, mail=cores.mail)
    cache.weights = replace(cache.weights, host=cache.host)
