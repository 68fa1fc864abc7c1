"""A rank sends tokens to its rail peers as guests, and gets their partial sums back; gradients take the same two ways.

``Rails`` is what ``comet.layer.nodes`` knows of it. ``CollectiveRails`` sends by collectives of ``torch.distributed``,
which need counts on the host. ``comet.layer.rails.network.DeviceRails`` sends by kernels, and the host reads nothing.

A rank sends once per *slot*: from node n of N, slot s leads to node n + 1 + s, modulo N. What arrives in a slot comes
from node n - 1 - s, and goes home to it.

Over many nodes memory is a *ring* of R slots (``comet.schedule.network.ring_slots``). Slots 0 to R - 1 leave at once.
When the guests of slot s are computed, their sums leave, those of slot s - 1 are waited for and added up, and then slot
s + R - 1 leaves. So at most R slots are under way each way. Own tokens are added last then, and in the order of the
nodes where all slots have memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comet.comm.collectives import (
    CollectiveSteps,
    accumulator_dtype,
    all_gather_stacked,
    bad_ids,
    check_calls,
    check_ids,
)
from comet.comm.handshake import to_host
from comet.layer.group import ExpertGroup
from comet.layout import ExpertLayout, RoutedTokens
from comet.schedule.network import ring_slots


class Stop(NamedTuple):
    """Guests that are computed in one run: one part of those that come through a slot."""

    slot: int
    part: int


class Trip(ABC):
    """One pass over the network, forward or backward."""

    @property
    @abstractmethod
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors of this forward pass that its backward pass needs; asked for before the pass arrives."""

    @abstractmethod
    def guests(self, at: Stop) -> RoutedTokens:
        """The guests of a stop, with ids among this node's experts, once they are there."""

    @abstractmethod
    def guest_gradients(self, at: Stop) -> Tensor:
        """Gradients of the sums that guests were sent home with, once they are there."""

    @abstractmethod
    def send_home(self, at: Stop, *results: Tensor) -> None:
        """Send what was computed of guests back: sums, or gradients of tokens and of routing weights."""

    @abstractmethod
    def arrive(self, *own: Tensor) -> tuple[Tensor, ...]:
        """Add to what this node computed of own tokens what the others did, in the order of the nodes, in float32."""


class Rails(ABC):
    """This rank's links to its rail peers, for one layer.

    Args:
        at_once: Whether guests of all slots may be asked for before any goes home, whatever memory they take.
    """

    num_parts = 1  # the guests of a slot are computed in so many runs
    collectives: bool  # whether passes run collectives of ``torch.distributed``
    num_bytes = 0  # sent so far, where the host knows it

    def __init__(self, group: ExpertGroup, layout: ExpertLayout, *, at_once: bool = False) -> None:
        assert group.nodes is not None, "rails lead to other nodes"
        self.group, self.layout, self.nodes = group, layout, group.nodes
        self.experts_per_node = layout.num_experts // self.nodes.num_nodes
        self.slots = range(self.nodes.num_nodes - 1)
        self.most_guests = group.workspace.max_tokens  # a stop has at most so many
        self.ring = len(self.slots) if at_once else ring_slots(self.nodes.num_nodes, self.most_guests)
        self.is_ring = self.ring < len(self.slots)  # whether slots take turns in memory

    @property
    def stops(self) -> list[Stop]:
        """All runs of guests, in their order, the same on all ranks of a node."""
        return [Stop(slot, part) for slot in self.slots for part in range(self.num_parts)]

    @abstractmethod
    def depart(self, routed: RoutedTokens, *, trains: bool) -> Trip:
        """Begin a forward pass: send own tokens that have experts on other nodes."""

    @abstractmethod
    def depart_backward(self, kept: Sequence[Tensor], grad: Tensor) -> Trip:
        """Begin the backward pass of a trip that kept these tensors: send gradients ``(T, D)`` of own tokens."""

    def target(self, slot: int) -> int:
        """The node that a slot leads to."""
        return (self.nodes.node + 1 + slot) % self.nodes.num_nodes

    def source(self, slot: int) -> int:
        """The node that what arrives in a slot comes from."""
        return (self.nodes.node - 1 - slot) % self.nodes.num_nodes

    def ids_in(self, node: int, top_k_ids: Tensor) -> Tensor:
        """Global ids as those of a node's experts; -1 for experts of other nodes."""
        elsewhere = self.nodes_of(top_k_ids) != node
        return (top_k_ids - node * self.experts_per_node).masked_fill_(elsewhere, -1)

    def nodes_of(self, top_k_ids: Tensor) -> Tensor:
        """The node of each id; -1 of masked ones."""
        return torch.div(top_k_ids, self.experts_per_node, rounding_mode="floor").clamp_(min=-1)


class NodeRows(NamedTuple):
    """Which tokens travel between this rank and its rail peers."""

    tokens: Tensor  # (S,) int64: own tokens that travel, by node, then in their order
    send_counts: tuple[int, ...]  # (N,) tokens sent to each node; 0 to this one
    recv_counts: tuple[int, ...]  # (N,) guests from each node

    def sent(self, node: int) -> slice:
        """The rows sent to a node, among all that are sent."""
        first = sum(self.send_counts[:node])
        return slice(first, first + self.send_counts[node])

    @property
    def reversed(self) -> NodeRows:
        """The way home: guests' rows are sent, and those of own tokens arrive."""
        return self._replace(send_counts=self.recv_counts, recv_counts=self.send_counts)


class Travelling(NamedTuple):
    """Rows on the network."""

    received: tuple[Tensor, ...]
    works: tuple[Any, ...]

    def arrived(self) -> tuple[Tensor, ...]:
        """The rows, once they are there: a CPU waits, of a GPU the current stream does."""
        for work in self.works:
            work.wait()
        return self.received


class CollectiveRails(Rails):
    """Rails by NCCL or gloo; all ranks of the group first exchange how many tokens travel."""

    collectives = True

    def __init__(self, group: ExpertGroup, layout: ExpertLayout, *, at_once: bool = False) -> None:
        super().__init__(group, layout, at_once=at_once)
        assert group.process_group is not None, "several nodes have several ranks"
        self.steps = CollectiveSteps(group.comm, group.process_group, group.workspace.layers_made)

    def depart(self, routed: RoutedTokens, *, trains: bool) -> CollectiveTrip:
        """Waits once for the device.

        Raises:
            AgreedError: If ids of any rank are out of range, ranks call different layers, or gradients are wanted on
                some ranks only.
        """
        number = self.steps.begin(0, trains=trains)
        rows = self.rows_of(routed.top_k_ids, trains=trains)
        return CollectiveTrip(self, rows, number, len(routed.tokens), lambda slot: self.send(slot, rows, routed))

    def depart_backward(self, kept: Sequence[Tensor], grad: Tensor) -> CollectiveTrip:
        """Raises ``AgreedError`` where ranks begin backward passes of different calls."""
        tokens, counts = kept
        number, *numbers = counts.tolist()
        rows = NodeRows(tokens, tuple(numbers[: self.nodes.num_nodes]), tuple(numbers[self.nodes.num_nodes :]))
        self.steps.begin(number)

        def send(slot: int) -> Travelling:
            target = self.target(slot)
            return self.exchange(target, self.source(slot), rows, grad[tokens[rows.sent(target)]])

        return CollectiveTrip(self, rows, number, len(grad), send)

    def rows_of(self, top_k_ids: Tensor, *, trains: bool) -> NodeRows:
        """Decide which tokens travel where; waits once for the device; collective over the group.

        Raises:
            AgreedError: If ids of any rank are out of range, or gradients are wanted on some ranks only.
        """
        nodes, num_nodes = self.nodes, self.nodes.num_nodes
        bad = bad_ids(top_k_ids, self.layout)
        node_ids = torch.arange(num_nodes, device=top_k_ids.device)
        hits = (self.nodes_of(top_k_ids.masked_fill(bad, -1)) == node_ids[:, None, None]).any(2)  # (N, T)
        hits[nodes.node] = False
        wanted = hits.new_full((1,), trains, dtype=torch.int64)
        sent = torch.cat([hits.sum(1), bad.sum().view(1), wanted])
        table = to_host(all_gather_stacked(sent, self.group.process_group), self.group.process_group)
        check_calls([row.pop() for row in table], "tokens, top_k_weights, w1 or w2")
        check_ids([row.pop() for row in table], top_k_ids, self.layout)
        send_counts = tuple(table[self.group.rank])
        recv_counts = tuple(table[peer][nodes.node] for peer in nodes.peers)
        order = hits.flatten().logical_not().to(torch.uint8).argsort(stable=True)[: sum(send_counts)]
        return NodeRows(order % max(len(top_k_ids), 1), send_counts, recv_counts)

    def send(self, slot: int, rows: NodeRows, routed: RoutedTokens) -> Travelling:
        """Send the tokens of a slot, with their ids and weights as one tensor ``(S, 2K)`` int32."""
        target = self.target(slot)
        tokens, ids, weights = (each[rows.tokens[rows.sent(target)]] for each in routed)
        words = torch.cat([self.ids_in(target, ids), weights.detach().view(torch.int32)], dim=1)
        return self.exchange(target, self.source(slot), rows, tokens.detach(), words)

    def exchange(self, target: int, source: int, rows: NodeRows, *tensors: Tensor) -> Travelling:
        """Send these tensors, of one row each for every token, to the rail peer of node ``target``.

        Returns:
            Tensors as long as the rows that come from node ``source``.
        """
        received, works = [], []
        for tensor in tensors:
            arriving = tensor.new_empty(rows.recv_counts[source], *tensor.shape[1:])
            comes, goes = ([0] * self.nodes.num_nodes for _ in range(2))
            comes[source], goes[target] = len(arriving), len(tensor)
            works.append(dist.all_to_all_single(arriving, tensor, comes, goes, self.nodes.rails, async_op=True))
            received.append(arriving)
            self.num_bytes += tensor.numel() * tensor.itemsize
        return Travelling(tuple(received), tuple(works))


class CollectiveTrip(Trip):
    """A pass by collectives."""

    def __init__(
        self, rails: CollectiveRails, rows: NodeRows, number: int, num_tokens: int, send: Callable[[int], Travelling]
    ) -> None:
        self._rails, self._rows, self._number, self._num_tokens, self._send = rails, rows, number, num_tokens, send
        self._coming = {slot: send(slot) for slot in rails.slots[: rails.ring]}
        self._returning: dict[int, Travelling] = {}  # own results take the slot behind the last
        self._totals: list[Tensor] = []

    @property
    def kept(self) -> tuple[Tensor, ...]:
        # Counts are a tensor, too: a checkpoint hands the backward pass those of the forward pass that it ran again.
        rows = self._rows
        return rows.tokens, torch.tensor([self._number, *rows.send_counts, *rows.recv_counts])

    def guests(self, at: Stop) -> RoutedTokens:
        tokens, words = self._coming[at.slot].arrived()
        ids, weights = words.chunk(2, dim=1)
        return RoutedTokens(tokens, ids.contiguous(), weights.contiguous().view(torch.float32))

    def guest_gradients(self, at: Stop) -> Tensor:
        return self._coming[at.slot].arrived()[0]

    def send_home(self, at: Stop, *results: Tensor) -> None:
        """Send results; in a ring also add up what came home before, and send the guests that take its memory."""
        rails, slot = self._rails, at.slot
        back = rails.exchange(rails.source(slot), rails.target(slot), self._rows.reversed, *results)
        self._returning[slot] = back
        del self._coming[slot]
        if rails.is_ring and slot:
            self._add(slot - 1)
            for following in rails.slots[slot + rails.ring - 1 : slot + rails.ring]:
                self._coming[following] = self._send(following)

    def arrive(self, *own: Tensor) -> tuple[Tensor, ...]:
        """Add up in the order of the nodes; in a ring what is left, own results last."""
        rails, num_nodes = self._rails, self._rails.nodes.num_nodes
        self._returning[num_nodes - 1] = Travelling(own, ())
        in_order = [(node - rails.nodes.node - 1) % num_nodes for node in range(num_nodes)]
        for slot in range(num_nodes - 2, num_nodes) if rails.is_ring else in_order:
            self._add(slot)
        return tuple(total.to(mine.dtype) for total, mine in zip(self._totals, own, strict=True))

    def _add(self, slot: int) -> None:
        """Add what comes home through a slot to the totals, or own results."""
        parts = self._returning.pop(slot).arrived()
        if not self._totals:
            sums = ((each.shape[1:], accumulator_dtype(each.dtype)) for each in parts)
            self._totals = [parts[0].new_zeros(self._num_tokens, *shape, dtype=dtype) for shape, dtype in sums]
        for total, part in zip(self._totals, parts, strict=True):
            if slot == len(self._rails.slots):
                total += part
            else:
                total.index_add_(0, self._rows.tokens[self._rows.sent(self._rails.target(slot))], part.to(total.dtype))
