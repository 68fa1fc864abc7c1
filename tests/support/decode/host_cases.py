"""Caches that leave some of their missing experts to the host's cores, by the real process."""

from __future__ import annotations

from dataclasses import replace

import torch
from decode_cases import MATRIX, VECTOR, DecodeCase, stored_parts
from torch import Tensor

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
CPU = torch.device("cpu")
CASES = [
    DecodeCase(name="vector", T=1, K=3, E=9, D=80, F=48, config=VECTOR, seed=1),
    DecodeCase(name="fold", T=1, K=3, E=9, D=80, F=48, config=replace(VECTOR, fold=True), seed=1),
    DecodeCase(name="vector, two tokens", T=2, K=3, E=24, D=64, F=32, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=3),
    DecodeCase(name="matrix, by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=4),
]
CASE = CASES[0]
IN_WAVES = [
    DecodeCase(name="vector", T=2, K=3, E=24, D=64, F=32, config=VECTOR, seed=1),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=2),
    DecodeCase(name="by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=3),
    DecodeCase(name="mxfp4", T=3, K=2, E=12, D=64, F=32, config=None, seed=5, quantised="mxfp4"),
]


def leave_all_to(cores: HostCores) -> None:
    """Whatever a step misses: then no step depends on what an earlier one fetched."""
    cores.mail.share.copy_(torch.arange(cores.mail.share.shape[1]).expand_as(cores.mail.share))


def hosted_cache(
    w1: Tensor,
    w2: Tensor,
    num_slots: int,
    device: torch.device,
    *,
    top_k: int,
    max_tokens: int,
    profile: HostProfile | None = PROFILE,
    policy: str = "lru",
    first_expert: int = 0,
    quantised: str = "",
) -> tuple[ExpertCache, HostCores]:
    """An empty cache of experts on the CPU, which are copied to memory that a process of its own maps as well.

    ``quantised``: one of ``QUANTISERS``, which they go through before.
    """
    held, _, hidden_size = w1.shape
    places = {"num_experts": first_expert + held, "first_expert": first_expert}
    sizes = HostSizes(**places, hidden_size=hidden_size, top_k=top_k, max_tokens=max_tokens, dtype=w1.dtype)
    cores = HostCores(2 if device.type == "cuda" else 1, sizes, device, DEADLINE_S)
    held_experts = HeldExperts.hold(stored_parts(quantised, w1, w2), device, cores.file)
    cache = ExpertCache(**held_experts.named_parts, num_slots=num_slots, device=device, policy=policy, **places)
    cores.start([held_experts], profile)
    cache.share_with(cores, 0)
    return cache, cores


def cache_of(
    case: DecodeCase, num_slots: int, profile: HostProfile, policy: str = "lru", first: int = 0
) -> tuple[ExpertCache, HostCores]:
    """An empty cache of the case's experts from ``first`` on, and the cores that share them."""
    made = torch.Generator().manual_seed(case.seed)
    shapes = (2 * case.F, case.D), (case.D, case.F)
    w1, w2 = (torch.randn(case.E, *shape, generator=made)[first:] / 8 for shape in shapes)
    sizes = {"top_k": case.K, "max_tokens": case.T, "first_expert": first}
    return hosted_cache(w1, w2, num_slots, CPU, **sizes, profile=profile, policy=policy, quantised=case.quantised)


def two_caches(
    case: DecodeCase, num_slots: int, profile: HostProfile, policy: str = "lru", first: int = 0
) -> tuple[ExpertCache, ExpertCache, HostCores]:
    """``cache_of``, and a second cache of the same experts, in turn with which it asks the same process."""
    mine, cores = cache_of(case, num_slots, profile, policy, first)
    places = {"num_experts": case.E, "first_expert": first}
    twin = ExpertCache(**mine.host.named_parts, num_slots=num_slots, device=CPU, policy=policy, **places)
    twin.share_with(cores, 0)
    return mine, twin, cores


def set_deadline(cache: ExpertCache, cores: HostCores, timeout_ns: int) -> None:
    cores.mail = replace(cores.mail, timeout_ns=timeout_ns)
    cache.host = replace(cache.host, mail=cores.mail)
    cache.weights = replace(cache.weights, host=cache.host)
