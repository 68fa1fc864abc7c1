"""Many tokens at once from an expert cache, as a prompt brings them: missing experts stream through the slots.

Experts that have a slot are computed first. Then each missing one travels into a slot that is free, or whose expert has
been computed, while the products of those before it run. No other memory holds experts, so a prompt of any length stays
within the budget. The host waits for the routing of every layer, and for nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from comet.autocast import product, without_autocast
from comet.decode.twin import slot_weights
from comet.decode.weights import DecodeWeights
from comet.kernels.expert_tables import CLOCK, PLANNED, CacheTables, HostExperts
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


class Copies:
    """Copies of experts from host memory into slots, beside the stream that computes.

    Args:
        host: Where they come from.
        weights: The slots.
        stream: Of the copies; ``None``: they are made at once.
    """

    def __init__(self, host: HostExperts, weights: DecodeWeights, stream: torch.cuda.Stream | None) -> None:
        self._pairs = list(zip(host.parts, weights.parts, strict=True))
        self._stream = stream
        self._free: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        """Let copies come behind what the current stream has been given so far."""
        self._free.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def bring(self, visit: Visit) -> None:
        """Copy an expert once its slot is free; the current stream goes on when it is there."""
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
        """Let the slot be overwritten once the current stream has come here."""
        if self._stream is not None:
            self._free[visit.slot] = torch.cuda.current_stream(self._stream.device).record_event()


class StreamedExperts:
    """Routed experts of a layer for many tokens, through the slots of its cache.

    Quantised ones are dequantised one at a time, to the tokens' type.

    Args:
        host: Where this rank's experts come from.
        weights: The slots.
        first_expert: Number of the rank's first expert among all.
        stream: See ``Copies``; one serves all layers.
    """

    def __init__(
        self, host: HostExperts, weights: DecodeWeights, first_expert: int, stream: torch.cuda.Stream | None
    ) -> None:
        self.host = host
        self.weights = weights
        self.first_expert = first_expert
        self._copies = Copies(host, weights, stream)

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)``, ``(T, K)``, ``(T, K)`` float32 -> ``(T, D)`` float32: what this rank's experts contribute."""
        num_experts = self.host.w1.shape[0]
        ids = top_k_ids - self.first_expert
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
        owners = [max(owner - self.first_expert, -1) for owner in self.host.tables.owners.tolist()]
        visits = plan_visits(counts, owners)
        missing = [visit for visit in visits if visit.is_missing]
        # Before a copy may begin, so that whatever fails on the way no slot is taken for what it does not hold.
        self._give_away({visit.slot for visit in missing}, owners)
        self._copies.begin()
        parts, outputs = rows.split(list(counts)), torch.empty_like(rows)
        results = outputs.split(list(counts))
        for visit in visits:
            if visit.is_missing:
                self._copies.bring(visit)
            w1, w2 = slot_weights(self.weights, visit.slot, rows.dtype)
            gate, up = product(parts[visit.expert], w1).chunk(2, dim=-1)
            results[visit.expert].copy_(product(silu(gate) * up, w2))
            self._copies.release(visit)
        self._take({visit.slot: visit.expert for visit in missing}, [visit.expert for visit in visits], len(missing))
        return outputs

    def _give_away(self, slots: set[int], owners: Sequence[int]) -> None:
        tables = self.host.tables
        experts = [owners[slot] for slot in slots if owners[slot] >= 0]
        for table in (tables.slots, tables.arriving):
            table[self._numbers(experts)] = -1
        tables.owners[_index(slots, tables)] = -1
        tables.header[PLANNED.value] = 0  # what was to travel before a step has no slot any more

    def _take(self, held: dict[int, int], needed: Sequence[int], num_copies: int) -> None:
        tables, slots = self.host.tables, _index(held, self.host.tables)
        experts = self._numbers(list(held.values()))
        for table in (tables.slots, tables.arriving):
            table[experts] = slots.int()
        tables.owners[slots] = experts.int()
        tables.last_used[self._numbers(needed)] = tables.header[CLOCK.value]
        tables.totals[:2] += torch.tensor([len(needed), num_copies], device=tables.state.device)

    def _numbers(self, experts: Sequence[int]) -> Tensor:
        return _index([self.first_expert + expert for expert in experts], self.host.tables)


def _index(numbers: Sequence[int] | set[int] | dict[int, int], tables: CacheTables) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device=tables.state.device)
