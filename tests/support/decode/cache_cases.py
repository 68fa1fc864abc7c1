"""Expert caches of the decode cases' models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import pytest
import torch
import torch.distributed as dist
from activation_cases import draw_biases
from decode_cases import DecodeCase, draw_experts, stored_parts
from torch import Tensor

from comet.comm import make_communicator
from comet.decode import RankDecode
from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import DecodeWeights
from comet.experts import ExpertCache
from comet.experts.prefetch import prefetches
from comet.kernels.experts.tables import AHEAD_WORDS, CLOCK, NEXT, PLANNED, CacheTables, HostExperts

TABLES = ("slots", "arriving", "last_used", "owners")
CPU = torch.device("cpu")


def decide_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever opens a store decide on prefetch as if its device were a GPU."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("comet.experts.paths.prefetches", lambda setting, _, **named: prefetches(setting, gpu, **named))


def stored_experts(case: DecodeCase, held: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The parts of the case's experts from ``held[0]`` to ``held[1]`` by their names, on the CPU."""
    parts = stored_parts(case.quantised, *draw_experts(case, torch.float32 if case.quantised else dtype))
    if case.biased:
        parts |= draw_biases(case.E, case.F, case.D, dtype, case.seed)._asdict()
    return {name: part[slice(*held)] for name, part in parts.items()}


def cache_of(
    case: DecodeCase,
    num_slots: int,
    policy: str = "lru",
    held: tuple[int, int] | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> ExpertCache:
    """An empty cache of experts from ``held[0]`` to ``held[1]``, of all where it is ``None``."""
    held = held or (0, case.E)
    place = dict(num_slots=num_slots, num_experts=case.E, first_expert=held[0], activation=case.activation)
    return ExpertCache(**stored_experts(case, held, dtype), **place, device=device, policy=policy)


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


def host_of(*owners: tuple[int, int], num_experts: int = 6) -> HostExperts:
    """Slots of (expert, last used in step); an expert has ten pieces: w1 has 6 of 1024 words of 8 bytes, w2 has 4."""
    tables = CacheTables.create(num_experts, len(owners), torch.device("cpu"))
    for slot, (expert, step) in enumerate(owners):
        if expert >= 0:
            tables.slots[expert] = tables.arriving[expert] = slot
            tables.last_used[expert] = step
        tables.owners[slot] = expert
    tables.header[CLOCK.value] = max(step for _, step in owners)
    weights = torch.rand(num_experts, 12, 1024), torch.rand(num_experts, 1024, 8)
    return HostExperts(w1=weights[0], w2=weights[1], tables=tables, prefetched=True)


def stop_after(pieces: int, cache: ExpertCache) -> None:
    """As if so many pieces had come: other numbers behind them, and slots that were not begun as they were."""
    tables = cache.tables
    tables.header[NEXT.value] = pieces
    for copy in range(int(tables.header[PLANNED.value])):
        slot, former = tables.ahead[1:, copy].tolist()
        there = pieces - copy * cache.host.pieces
        has_begun = there > 0
        for slots, stored in zip(parts_of(cache.weights), parts_of(cache.host), strict=True):
            if has_begun:
                slots[slot].flatten()[max(there, 0) * 8 * AHEAD_WORDS :] = 0x7F
                there -= math.ceil(slots[slot].numel() / (8 * AHEAD_WORDS))
            elif former >= 0:
                slots[slot] = stored[former - cache.first_expert]


@dataclass(frozen=True)
class Twins:
    """A cache that kernels serve, one that their twins do, and all experts; the same is asked of the three."""

    case: DecodeCase
    mine: ExpertCache
    twin: ExpertCache
    everything: DecodeWeights

    @classmethod
    def make(cls, case: DecodeCase, num_slots: int, policy: str = "lru", first: int = 1) -> Self:
        """Empty caches of the experts from ``first`` on."""
        print("seed", case.seed)
        held = (first, case.E)
        mine, twin = (cache_of(case, num_slots, policy, held) for _ in range(2))
        return cls(case, mine, twin, resident_weights(case, held))

    def draw(self, made: torch.Generator, num_tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, ids, some of them -1, and weights of a step."""
        case, count = self.case, self.case.T if num_tokens is None else num_tokens
        tokens, weights = (torch.rand(count, size, generator=made) for size in (case.D, case.K))
        return tokens, torch.randint(-1, case.E, (count, case.K), generator=made, dtype=torch.int32), weights

    def step(self, *given: Tensor, hosted: bool = False) -> None:
        """A step with the output of all experts and equal tables; equal bits, unless some of them are ``hosted``."""
        output = run_kernels(*given, self.mine.weights, config=self.case.config)
        of_twin = warp_decode_torch(*given, self.twin.weights)
        wanted = run_kernels(*given, self.everything, config=self.case.config)
        assert hosted or torch.equal(output, wanted)
        for found in (output, of_twin):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for name in TABLES:
            assert torch.equal(getattr(self.mine.tables, name), getattr(self.twin.tables, name)), name
        torch.testing.assert_close(self.mine.tables.scores, self.twin.tables.scores)
        assert torch.equal(self.mine.tables.totals[:2], self.twin.tables.totals[:2])


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
