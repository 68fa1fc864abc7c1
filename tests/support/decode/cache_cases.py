"""Expert caches of the decode cases' models, and such as leave some of their missing experts to the host's cores."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from activation_cases import draw_biases
from decode_cases import VECTOR, DecodeCase, draw_experts, stored_parts
from torch import Tensor

from comet.comm import make_communicator
from comet.decode import RankDecode
from comet.decode.weights import DecodeWeights
from comet.experts.cache import ExpertCache
from comet.experts.host.cores import HostCores
from comet.experts.host.profile import HostProfile, HostSizes
from comet.experts.options import StoreOptions
from comet.experts.store import HeldExperts
from comet.kernels.experts.tables import HostExperts

CPU = torch.device("cpu")


def decide_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores decide on prefetch as if their device were a GPU."""
    gpu = torch.device("cuda", 0)
    decide = StoreOptions.prefetches
    monkeypatch.setattr(StoreOptions, "prefetches", lambda self, _, **named: decide(self, gpu, **named))


def stored_experts(case: DecodeCase, held: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The parts of the case's experts from ``held[0]`` to ``held[1]`` by their names, on the CPU."""
    parts = stored_parts(case.quantised, *draw_experts(case, torch.float32 if case.quantised else dtype))
    if case.biased:
        parts |= draw_biases(case.E, case.F, case.D, dtype, case.seed)._asdict()
    return {name: part[slice(*held)] for name, part in parts.items()}


def cache_of(
    case: DecodeCase,
    num_slots: int,
    held: tuple[int, int] | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> ExpertCache:
    """An empty cache of experts from ``held[0]`` to ``held[1]``, of all where it is ``None``."""
    held = held or (0, case.E)
    place = dict(num_slots=num_slots, num_experts=case.E, first_expert=held[0], activation=case.activation)
    return ExpertCache(HeldExperts.hold(stored_experts(case, held, dtype), device), **place, device=device)


def resident_weights(
    case: DecodeCase,
    held: tuple[int, int] | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> DecodeWeights:
    """The same experts, each in a slot of its own."""
    first, end = held or (0, case.E)
    slots = torch.arange(case.E, dtype=torch.int32)
    slots[:first] = slots[end:] = -1
    parts = stored_experts(case, (0, case.E), dtype) | {"slots": slots}
    return DecodeWeights(**{name: part.to(device) for name, part in parts.items()}, activation=case.activation)


def parts_of(weights: DecodeWeights | HostExperts) -> list[Tensor]:
    """Elements, and the scales of quantised experts, as bytes."""
    return [part.view(torch.uint8) for part in weights.parts]


def check_slots(cache: ExpertCache) -> None:
    """Slots that are used hold their experts as they are stored on the host."""
    for slot, expert in enumerate(cache.tables.owners.tolist()):
        if expert >= 0:
            assert cache.tables.slots[expert] == slot
            for slots, stored in zip(parts_of(cache.weights), parts_of(cache.host), strict=True):
                assert torch.equal(slots[slot].cpu(), stored[expert - cache.first_expert])


def compare_waves_over_ranks(
    rank: int,
    world_size: int,
    case: DecodeCase,
    num_slots: int,
    counts: tuple[int, ...],
    replicated: bool,
    device: torch.device = CPU,
) -> None:
    """Ranks take as many waves, whatever each of them misses, and give what they give with all experts.

    Their tokens are the same or, not ``replicated``, each rank's own.
    """
    made = torch.Generator().manual_seed(case.seed + (0 if replicated else 100 * rank))
    num_held = case.E // world_size
    held = (num_held * rank, num_held * (rank + 1))
    cache, everything = cache_of(case, num_slots, held, device), resident_weights(case, held, device)
    comm = make_communicator("auto", dist.group.WORLD, str(device))
    decode = RankDecode(comm, hidden_size=case.D, max_tokens=case.T, use_kernels=True, replicated=replicated)
    for num_tokens in counts:
        tokens, weights = (torch.rand(num_tokens, size, generator=made).to(device) for size in (case.D, case.K))
        ids = torch.randint(-1, case.E, (num_tokens, case.K), generator=made, dtype=torch.int32)
        ids[:, 0] = 1  # rank 1 may have nothing to do in a wave in which rank 0 has
        ids = ids.to(device)
        steps = [decode(tokens, ids, weights, each, config=case.config) for each in (cache.weights, everything)]
        assert torch.equal(*steps)
    assert int(decode.epoch) == 2 * len(counts), "a step is one epoch, however many waves it takes"
    decode.check()
    comm.close()


# ---- with a process of the host --------------------------------------------------------------------------------------


# The host computes 0, 1, 1, 1, 2, 2, 3 and 3 of 1 to 8 missing experts; with a slow link 0, 1, 2, 3, 4, 5, ...
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
    first: int = 0,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> tuple[ExpertCache, HostCores]:
    """An empty cache of the case's experts from ``first`` on, in memory that a process of its own maps as well."""
    places = {"num_experts": case.E, "first_expert": first}
    sizes = HostSizes(**places, hidden_size=case.D, top_k=case.K, max_tokens=case.T, dtype=dtype)
    cores = HostCores(2 if device.type == "cuda" else 1, sizes, device, DEADLINE_S)
    held = HeldExperts.hold(stored_experts(case, (first, case.E), dtype), device, cores.file)
    cache = ExpertCache(held, num_slots, device, **places)
    cores.start([held], profile)
    cache.share_with(cores, 0)
    return cache, cores


def set_deadline(cache: ExpertCache, cores: HostCores, timeout_ns: int) -> None:
    cores.mail = cores.mail._replace(timeout_ns=timeout_ns)
    cache.host = replace(cache.host, mail=cores.mail)
    cache.weights = replace(cache.weights, host=cache.host)
