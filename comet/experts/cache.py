"""The cache of one layer's experts.

The GPU keeps the cache itself, inside the decode step (``comet.kernels.experts.cache``): it looks up which experts a
step needs, gives the missing ones the slots of those used longest ago, and reads them from pinned host memory. A
hit costs the host nothing, and a step stays one CUDA graph. Results are those of experts that are all in GPU memory,
bit for bit, but for those of longer prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor

from comet.config import require
from comet.decode.weights import DecodeWeights
from comet.experts.host.cores import HostCores
from comet.experts.store import HeldExperts
from comet.experts.streaming import SlotCache, Visit, send
from comet.kernels.experts.prefetch import take_over_torch
from comet.kernels.experts.tables import CLOCK, LAYER, NEVER, CacheTables, HostExperts, Totals
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.utils.streams import StreamLock

OF_THE_CACHES = ("slots", "prefetch")  # facts that every report repeats, and that are not added up


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """Counts of what caches did so far, and facts about the caches (``OF_THE_CACHES``)."""

    slots: int  # experts a layer's cache holds
    needed: int  # distinct experts that steps needed, summed over steps and layers
    fetched: int  # how many of them were not there
    fetched_bytes: int  # read from host memory
    fetching_s: float  # seconds in which a layer's experts travelled, summed over layers; products ran meanwhile
    prefetched: int = 0  # experts that began to travel before their step
    prefetched_needed: int = 0  # how many of them it needed
    # of these experts, that came before their step; not of those that the step completed, whose bytes fetched_bytes has
    prefetched_bytes: int = 0
    hosted: int = 0  # needed experts that were not there and were computed on the host's cores
    hosting_s: float = 0.0  # seconds of these cores
    prefetch: bool = False  # whether experts may travel before their step
    staged_bytes: int = 0  # where the host fetches: read from files or pageable memory into that which it copies from

    @property
    def hits(self) -> float:
        """Share of the needed experts that were there; 1 before the first step."""
        return 1 - (self.fetched + self.hosted) / self.needed if self.needed else 1.0

    def since(self, before: Self) -> Self:
        first, last = asdict(before), asdict(self)
        return replace(self, **{name: last[name] - first[name] for name in last if name not in OF_THE_CACHES})

    @property
    def prefetch_precision(self) -> float | None:
        """Share of the experts that travelled before their step which it needed; ``None``: none travelled."""
        return self.prefetched_needed / self.prefetched if self.prefetched else None


def total(reports: Sequence[CacheReport]) -> CacheReport:
    """All that caches did in several texts, or on several ranks."""
    names = [field.name for field in fields(CacheReport) if field.name not in OF_THE_CACHES]
    return replace(reports[0], **{name: sum(getattr(each, name) for each in reports) for name in names})


class ExpertCache(SlotCache):
    """Slots for some experts of a layer on this rank's device.

    Experts of prompts are copied on a stream of their own.

    Args:
        store: The e experts of the rank, in host memory that the device reads. Their biases are copied to the device.
        num_experts: E, of all ranks; ``None``: e.
        first_expert: Number of the store's first among them.
        turn: Lock of the thread that may use it and the caches of other layers, whose experts it may bring; ``None``:
            its own.
    """

    def __init__(
        self,
        store: HeldExperts,
        num_slots: int,
        device: torch.device,
        *,
        num_experts: int | None = None,
        first_expert: int = 0,
        activation: Activation = SWIGLU,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        assert store.readable, "a StagedCache is for other memory"
        host, num_held = store.named_parts, len(store.w1)
        held, num_experts = (first_expert, first_expert + num_held), num_experts or num_held
        require(
            first_expert >= 0 and held[1] <= num_experts,
            f"first_expert={first_expert} and the {num_held} of w1 must be among num_experts={num_experts}",
        )
        self.num_slots, self.first_expert, self.num_held = num_slots, first_expert, num_held
        self.tables = CacheTables.create(num_experts, num_slots, device, held)
        DecodeWeights(**host, slots=torch.empty(1, dtype=torch.int32))  # looks at scales that were not made here
        self.host = HostExperts(**host, tables=self.tables)
        slots: dict[str, Any] = {
            name: torch.zeros(num_slots, *weight.shape[1:], dtype=weight.dtype, device=device)
            for name, weight in host.items()
        }
        biases: dict[str, Any] = {name: part.to(device) for name, part in store.biases.items()}
        self.weights = DecodeWeights(**slots, slots=self.tables.slots, host=self.host, activation=activation, **biases)
        self.turn = turn or StreamLock(device)
        self.cores: HostCores | None = None
        self.layer = 0
        self.copy_stream: torch.cuda.Stream | None = None  # one for all layers; None: copies are made at once
        self.travel_stream: torch.cuda.Stream | None = None  # on which experts travel before their step, if any do
        self._owners: list[int] = []  # of all, as ``owners`` found them
        parts = zip(self.host.parts, self.weights.parts, strict=True)
        self._parts = [(part.unbind(), slots.unbind()) for part, slots in parts]
        self._free: dict[int, torch.cuda.Event] = {}

    def share_with(self, cores: HostCores, layer: int) -> None:
        """Leave some missing experts to the host's cores, which were started with this store as number ``layer``."""
        self.cores, self.layer = cores, layer
        self.tables.header[LAYER.value] = layer
        self.host = replace(self.host, mail=cores.mail)
        self.weights = replace(self.weights, host=self.host)

    def expect_prefetch(self) -> None:
        """Let experts travel to the slots before their step; before the first."""
        event = torch.cuda.Event() if self.weights.w1.is_cuda else None
        self.host = replace(self.host, prefetched=True, fetched=event)
        self.weights = replace(self.weights, host=self.host)

    def clear(self) -> None:
        """Let no expert have a slot, behind all that streams were given for them."""
        for stream in (self.travel_stream, self.copy_stream):
            if stream is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._free.clear()
        self.tables.clear()

    def owners(self) -> list[int]:
        """Expert of each slot, -1 for none, with what travelled for a step; waits for the device."""
        if self.travel_stream is not None:  # no kernel here closes the gate, and what is claimed counts as there
            torch.cuda.current_stream(self.weights.w1.device).wait_stream(self.travel_stream)
        take_over_torch(self.host, NEVER.value)
        self._owners = self.tables.owners.tolist()
        return [max(owner - self.first_expert, -1) for owner in self._owners]

    def give_away(self, slots: Collection[int]) -> None:
        """Let no expert have these slots any more; copies come behind what the current stream was given so far."""
        self._free.clear()
        if not slots:
            return
        former = [self._owners[slot] for slot in slots if self._owners[slot] >= 0]
        self.tables.state.index_fill_(0, self._send(self.tables.words_of(former, slots)), -1)
        if self.copy_stream is not None:
            self.copy_stream.wait_stream(torch.cuda.current_stream(self.copy_stream.device))

    def copy(self, visits: Sequence[Visit]) -> None:
        """Copy experts into their slots, once these are free, before what the current stream is given next."""
        stream = self.copy_stream
        if stream is not None:
            for event in {self._free[visit.slot] for visit in visits if visit.slot in self._free}:
                stream.wait_event(event)
        pairs = [(slots[visit.slot], part[visit.expert]) for visit, (part, slots) in product(visits, self._parts)]
        with torch.cuda.stream(stream):  # one call: a copy alone takes the host longer than the link
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def release(self, visits: Sequence[Visit]) -> None:
        """Let their slots be overwritten once the current stream has come here."""
        if self.copy_stream is not None:
            event = torch.cuda.current_stream(self.copy_stream.device).record_event()
            self._free.update((visit.slot, event) for visit in visits)

    def take(self, visits: Sequence[Visit]) -> None:
        """Let the experts that were copied last have their slots, and count."""
        held = {visit.slot: visit.expert + self.first_expert for visit in visits if visit.is_missing}
        there = [visit.expert + self.first_expert for visit in visits if not visit.is_missing]
        fetched = [visit.expert + self.first_expert for visit in visits if visit.is_missing]
        tables, words = self.tables, self.tables.words_of(held.values(), held)
        lists = words, [*held, *held, *held.values()], [*there, *fetched], [len(visits), len(fetched)]
        places, values, needed, counts = self._send([each for many in lists for each in many]).split([*map(len, lists)])
        tables.state.index_copy_(0, places, values.int())
        tables.last_used[needed] = tables.header[CLOCK.value]
        tables.totals[:2] += counts

    def _send(self, numbers: Sequence[int]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.int64), self.tables.state.device)


def report_of(caches: Sequence[ExpertCache]) -> CacheReport:
    """Return the counts of all layers' caches so far; waits for their device."""
    totals = Totals(*torch.stack([cache.tables.totals for cache in caches]).sum(0).tolist())
    return CacheReport(
        slots=caches[0].num_slots,
        needed=totals.needed,
        fetched=totals.fetched,
        fetched_bytes=totals.fetched * caches[0].expert_bytes,
        fetching_s=totals.fetching_ns / 1e9,
        prefetched=totals.begun,
        prefetched_needed=totals.useful,
        prefetched_bytes=8 * totals.words,
        hosted=totals.hosted,
        hosting_s=0.0 if caches[0].cores is None else caches[0].cores.counts[1],
        prefetch=caches[0].host.prefetched,
    )
