"""Caches that leave some of their missing experts to the host's cores, by the real process."""

from __future__ import annotations

from dataclasses import replace

import torch
from cache_cases import CPU, Twins, check_slots, resident_weights, stored_experts
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase

from comet.experts import ExpertCache
from comet.experts.host.cores import HostCores
from comet.experts.host.profile import HostProfile, HostSizes
from comet.experts.store import HeldExperts
from comet.kernels.experts.tables import COUNT, DONE, READY
from comet.kernels.experts.waves import count_waves

# Of 1 to 8 missing experts the host computes 0, 1, 1, 1, 2, 2, 3 and 3; where the link is slow, 0, 1, 2, 3, 4, 5, ...
PROFILE = HostProfile(
    link_ns=200, shared_link_ns=200, request_ns=20, expert_ns=290, full_request_ns=20, full_expert_ns=290
)
SLOW_LINK = replace(PROFILE, link_ns=1000, shared_link_ns=1000)
DEADLINE_S = 60.0  # for answers that come
CASES = [
    DecodeCase(name="vector", T=1, K=3, E=9, D=80, F=48, config=VECTOR, seed=1),
    DecodeCase(name="fold", T=1, K=3, E=9, D=80, F=48, config=FOLD, seed=1),
    DecodeCase(name="vector, two tokens", T=2, K=3, E=24, D=64, F=32, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=3),
    DecodeCase(name="matrix, by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=4),
]
CASE = CASES[0]


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


def hosted_twins(
    case: DecodeCase, num_slots: int, profile: HostProfile, policy: str = "lru", first: int = 0
) -> tuple[Twins, HostCores]:
    """Caches that leave some of their misses to the host, which ask the same process in turn, and all experts."""
    print("seed", case.seed)
    mine, cores = hosted_cache(case, num_slots, profile, policy, first)
    places = {"num_experts": case.E, "first_expert": first}
    twin = ExpertCache(**mine.host.named_parts, num_slots=num_slots, device=CPU, policy=policy, **places)
    twin.share_with(cores, 0)
    return Twins(case, mine, twin, resident_weights(case, (first, case.E))), cores


def compare_steps(
    rank: int,
    world_size: int,
    case: DecodeCase,
    num_slots: int,
    policy: str,
    num_steps: int,
    profile: HostProfile | None = None,
) -> None:
    """Random steps by kernels and by twins: equal tables, outputs of resident experts, slots as stored.

    Each missing expert is fetched once, or computed on the host where there is a profile and the step is one wave: as
    many as its table says.
    """
    made, first, cores = torch.Generator().manual_seed(case.seed), int(num_slots < case.E), None
    if profile is None:
        twins = Twins.make(case, num_slots, policy, first)
    else:
        twins, cores = hosted_twins(case, num_slots, profile, policy, first)
    tables, of_twin = twins.mine.tables, twins.twin.tables
    for step in range(num_steps):
        tokens, ids, weights = twins.draw(made, 1 if step == 3 else case.T)  # a step of one wave in between
        needed = {expert for expert in ids.flatten().tolist() if expert >= first}
        missing, before = [expert for expert in needed if tables.slots[expert] < 0], tables.totals.clone()
        twins.step(tokens, ids, weights, hosted=cores is not None)
        in_waves = count_waves(ids.numel(), case.E - first, num_slots) > 1
        hosted = 0 if cores is None or in_waves else int(cores.mail.share[len(tokens), len(missing)])
        assert (tables.totals - before)[[0, 1, 7]].tolist() == [len(needed), len(missing) - hosted, hosted]
        assert torch.equal(tables.header, of_twin.header)
        count = int(tables.header[COUNT.value])
        assert torch.equal(tables.copies[:, :count], of_twin.copies[:, :count])
        if not in_waves:
            assert (tables.copies[1, count - hosted : count] == -1).all()
        check_slots(twins.mine)
    assert tables.totals[1] > 0
    assert not (tables.arriving == -2).any()
    assert not tables.header[[READY.value, DONE.value]].any(), "the next step finds its flags as this one did"
    if cores is not None:
        assert cores.counts[0] == 2 * tables.totals[7] > 0
        cores.check()
        cores.close()


def set_deadline(cache: ExpertCache, cores: HostCores, timeout_ns: int) -> None:
    cores.mail = replace(cores.mail, timeout_ns=timeout_ns)
    cache.host = replace(cache.host, mail=cores.mail)
    cache.weights = replace(cache.weights, host=cache.host)
