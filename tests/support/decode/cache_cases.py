"""Expert caches of the decode cases' models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from decode_cases import QUANTISERS, DecodeCase

from comet.comm import make_communicator
from comet.decode import RankDecode
from comet.decode.weights import DecodeWeights
from comet.experts import ExpertCache
from comet.experts.prefetch import prefetches
from comet.kernels.experts.tables import HostExperts

TABLES = ("slots", "arriving", "last_used", "owners")
CPU = torch.device("cpu")


def decide_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever opens a store decide on prefetch as if its device were a GPU."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("comet.experts.paths.prefetches", lambda setting, _, **named: prefetches(setting, gpu, **named))


def cache_of(
    case: DecodeCase, num_slots: int, policy: str, held: tuple[int, int], device: torch.device = CPU
) -> ExpertCache:
    made = torch.Generator().manual_seed(case.seed)
    first, end = held
    parts = {
        name: torch.randn(case.E, *size, generator=made)[first:end] / 8
        for name, size in (("w1", (2 * case.F, case.D)), ("w2", (case.D, case.F)))
    }
    if case.quantised:
        packed = {name: QUANTISERS[case.quantised](weight) for name, weight in parts.items()}
        parts = {name: each.elements for name, each in packed.items()}
        parts |= {f"{name}_scales": each.scales for name, each in packed.items()}
    return ExpertCache(
        **parts, num_slots=num_slots, device=device, policy=policy, num_experts=case.E, first_expert=first
    )


def parts_of(weights: DecodeWeights | HostExperts) -> list[torch.Tensor]:
    """Elements, and the scales of quantised experts, as bytes."""
    found = (weights.w1, weights.w2, weights.w1_scales, weights.w2_scales)
    return [part.view(torch.uint8) for part in found if part is not None]


def resident_weights(case: DecodeCase, held: tuple[int, int], device: torch.device = CPU) -> DecodeWeights:
    """The same experts, each in a slot of its own."""
    resident = cache_of(case, case.E, "lru", held, device)
    for expert in range(*held):
        resident.tables.slots[expert] = expert
        for slots, stored in zip(parts_of(resident.weights), parts_of(resident.host), strict=True):
            slots[expert] = stored[expert - held[0]]
    return replace(resident.weights, host=None)


def check_slots(cache: ExpertCache) -> None:
    for slot, expert in enumerate(cache.tables.owners.tolist()):
        if expert >= 0:
            assert cache.tables.slots[expert] == slot
            for slots, stored in zip(parts_of(cache.weights), parts_of(cache.host), strict=True):
                assert torch.equal(slots[slot], stored[expert - cache.first_expert])


def compare_waves_over_ranks(
    rank: int, world_size: int, case: DecodeCase, num_slots: int, counts: tuple[int, ...], device: torch.device = CPU
) -> None:
    """Ranks take as many waves, whatever each of them misses, and give what they give with all experts."""
    made = torch.Generator().manual_seed(case.seed)
    num_held = case.E // world_size
    held = (num_held * rank, num_held * (rank + 1))
    cache, everything = cache_of(case, num_slots, "lru", held, device), resident_weights(case, held, device)
    comm = make_communicator("auto", dist.group.WORLD, str(device))
    decode = RankDecode(comm, hidden_size=case.D, max_tokens=case.T, use_kernels=True)
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
