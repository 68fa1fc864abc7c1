"""Experts that a GPU cannot read where they are: the host brings those of a step, through pinned memory.

For files, and for host memory that cannot be pinned. The host asks the device which experts a layer needs, and waits
for the answer in every layer, so a step cannot be a CUDA graph. Whatever fails on the way, no memory that was half
written counts as an expert.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.decode.runners import Runner, rounds
from comet.decode.weights import DecodeWeights
from comet.errors import CommTimeoutError
from comet.experts.cache import CacheReport
from comet.experts.options import GRAPH_FALLBACK_REASON
from comet.experts.store import ExpertReader, Specs, host_memory
from comet.experts.streaming import ExpertsFromSlots, SlotCache, Visit
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import RoutedTokens
from comet.utils.streams import StreamLock

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0


class Stage:
    """Host memory for the experts that were read last, of all layers; the one used longest ago makes room.

    Args:
        deadline_s: How long other ranks wait for this one; ``None``: there are none.
        patience_s: After which a read that has not ended yet is named in the log.
    """

    def __init__(
        self,
        num_places: int,
        specs: Specs,
        device: torch.device,
        *,
        deadline_s: float | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._deadline_s, self._patience_s = deadline_s, patience_s
        self._memory = {
            name: host_memory((num_places, *shape[1:]), dtype, device)[0] for name, (shape, dtype) in specs.items()
        }
        self._places: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = list(range(num_places))
        self.turn = StreamLock(device)  # held by the thread that may use the stage
        self.num_places = num_places
        self.num_reads = 0  # experts that were read into it so far
        self.files: AbstractContextManager[object] | None = None  # what its readers need to stay open, if anything

    def get(self, reader: ExpertReader, layer: int, expert: int, first_expert: int = 0) -> dict[str, Tensor]:
        """An expert's parts by their names, good until ``num_places`` others were asked for.

        ``expert`` is its number among all, the reader's first of which is ``first_expert``. Raises ``CommTimeoutError``
        if other ranks have not waited for the read to end.
        """
        key = layer, expert
        if key in self._places:
            self._places.move_to_end(key)
        else:
            if not self._free:
                self._free.append(self._places.popitem(last=False)[1])
            with self._watched(f"expert {expert} of MoE layer {layer}"):
                reader.read(expert - first_expert, self._at(self._free[-1]))
            self._places[key] = self._free.pop()  # not before it is whole
            self.num_reads += 1
        return self._at(self._places[key])

    def clear(self) -> None:
        self._places.clear()
        self._free = list(range(self.num_places))

    def _at(self, place: int) -> dict[str, Tensor]:
        return {name: memory[place] for name, memory in self._memory.items()}

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Name what is read once that takes long, and where it took longer than other ranks wait."""
        waiting = "still reading %s after %.1f s: is its file on a slow disk or network, or does memory swap?"
        timer = threading.Timer(self._patience_s, logger.warning, [waiting, name, self._patience_s])
        timer.daemon = True
        timer.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        if self._deadline_s is not None and seconds > self._deadline_s:
            raise CommTimeoutError(
                f"{name} took {seconds:.1f} s to be read, and the other ranks wait for {self._deadline_s:.1f} s: raise "
                "comm.timeout_s, or keep experts in host memory"
            )


class StagedCache(SlotCache):
    """Slots for some experts of a layer on the device, filled by the host; the one used longest ago makes room.

    Example (S = 2): steps that need experts 3, then 0, then 3 and 2: expert 2 takes the slot of expert 0.

    Args:
        num_experts: E, of all ranks; ``None``: those of the reader.
        first_expert: Number of the reader's first among them.
    """

    cores = None  # the host's; they compute where the device reads experts itself

    def __init__(
        self,
        reader: ExpertReader,
        stage: Stage,
        layer: int,
        num_slots: int,
        device: torch.device,
        *,
        num_experts: int | None = None,
        first_expert: int = 0,
        activation: Activation = SWIGLU,
    ) -> None:
        num_held = reader.specs["w1"][0][0]
        require(
            num_slots <= stage.num_places,
            f"num_places={stage.num_places} of the stage must be at least num_slots={num_slots}",
        )
        self.num_slots, self.num_held, self.first_expert = num_slots, num_held, first_expert
        self.needed = self.fetched = 0  # experts of steps so far, and those of them that had no slot
        self.fetching_s = 0.0  # of the host, for these
        slots: dict[str, Any] = {
            name: torch.zeros(num_slots, *shape[1:], dtype=dtype, device=device)
            for name, (shape, dtype) in reader.specs.items()
        }
        table = torch.full((num_experts or num_held,), -1, dtype=torch.int32, device=device)
        self.weights = DecodeWeights(**slots, slots=table, activation=activation)
        self._reader, self.stage, self._layer = reader, stage, layer
        self.turn = stage.turn
        self._slots: OrderedDict[int, int] = OrderedDict()  # Slots by experts, the one used longest ago first.

    def bring(self, top_k_ids: Tensor) -> DecodeWeights:
        """Bring the experts of a step, at most S of this rank, into slots; waits for the device and its copies."""
        numbers = {expert - self.first_expert for expert in top_k_ids.flatten().tolist()}
        needed = [expert for expert in sorted(numbers) if 0 <= expert < self.num_held]
        there = [Visit(expert, self._slots[expert], False) for expert in needed if expert in self._slots]
        free = [slot for slot, owner in enumerate(self.owners()) if owner < 0]
        free += [slot for expert, slot in self._slots.items() if expert not in needed]
        missing = [expert for expert in needed if expert not in self._slots]
        fetched = [Visit(*each, True) for each in zip(missing, free[: len(missing)], strict=True)]
        self.give_away({visit.slot for visit in fetched})
        self.copy(fetched, non_blocking=True)
        self.take([*there, *fetched])
        return self.weights

    def clear(self) -> None:
        self._slots.clear()
        self.stage.clear()

    def owners(self) -> list[int]:
        owners = dict.fromkeys(range(self.num_slots), -1) | {slot: expert for expert, slot in self._slots.items()}
        return list(owners.values())

    def give_away(self, slots: Collection[int]) -> None:
        self._slots = OrderedDict((expert, slot) for expert, slot in self._slots.items() if slot not in slots)

    def copy(self, visits: Sequence[Visit], *, non_blocking: bool = False) -> None:
        """Copy experts into their slots; waits for the device where the stage may give the place away next."""
        started = time.perf_counter()
        for visit in visits:
            expert = self.first_expert + visit.expert
            parts = self.stage.get(self._reader, self._layer, expert, self.first_expert)
            for name, slots in self.weights.stored_parts.items():
                slots[visit.slot].copy_(parts[name], non_blocking=non_blocking)
        self.fetching_s += time.perf_counter() - started

    def release(self, visits: Sequence[Visit]) -> None:
        """Nothing: a copy comes behind all that the device was given before it."""

    def take(self, visits: Sequence[Visit]) -> None:
        """Let the experts that were copied last have their slots, count, and tell the device what has a slot."""
        copied = {visit.slot: visit.expert for visit in visits if visit.is_missing}
        self._slots.update((expert, slot) for slot, expert in copied.items())
        for visit in visits:
            if visit.expert in self._slots:
                self._slots.move_to_end(visit.expert)
        self.needed += len(visits)
        self.fetched += sum(visit.is_missing for visit in visits)
        table = torch.full(self.weights.slots.shape, -1, dtype=torch.int32)
        held = table[self.first_expert : self.first_expert + self.num_held]
        held[list(self._slots)] = torch.tensor(list(self._slots.values()), dtype=torch.int32)
        self.weights.slots.copy_(table)


class StagedExperts(ExpertsFromSlots):
    """Experts that the host brings.

    A step of more tokens than the slots can serve at once is taken in parts, and rounds as its parts do.
    """

    cache: StagedCache
    graph_obstacle = GRAPH_FALLBACK_REASON

    def __init__(self, cache: StagedCache, runner: Runner, top_k: int) -> None:
        super().__init__(cache, runner)
        rule = f"must be at least top_k={top_k} where the host brings the experts: raise expert_budget"
        require(self.has_steps(top_k), f"num_slots={cache.num_slots} {rule}")

    def has_steps(self, top_k: int) -> bool:
        """Whether the slots hold the experts of one token; the host has no waves."""
        return self.cache.num_slots >= self.most_of_a_token(top_k)

    @staticmethod
    def report(paths: Sequence[StagedExperts]) -> CacheReport:
        """Return the counts of all layers' caches, which share a stage."""
        caches = [path.cache for path in paths]
        fetched, expert = sum(cache.fetched for cache in caches), caches[0].expert_bytes
        return CacheReport(
            slots=caches[0].num_slots,
            needed=sum(cache.needed for cache in caches),
            fetched=fetched,
            fetched_bytes=fetched * expert,
            fetching_s=sum(cache.fetching_s for cache in caches),
            staged_bytes=caches[0].stage.num_reads * expert,
        )

    def step(self, routed: RoutedTokens, w1: Tensor, w2: Tensor) -> Tensor:
        """Compute a step in parts, whose experts are brought before each."""
        outputs, slots = [], self.cache.num_slots
        at_once = 1 + len(routed.tokens) if slots == self.cache.num_held else slots // routed.top_k_ids.shape[1]
        for part in (routed.part(slice(*each)) for each in rounds(len(routed.tokens), at_once)):
            with self.runner.noting("reading of experts"):
                experts = self.cache.bring(part.top_k_ids)
            with torch.autocast(part.tokens.device.type, enabled=False):  # decode rounds where it means to
                outputs.append(self.runner(part, w1, w2, experts=experts))
        return torch.cat(outputs) if outputs else torch.empty_like(routed.tokens)
