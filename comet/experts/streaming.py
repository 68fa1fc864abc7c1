"""Many tokens at once from an expert cache, as a prompt brings them: missing experts stream through the slots.

Experts that have a slot are computed first. Then each missing one travels into a slot that is free, or whose expert has
been computed, while the products of those before it run. No other memory holds experts, so a prompt of any length stays
within the budget. The host waits for the routing of every layer, and for nothing else unless it brings experts itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from comet.autocast import product, without_autocast
from comet.decode.twin import slot_weights
from comet.decode.weights import DecodeWeights
from comet.experts.host_prompts import PromptCores
from comet.kernels.expert_drafts import count_streamed_torch, settle_torch
from comet.kernels.expert_tables import CLOCK, HostExperts
from comet.layout import ExpertLayout
from comet.plain import dispatch_rows, make_exchange, weighted_sum


@dataclass(frozen=True, slots=True)
class Visit:
    """The products of one expert.

    Args:
        expert: Its number among those of this rank.
        slot: That holds it then.
        is_missing: Whether it has to be copied there first.
    """

    expert: int
    slot: int
    is_missing: bool


def plan_visits(counts: Sequence[int], owners: Sequence[int]) -> list[Visit]:
    """In which order experts are computed, and in which slots; the busiest ones hold slots at the end.

    Example: counts ``[2, 0, 1, 3]``, owners ``[1, 3]``: expert 3 in slot 1, where it is; then expert 2 in slot 0, whose
    expert 1 nobody needs, and expert 0 in slot 1.

    Args:
        counts: Routed rows of each expert of this rank.
        owners: Expert of each slot, -1 for none.

    Returns:
        A visit for each expert with rows.
    """
    there = {expert: slot for slot, expert in enumerate(owners) if expert >= 0 and counts[expert]}
    by_rows = sorted((expert for expert, count in enumerate(counts) if count), key=lambda expert: counts[expert])
    visits = [Visit(expert, there[expert], False) for expert in by_rows if expert in there]
    slots = deque(slot for slot in range(len(owners)) if slot not in there.values())
    slots.extend(visit.slot for visit in visits)
    for expert in (expert for expert in by_rows if expert not in there):
        visits.append(Visit(expert, slots[0], True))
        slots.rotate(-1)
    return visits


class Slots(Protocol):
    """The slots of a layer's cache, and where experts come from that have none.

    Experts are numbered among the ``num_held`` of this rank, the first of which is ``first_expert`` of all.
    """

    weights: DecodeWeights
    first_expert: int
    num_held: int

    def owners(self) -> list[int]:
        """Expert of each slot, -1 for none; waits for the device."""
        ...

    def give_away(self, slots: Collection[int]) -> None:
        """Let no expert have these slots any more, because copies follow that may fail."""
        ...

    def copy(self, visit: Visit) -> None:
        """Copy an expert into its slot, once that is free; what the current stream is given next finds it there."""
        ...

    def release(self, visit: Visit) -> None:
        """Let the slot be overwritten once the current stream has come here."""
        ...

    def take(self, visits: Sequence[Visit]) -> None:
        """Let the experts that were copied last have their slots, and count."""
        ...


class PinnedSlots:
    """``Slots`` of an ``ExpertCache``: copies run beside the stream that computes.

    Args:
        host: Where experts come from.
        weights: The slots.
        first_expert: Number of the rank's first expert among all.
        stream: Of the copies, one for all layers; ``None``: they are made at once.
    """

    def __init__(
        self, host: HostExperts, weights: DecodeWeights, first_expert: int, stream: torch.cuda.Stream | None
    ) -> None:
        self.weights, self.first_expert, self.num_held = weights, first_expert, host.w1.shape[0]
        self._host, self._tables = host, host.tables
        self._num_unused = 0  # experts that travelled for drafts and were not needed since
        self._pairs = list(zip(host.parts, weights.parts, strict=True))
        self._stream = stream
        self._free: dict[int, torch.cuda.Event] = {}

    def owners(self) -> list[int]:
        """See ``Slots``; what travelled for a step is there then."""
        self._num_unused = settle_torch(self._host)
        return [max(owner - self.first_expert, -1) for owner in self._tables.owners.tolist()]

    def give_away(self, slots: Collection[int]) -> None:
        """See ``Slots``; copies come behind what the current stream has been given so far."""
        tables, places = self._tables, self._index(slots)
        former = tables.owners[places].long()
        for table in (tables.slots, tables.arriving):
            table[former[former >= 0]] = -1
        tables.owners[places] = -1
        self._free.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, visit: Visit) -> None:
        """See ``Slots``."""
        if self._stream is None:
            for host, slots in self._pairs:
                slots[visit.slot].copy_(host[visit.expert])
            return
        if visit.slot in self._free:
            self._stream.wait_event(self._free[visit.slot])
        with torch.cuda.stream(self._stream):
            for host, slots in self._pairs:
                slots[visit.slot].copy_(host[visit.expert], non_blocking=True)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def release(self, visit: Visit) -> None:
        """See ``Slots``."""
        if self._stream is not None:
            self._free[visit.slot] = torch.cuda.current_stream(self._stream.device).record_event()

    def take(self, visits: Sequence[Visit]) -> None:
        """See ``Slots``."""
        held = {visit.slot: visit.expert + self.first_expert for visit in visits if visit.is_missing}
        tables, slots, experts = self._tables, self._index(held), self._index(held.values())
        for table in (tables.slots, tables.arriving):
            table[experts] = slots.int()
        tables.owners[slots] = experts.int()
        needed = self._index(visit.expert + self.first_expert for visit in visits)
        tables.last_used[needed] = tables.header[CLOCK.value]
        if self._num_unused:
            there = (visit.expert + self.first_expert for visit in visits if not visit.is_missing)
            count_streamed_torch(self._host, self._index(there))
        counts = len(visits), sum(visit.is_missing for visit in visits)
        tables.totals[:2] += torch.tensor(counts, device=tables.state.device)

    def _index(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._tables.state.device)


class StreamedExperts:
    """Routed experts of a layer for many tokens, through the slots of its cache.

    Quantised ones are dequantised one at a time, to the tokens' type.

    Args:
        slots: Of the layer.
        cores: Of the host, that compute some missing experts; ``None``: none do.
    """

    def __init__(self, slots: Slots, cores: PromptCores | None = None) -> None:
        self.slots, self.cores = slots, cores

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)``, ``(T, K)``, ``(T, K)`` float32 -> ``(T, D)`` float32: what this rank's experts contribute."""
        num_experts = self.slots.num_held
        ids = top_k_ids - self.slots.first_expert
        ids = ids.masked_fill((ids < 0) | (ids >= num_experts), -1)
        layout = ExpertLayout(num_experts=num_experts, top_k=ids.shape[1], ep=1, tp=1, rank=0)
        with without_autocast(tokens.device):
            exchange = make_exchange(ids, layout, None)
            rows = dispatch_rows(tokens, exchange, None)
            outputs = self._visit_all(rows, exchange.expert_counts)
            return weighted_sum(
                outputs.to(torch.promote_types(tokens.dtype, torch.float32)), ids, top_k_weights, exchange
            )

    def _visit_all(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Every row ``(R, D)`` through its expert, rows and results by expert."""
        owners = self.slots.owners()
        hosted = [] if self.cores is None else self.cores.choose(counts, owners)
        visits = plan_visits([0 if expert in hosted else count for expert, count in enumerate(counts)], owners)
        # Before a copy may begin, so that whatever fails on the way no slot is taken for what it does not hold.
        self.slots.give_away({visit.slot for visit in visits if visit.is_missing})
        parts, outputs = rows.split(list(counts)), torch.empty_like(rows)
        results = outputs.split(list(counts))
        for_host = [parts[expert].cpu() for expert in hosted]  # before the device has more to do
        for visit in visits:
            if visit.is_missing:
                self.slots.copy(visit)
            w1, w2 = slot_weights(self.slots.weights, visit.slot, rows.dtype)
            gate, up = product(parts[visit.expert], w1).chunk(2, dim=-1)
            results[visit.expert].copy_(product(silu(gate) * up, w2))
            self.slots.release(visit)
        self.slots.take(visits)
        if self.cores is not None and hosted:
            for expert, output in zip(hosted, self.cores.compute(hosted, for_host), strict=True):
                results[expert].copy_(output)
        return outputs
