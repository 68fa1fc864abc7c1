"""Many tokens at once from an expert cache, as a prompt brings them: missing experts stream through the slots.

Experts that have a slot are computed first. Then the missing ones travel, half as many at once as there are slots, into
slots that are free, or whose experts have been computed, while the products of the half before run. No other memory
holds experts, so a prompt of any length stays within the budget. The host waits for the routing of every layer, and for
nothing else unless it brings experts itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Protocol

import torch
from torch import Tensor

from comet.comm.collectives import accumulator_dtype
from comet.config import resolve_kernels
from comet.decode.twin import slot_weights
from comet.decode.weights import DecodeWeights
from comet.experts.host.prompts import PromptCores
from comet.kernels.decode.dequantize import dequantize_slots
from comet.kernels.experts.drafts import count_streamed_torch, settle_torch
from comet.kernels.experts.tables import CLOCK, HostExperts
from comet.reference.plain import grouped_matmul
from comet.utils.autocast import without_autocast

MOST_ROWS = 8192  # of visits that are computed at once, unless one alone has more
NOWHERE = 2**15 - 1  # the place of rows that this rank does not serve
FLOATING_BYTES = 2**27  # of quantised experts that are dequantised at once, unless one alone has more


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


def group_visits(visits: Sequence[Visit], counts: Sequence[int], most: int, most_missing: int) -> list[list[Visit]]:
    """Visits that follow each other and are computed at once, all of them there or all missing; each group by slot.

    Example: visits of experts 3 (there), 2, 0 and 1 (missing) in slots 1, 2, 0 and 1, at most two missing ones at once:
    expert 3; then 0 in slot 0 and 2 in slot 2; then 1.

    Args:
        visits: As they are planned.
        counts: Routed rows of each expert; those of a group are ``MOST_ROWS`` at most.
        most: Experts of a group.
        most_missing: Of one that is copied.
    """
    groups: list[list[Visit]] = []
    rows = 0
    for visit in visits:
        rows += counts[visit.expert]
        limit = min(most, most_missing) if visit.is_missing else most
        if groups and groups[-1][0].is_missing == visit.is_missing and len(groups[-1]) < limit and rows <= MOST_ROWS:
            groups[-1].append(visit)
        else:
            groups.append([visit])
            rows = counts[visit.expert]
    return [sorted(group, key=lambda visit: visit.slot) for group in groups]


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

    def copy(self, visits: Sequence[Visit]) -> None:
        """Copy experts into their slots, once these are free, before what the current stream is given next."""
        ...

    def release(self, visits: Sequence[Visit]) -> None:
        """Let their slots be overwritten once the current stream has come here."""
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
        self._owners: list[int] = []  # of all, as ``owners`` found them
        self._num_unused = 0  # experts that travelled for drafts and were not needed since
        self._parts = [(part.unbind(), slots.unbind()) for part, slots in zip(host.parts, weights.parts, strict=True)]
        self._stream = stream
        self._free: dict[int, torch.cuda.Event] = {}

    def owners(self) -> list[int]:
        """See ``Slots``; what travelled for a step is there then."""
        self._num_unused = settle_torch(self._host)
        self._owners = self._tables.owners.tolist()
        return [max(owner - self.first_expert, -1) for owner in self._owners]

    def give_away(self, slots: Collection[int]) -> None:
        """See ``Slots``; copies come behind what the current stream has been given so far."""
        self._free.clear()
        if not slots:
            return
        former = [self._owners[slot] for slot in slots if self._owners[slot] >= 0]
        self._tables.state.index_fill_(0, self._send(self._tables.words_of(former, slots)), -1)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, visits: Sequence[Visit]) -> None:
        """See ``Slots``."""
        stream = self._stream
        if stream is not None:
            for event in {self._free[visit.slot] for visit in visits if visit.slot in self._free}:
                stream.wait_event(event)
        pairs = [(slots[visit.slot], part[visit.expert]) for visit, (part, slots) in product(visits, self._parts)]
        with torch.cuda.stream(stream):  # one call: a copy alone takes the host longer than the link
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def release(self, visits: Sequence[Visit]) -> None:
        """See ``Slots``."""
        if self._stream is not None:
            event = torch.cuda.current_stream(self._stream.device).record_event()
            self._free.update((visit.slot, event) for visit in visits)

    def take(self, visits: Sequence[Visit]) -> None:
        """See ``Slots``."""
        held = {visit.slot: visit.expert + self.first_expert for visit in visits if visit.is_missing}
        there = [visit.expert + self.first_expert for visit in visits if not visit.is_missing]
        fetched = [visit.expert + self.first_expert for visit in visits if visit.is_missing]
        tables, words = self._tables, self._tables.words_of(held.values(), held)
        lists = words, [*held, *held, *held.values()], [*there, *fetched], [len(visits), len(fetched)]
        places, values, needed, counts = self._send([each for many in lists for each in many]).split([*map(len, lists)])
        tables.state.index_copy_(0, places, values.int())
        tables.last_used[needed] = tables.header[CLOCK.value]
        if self._num_unused:
            count_streamed_torch(self._host, needed[: len(there)])
        tables.totals[:2] += counts

    def _send(self, numbers: Sequence[int]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.int64), self._tables.state.device)


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device: CUDA stages them at once, so that nobody waits for what the device has to do."""
    return numbers.to(device, non_blocking=True)


def floating_slots(
    weights: DecodeWeights, slots: Tensor, dtype: torch.dtype, *, use_kernels: bool | None = None
) -> tuple[Tensor, Tensor]:
    """w1 ``(n, 2F, D)`` and w2 ``(n, D, F)`` of some slots in a floating type; never waits for the device.

    Args:
        weights: All slots.
        slots: ``(n,)`` int32, on their device.
        dtype: Of the result.
        use_kernels: A Triton kernel dequantises (on a GPU, or in the interpreter) instead of plain torch; ``None``:
            where there is a GPU.
    """
    scales1, scales2 = weights.w1_scales, weights.w2_scales
    if scales1 is None or scales2 is None or not resolve_kernels(slots.device, use_kernels):
        return slot_weights(weights, slots, dtype)
    return dequantize_slots(weights.w1, scales1, slots, dtype), dequantize_slots(weights.w2, scales2, slots, dtype)


@dataclass(frozen=True, slots=True)
class _Visits:
    """What a layer does for its tokens.

    Args:
        counts: Routed rows of each expert of this rank.
        groups: On the device, one after the other.
        hosted: Experts that the host's cores compute.
    """

    counts: Sequence[int]
    groups: Sequence[Sequence[Visit]]
    hosted: Sequence[int]

    @property
    def all(self) -> list[Visit]:
        """Those of all groups."""
        return [visit for group in self.groups for visit in group]

    def places(self, num_held: int) -> list[int]:
        """Of rows by their bins: those of groups come one after the other, then those of the host."""
        places = [NOWHERE] * (num_held + 2)
        for place, expert in enumerate([*(visit.expert for visit in self.all), *self.hosted]):
            places[1 + expert] = place
        return places


class StreamedExperts:
    """Routed experts of a layer for many tokens, through the slots of its cache.

    Quantised ones are dequantised to the tokens' type, those of a group at once.

    Args:
        slots: Of the layer.
        cores: Of the host, that compute some missing experts; ``None``: none do.
    """

    def __init__(self, slots: Slots, cores: PromptCores | None = None) -> None:
        self.slots, self.cores = slots, cores

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)``, ``(T, K)``, ``(T, K)`` float32 -> ``(T, D)`` float32: what this rank's experts contribute."""
        num_tokens, top_k = top_k_ids.shape
        with without_autocast(tokens.device):
            bins = self._bins(top_k_ids)
            counts = bins.new_zeros(self.slots.num_held + 2).scatter_add_(0, bins, torch.ones_like(bins))
            visits = self._plan(counts.tolist()[1:-1], tokens.dtype)  # the host waits for the device here
            # Before a copy may begin, so that whatever fails on the way no slot is taken for what it does not hold.
            self.slots.give_away({visit.slot for visit in visits.all if visit.is_missing})
            places = send(torch.tensor(visits.places(self.slots.num_held), dtype=torch.int16), tokens.device)[bins]
            order = places.argsort(stable=True)[: sum(visits.counts)]
            rows = tokens.index_select(0, order // top_k)
            outputs = torch.cat([rows[:0], *self._visit_all(rows, visits)]).to(accumulator_dtype(tokens.dtype))
            entries = outputs.new_zeros(num_tokens * top_k, tokens.shape[1]).index_copy_(0, order, outputs)
            is_served = (places < NOWHERE).view_as(top_k_ids)
            weights = top_k_weights.to(outputs.dtype).where(is_served, 0.0)  # what a masked slot weighs does no harm
            return (entries.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).sum(1)

    def _bins(self, top_k_ids: Tensor) -> Tensor:
        """``(T * K,)`` int64: 1 + the number among this rank's experts; 0 or the last one for those of others."""
        return (top_k_ids.flatten() + (1 - self.slots.first_expert)).clamp_(0, self.slots.num_held + 1).long()

    def _plan(self, counts: Sequence[int], dtype: torch.dtype) -> _Visits:
        """For tokens of a type; waits for the device."""
        owners = self.slots.owners()
        hosted = [] if self.cores is None else self.cores.choose(counts, owners)
        visits = plan_visits([0 if expert in hosted else count for expert, count in enumerate(counts)], owners)
        groups = group_visits(visits, counts, self._most_at_once(dtype), max(len(owners) // 2, 1))
        return _Visits(counts, groups, hosted)

    def _visit_all(self, rows: Tensor, visits: _Visits) -> list[Tensor]:
        """Every row ``(R, D)`` through its expert, rows and results in the order of the visits."""
        counts, hosted = visits.counts, visits.hosted
        for_host = [counts[expert] for expert in hosted]
        for_groups, *rows_on_host = rows.split([len(rows) - sum(for_host), *for_host])
        rows_on_host = [part.cpu() for part in rows_on_host]  # before the device has more to do
        results = self._compute(for_groups, visits.groups, counts)
        self.slots.take(visits.all)
        if self.cores is not None and hosted:
            results += [each.to(rows) for each in self.cores.compute(hosted, rows_on_host)]
        return results

    def _compute(self, rows: Tensor, groups: Sequence[Sequence[Visit]], counts: Sequence[int]) -> list[Tensor]:
        """Outputs of the rows ``(R, D)`` of each group, which follow each other."""
        weights, whole = self.slots.weights, self._is_floating(rows.dtype)
        sizes = []  # rows of every slot, or of those of the group
        for group in groups:
            of_slots = {visit.slot: counts[visit.expert] for visit in group}
            sizes.append([of_slots.get(slot, 0) for slot in range(len(weights.w1))] if whole else [*of_slots.values()])
        numbers = [end for each in sizes for end in accumulate(each)]
        numbers += [visit.slot for group in groups for visit in group]
        lengths = [*map(len, sizes), *map(len, groups)]
        sent = send(torch.tensor(numbers, dtype=torch.int32), rows.device).split(lengths)
        ends, slots = sent[: len(groups)], sent[len(groups) :]
        outputs = []
        parts = zip(groups, sizes, rows.split(list(map(sum, sizes))), ends, slots, strict=True)
        for group, each, part, part_ends, part_slots in parts:
            if group[0].is_missing:
                self.slots.copy(group)
            w1, w2 = (weights.w1, weights.w2) if whole else floating_slots(weights, part_slots, rows.dtype)
            gate, up = grouped_matmul(part, w1, tuple(each), part_ends).chunk(2, dim=-1)
            hidden = weights.activation.forward(gate, up)
            outputs.append(grouped_matmul(hidden, w2, tuple(each), part_ends))
            self.slots.release(group)
        return outputs

    def _is_floating(self, dtype: torch.dtype) -> bool:
        """Whether products of rows of a type take the slots as they are."""
        return self.slots.weights.w1.dtype == dtype

    def _most_at_once(self, dtype: torch.dtype) -> int:
        """Experts of a group."""
        weights = self.slots.weights
        if self._is_floating(dtype):
            return len(weights.w1)
        return max(FLOATING_BYTES // (3 * weights.hidden_size * weights.ffn_size * dtype.itemsize), 1)
