"""Many tokens at once from an expert cache, as a prompt brings them: missing experts stream through the slots.

Experts that have a slot are computed first. Then the missing ones travel, half as many at once as there are slots, into
slots that are free, or whose experts have been computed, while the products of the half before run. No other memory
holds experts, so a prompt of any length stays within the budget. The host waits for the routing of every layer, and for
nothing else unless it brings experts itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from comet.comm.collectives import accumulator_dtype, wants_grad
from comet.config import require
from comet.decode.runners import Runner
from comet.decode.twin import slot_weights
from comet.decode.weights import DecodeWeights
from comet.kernels.decode.dequantize import dequantize_slots
from comet.layer.expert_path import ExpertPath
from comet.layout import Biases, RoutedTokens
from comet.reference.plain import grouped_matmul
from comet.utils.autocast import without_autocast

MOST_ROWS = 8192  # Visits that are computed at once have at most so many rows, unless one alone has more.
NOWHERE = 2**15 - 1  # the place of rows that this rank does not serve
FLOATING_BYTES = 2**27  # of quantised experts that are dequantised at once, unless one alone has more


@dataclass(frozen=True, slots=True)
class Visit:
    """The products of one expert."""

    expert: int  # its number among those of this rank
    slot: int  # that holds it then
    is_missing: bool  # whether it has to be copied there first


def plan_visits(counts: Sequence[int], owners: Sequence[int]) -> list[Visit]:
    """In which order experts are computed, and in which slots; the busiest ones hold slots at the end.

    Example: counts ``[2, 0, 1, 3]``, owners ``[1, 3]``: expert 3 in slot 1, where it is; then expert 2 in slot 0, whose
    expert 1 is not needed, and expert 0 in slot 1.
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


class SlotCache(Protocol):
    """The slots of a layer's cache, and where experts come from that have none.

    Experts are numbered among the ``num_held`` of this rank, the first of which is ``first_expert`` of all.
    """

    weights: DecodeWeights
    first_expert: int
    num_held: int
    num_slots: int
    turn: AbstractContextManager[object]  # held by the thread that may use the slots and all that layers share
    broke_off: bool = False  # whether a use has begun and not ended: Ctrl-C, too, may come anywhere

    @property
    def expert_bytes(self) -> int:
        return self.weights.expert_bytes

    @contextmanager
    def used(self) -> Iterator[None]:
        """Surround each use of the slots; behind one that broke off they are empty."""
        if self.broke_off:
            self.clear()
        self.broke_off = True
        yield
        self.broke_off = False

    def clear(self) -> None:
        """Let no expert have a slot, whatever a use that broke off has left."""
        ...

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


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device: CUDA stages them at once, so that the host does not wait for the device."""
    return numbers.to(device, non_blocking=True)


def floating_slots(weights: DecodeWeights, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w1 ``(n, 2F, D)`` and w2 ``(n, D, F)`` of some slots in a floating type; never waits for the device."""
    scales1, scales2 = weights.w1_scales, weights.w2_scales
    if scales1 is None or scales2 is None or not slots.is_cuda:
        return slot_weights(weights, slots, dtype)
    return dequantize_slots(weights.w1, scales1, slots, dtype), dequantize_slots(weights.w2, scales2, slots, dtype)


def with_biases(products: Tensor, biases: Tensor | None, owners: Tensor | None) -> Tensor:
    """``products (R, C)``, each row with the row of ``biases`` that ``owners (R,)`` says, or without where none are."""
    return products if biases is None or owners is None else products + biases[owners]


class ExpertsFromSlots(ExpertPath):
    """Routed experts of a layer, from the slots of its cache; for inference.

    Of more tokens than the runner decodes, or of more experts a token than steps take, missing experts stream through
    the slots, for which the host waits. Quantised ones are dequantised to the tokens' type, those of a group at once.
    """

    graph_obstacle = ""  # why no CUDA graph can hold a step; empty where one can

    def __init__(self, cache: SlotCache, runner: Runner) -> None:
        self.cache, self.runner = cache, runner

    def most_of_a_token(self, top_k: int) -> int:
        """Experts of this rank that a token of K may need; routers may choose more than when the model was loaded."""
        return min(top_k, self.cache.num_held)

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        require(
            not wants_grad(*routed),
            "requires_grad=True of tokens or top_k_weights must be False: a model with an expert_budget is for "
            "inference, run it under torch.no_grad()",
        )
        with self.runner.in_turn(self.cache.turn), self.cache.used():
            self.check()
            decode, (num_tokens, top_k) = self.runner.decode, routed.top_k_ids.shape
            fits = num_tokens <= decode.max_tokens and num_tokens * top_k <= decode.max_tokens * decode.top_k
            if fits and self.has_steps(top_k):  # memory of steps, also that of the host's cores, is for so many rows
                return self.step(routed, w1, w2)
            with self.runner.noting("streaming of experts", collectives=True):
                return self.runner.add_up(self._stream(routed)).to(routed.tokens.dtype)

    def prefetch_by(self, predict: Any, following: Any, stream: torch.cuda.Stream | None) -> Any:
        """Let experts that ``predict`` guesses travel before their step, once those of the next layer may, too."""
        raise NotImplementedError(f"expert_prefetch=True must be auto or false where {self.graph_obstacle}")

    def check(self) -> None:
        """Raise what keeps this layer from being computed."""

    def has_steps(self, top_k: int) -> bool:
        """Whether the slots serve steps of tokens with K experts each; all ranks answer alike."""
        raise NotImplementedError

    def step(self, routed: RoutedTokens, w1: Tensor, w2: Tensor) -> Tensor:
        raise NotImplementedError

    def _stream(self, routed: RoutedTokens) -> Tensor:
        """``(T, D)`` float32: what this rank's experts contribute."""
        tokens, top_k_ids, top_k_weights = routed
        num_tokens, top_k = top_k_ids.shape
        with without_autocast(tokens.device):
            # 1 + the number among this rank's experts; 0 or the last one for those of others.
            bins = (top_k_ids.flatten() + (1 - self.cache.first_expert)).clamp_(0, self.cache.num_held + 1).long()
            of_bins = bins.new_zeros(self.cache.num_held + 2).scatter_add_(0, bins, torch.ones_like(bins))
            counts = of_bins.tolist()[1:-1]  # the host waits for the device here
            owners = self.cache.owners()
            visits = plan_visits(counts, owners)
            groups = group_visits(visits, counts, self._most_at_once(tokens.dtype), max(len(owners) // 2, 1))
            # Before a copy may begin, so that whatever fails on the way no slot is taken for what it does not hold.
            self.cache.give_away({visit.slot for visit in visits if visit.is_missing})
            # Rows of groups come one after the other.
            places_of_bins = [NOWHERE] * len(of_bins)
            for place, visit in enumerate(visit for group in groups for visit in group):
                places_of_bins[1 + visit.expert] = place
            places = send(torch.tensor(places_of_bins, dtype=torch.int16), tokens.device)[bins]
            order = places.argsort(stable=True)[: sum(counts)]
            rows = tokens.index_select(0, order // top_k)
            results = self._compute(rows, groups, counts)
            self.cache.take([visit for group in groups for visit in group])
            outputs = torch.cat([rows[:0], *results]).to(accumulator_dtype(tokens.dtype))
            entries = outputs.new_zeros(num_tokens * top_k, tokens.shape[1]).index_copy_(0, order, outputs)
            is_served = (places < NOWHERE).view_as(top_k_ids)
            weights = top_k_weights.to(outputs.dtype).where(is_served, 0.0)  # Weights of masked slots do no harm.
            return (entries.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).sum(1)

    def _compute(self, rows: Tensor, groups: Sequence[Sequence[Visit]], counts: Sequence[int]) -> list[Tensor]:
        """Outputs of the rows ``(R, D)`` of each group, which follow each other."""
        weights = self.cache.weights
        whole = weights.w1.dtype == rows.dtype  # products take the slots as they are
        sizes = []  # rows of every slot, or of those of the group
        for group in groups:
            of_slots = {visit.slot: counts[visit.expert] for visit in group}
            sizes.append([of_slots.get(slot, 0) for slot in range(len(weights.w1))] if whole else [*of_slots.values()])
        numbers = [end for each in sizes for end in accumulate(each)]
        numbers += [visit.slot for group in groups for visit in group]
        lengths = [*map(len, sizes), *map(len, groups)]
        sent = send(torch.tensor(numbers, dtype=torch.int32), rows.device).split(lengths)
        ends, slots = sent[: len(groups)], sent[len(groups) :]
        bias_rows = self._bias_rows(groups, counts, rows.device)
        outputs = []
        parts = zip(groups, sizes, rows.split(list(map(sum, sizes))), ends, slots, bias_rows, strict=True)
        for group, each, part, part_ends, part_slots, owners in parts:
            if group[0].is_missing:
                self.cache.copy(group)
            w1, w2 = (weights.w1, weights.w2) if whole else floating_slots(weights, part_slots, rows.dtype)
            pre = with_biases(grouped_matmul(part, w1, tuple(each), part_ends), weights.b1, owners)
            hidden = weights.activation.forward(*pre.chunk(2, dim=-1))
            outputs.append(with_biases(grouped_matmul(hidden, w2, tuple(each), part_ends), weights.b2, owners))
            self.cache.release(group)
        return outputs

    def _bias_rows(
        self, groups: Sequence[Sequence[Visit]], counts: Sequence[int], device: torch.device
    ) -> Sequence[Tensor | None]:
        """``(R,)`` for each group: the row of its biases that each of its rows takes; ``None`` without biases."""
        weights = self.cache.weights
        if weights.b1 is None:
            return [None] * len(groups)
        visits = [visit for group in groups for visit in group]
        owners = [visit.slot if weights.host is None else visit.expert for visit in visits]
        repeats = [counts[visit.expert] for visit in visits]
        of_rows = torch.tensor(owners, dtype=torch.int64).repeat_interleave(torch.tensor(repeats, dtype=torch.int64))
        return send(of_rows, device).split([sum(counts[visit.expert] for visit in group) for group in groups])

    def _most_at_once(self, dtype: torch.dtype) -> int:
        weights = self.cache.weights
        if weights.w1.dtype == dtype:
            return len(weights.w1)
        return max(FLOATING_BYTES // (3 * weights.hidden_size * weights.ffn_size * dtype.itemsize), 1)
