"""Expert caches of the decode cases' models."""

from __future__ import annotations

from dataclasses import replace

import torch
from decode_cases import QUANTISERS, DecodeCase

from comet.decode.weights import DecodeWeights
from comet.experts import ExpertCache
from comet.kernels.expert_tables import HostExperts

TABLES = ("slots", "arriving", "last_used", "owners")


def cache_of(case: DecodeCase, num_slots: int, policy: str, held: tuple[int, int]) -> ExpertCache:
    """An empty cache of some experts of the case's model."""
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
        **parts, num_slots=num_slots, device=torch.device("cpu"), policy=policy, num_experts=case.E, first_expert=first
    )


def parts_of(weights: DecodeWeights | HostExperts) -> list[torch.Tensor]:
    """Elements, and the scales of quantised experts, as bytes."""
    found = (weights.w1, weights.w2, weights.w1_scales, weights.w2_scales)
    return [part.view(torch.uint8) for part in found if part is not None]


def resident_weights(case: DecodeCase, held: tuple[int, int]) -> DecodeWeights:
    """The same experts, each in a slot of its own."""
    resident = cache_of(case, case.E, "lru", held)
    for expert in range(*held):
        resident.tables.slots[expert] = expert
        for slots, stored in zip(parts_of(resident.weights), parts_of(resident.host), strict=True):
            slots[expert] = stored[expert - held[0]]
    return replace(resident.weights, host=None)


def check_slots(cache: ExpertCache) -> None:
    """Every slot holds its expert as it is stored."""
    for slot, expert in enumerate(cache.tables.owners.tolist()):
        if expert >= 0:
            assert cache.tables.slots[expert] == slot
            for slots, stored in zip(parts_of(cache.weights), parts_of(cache.host), strict=True):
                assert torch.equal(slots[slot], stored[expert - cache.first_expert])
