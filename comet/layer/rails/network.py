"""Rails by kernels: rows go straight into the memory of rail peers, flags say what has arrived, the host reads nothing.

Memory per rank, for all layers of a group (N nodes, S = N - 1 slots, R = min(S, max(3, 8192 / M)), M, K, D,
C = M / 128 chunks):

============  ==========================  =================================================================
region        shape                       written by rail peers
============  ==========================  =================================================================
``out``       rows ``(R, M, D)``          guests, or gradients of their sums, in the order of their owner's tokens
              words                       header; ids and routing weights of guests
              flags ``(S, 1 + C, 2)``     the pass whose words, and whose rows by chunk of 128, are there
``home``      the same                    sums, or gradients of tokens; words: gradients of routing weights
``room``      words, flags ``(S, 2, 2)``  where R < S: the pass in which the receiver of a slot has room for guests
============  ==========================  =================================================================

Over NVSHMEM there is as much again for staging: ``2 R M (D itemsize + 8K)`` bytes become twice that.

Why nothing is overwritten that a rank still reads, where R = S: a rank ends a pass only when sums of all slots are
home, and a peer sends sums of a slot when it has used the guests of that slot. So when this rank sends guests of the
next pass, the peer is done with those of this one, and the puts of this one have left their staging memory. Sums of the
next pass are sent by a peer after the guests of the next pass came from here, and these are sent when this rank has
added up the sums of this pass.

Where R < S, slot s takes the memory of slot s - R, whose guests came from another node:

- Guests: a rank sends a header through ``room`` to the sender of slot s. For s < R it does so when it begins the pass,
  as it has ended the one before, and else behind the run of slot s - R. The sender waits for the header on its stream
  for the network.
- Sums: the rank sends slot s when it has added up the sums of slot s - R (``comet.layer.rails.collective``), and a peer
  sends sums of slot s when the guests of slot s came. So the sums of slot s - R have been read.
- Staging of guests: the sums of slot s - R are home, so its guests have arrived. Staging of sums: blocks that put them
  wait until NVSHMEM has read them, so the next launch on the stream finds the memory free.

Why no rank waits for ever: what a rank launches behind the run of slot s waits only for what other ranks launched
behind runs of lower slots, or when they began the pass, as R is at least 2.

A rank whose pass failed sends nothing more, to rail peers or inside its node. A restart zeroes flags and epoch of all
legs when all ranks have met, and no rank sends before all have met again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comet.comm.collectives import call_number
from comet.kernels.network.legs import Leg, Message, SendLists
from comet.kernels.network.listing import list_tokens
from comet.kernels.network.put import put
from comet.kernels.network.put_cuda import put_cuda
from comet.kernels.network.receive import add_nodes, receive
from comet.kernels.runtime.arguments import aligned
from comet.kernels.runtime.limits import CHUNK_ROWS, LEG_HEADER
from comet.kernels.runtime.nvrtc import is_available
from comet.kernels.runtime.recorder import KIND_SEND
from comet.layer.group import ExpertGroup
from comet.layer.rails.collective import Rails, Stop, Trip
from comet.layer.rails.legs import Legs
from comet.layout import ExpertLayout, RoutedTokens
from comet.utils.streams import SideStream


class DeviceRails(Rails):
    """Rails by kernels, for layers whose work inside a node is kernels, too.

    Args:
        num_parts: Runs in which the guests of a slot are computed; 0 counts as 1.
    """

    collectives = False

    def __init__(self, group: ExpertGroup, layout: ExpertLayout, legs: Legs, num_parts: int) -> None:
        super().__init__(group, layout)
        self.legs, self.max_tokens = legs, group.workspace.max_tokens
        self.call = group.workspace.layers_made
        self.stream = SideStream.create(group.device)
        self.put = put
        if is_available(group.device):
            self.put = partial(put_cuda, ranks=legs.ranks)
        ints: dict[str, Any] = dict(dtype=torch.int32, device=group.device)
        num_chunks = self.max_tokens // CHUNK_ROWS
        size = -(-num_chunks // max(num_parts, 1))
        self.parts = [range(first, min(first + size, num_chunks)) for first in range(0, num_chunks, size)]
        self.num_parts, self.all_chunks = len(self.parts), range(num_chunks)
        self.most_guests = CHUNK_ROWS * size
        # The row of each place among the rows of a part.
        self.rows_of_part = [torch.arange(self.max_tokens, **ints) - CHUNK_ROWS * chunks.start for chunks in self.parts]
        self.no_words = torch.zeros(self.max_tokens, 0, **ints)
        self.no_number, self.no_counts = torch.zeros(1, **ints), torch.zeros(len(self.slots), **ints)
        # Puts of this pass. The list keeps their memory until the streams have joined; a failed pass, until the next.
        self.sending: list[tuple[Callable[[], None], object]] = []

    def depart(self, routed: RoutedTokens, *, trains: bool) -> DeviceTrip:
        """List own tokens that travel, and send them on a stream of their own."""
        slots, ids = len(self.slots), routed.top_k_ids
        lists = SendLists(
            tokens=ids.new_empty(slots, self.max_tokens),
            places=ids.new_empty(slots, self.max_tokens),
            counts=ids.new_empty(slots),
            words=ids.new_empty(slots, self.max_tokens, 2 * ids.shape[1]),
        )
        weights = routed.top_k_weights.detach().contiguous()
        list_tokens(ids.contiguous(), weights, lists, self.nodes.node, self.experts_per_node, self.legs.out.shape)
        call = call_number(self.call, trains)
        return DeviceTrip(self, lists, routed.tokens.detach(), lists.words, self.no_number, call)

    def depart_backward(self, kept: Sequence[Tensor], grad: Tensor) -> DeviceTrip:
        """Send gradients of the tokens that travelled."""
        tokens, places, counts, number = kept
        lists, words = SendLists(tokens, places, counts, self.no_words), self.no_words.expand(len(self.slots), -1, -1)
        return DeviceTrip(self, lists, grad, words, number, call_number(self.call, True))


class DeviceTrip(Trip):
    """A pass by kernels; those that send run on a stream of their own."""

    def __init__(
        self, rails: DeviceRails, lists: SendLists, rows: Tensor, words: Tensor, number: Tensor, call: int
    ) -> None:
        """Send rows and words of own tokens through all slots that have memory."""
        self._rails, self._lists, self._number, self._call = rails, lists, number, call
        self._came = torch.empty_like(lists.counts)  # how many guests came through each slot
        self._home = torch.empty_like(lists.counts)
        self._gradients: list[Tensor] = []  # gradients of the routing weights of a slot, part by part
        self._totals: list[Tensor] = []  # sums so far, where slots take turns
        rails.sending = []
        self._own = Message(
            x=aligned(rows), tokens=lists.tokens, words=words, counts=lists.counts, number=number, call=call,
            slots=rails.slots[: rails.ring], chunks=rails.all_chunks, has_words=True,
        )  # fmt: skip
        self._tell_of_room(self._own.slots)
        self._send_out(self._own.slots)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        lists = self._lists
        return lists.tokens, lists.places, lists.counts, self._rails.legs.out.epoch + 1

    def _send_out(self, slots: range) -> None:
        """Send own tokens through some slots, once their receivers have room."""
        rails, room = self._rails, self._rails.legs.room
        waits = (self._home, self._number, self._call, slots, range(1))
        message = replace(self._own, slots=slots)
        self._put(rails.legs.out, message, None if room is None else partial(receive, room, *waits))

    def _tell_of_room(self, slots: range) -> None:
        """Tell the senders of some slots that their guests may come."""
        rails, room = self._rails, self._rails.legs.room
        if room is not None and slots:
            rows: dict[str, Any] = dict(
                x=room.words, tokens=rails.rows_of_part[0], words=rails.no_words, counts=rails.no_counts
            )
            self._put(room, replace(self._own, slots=slots, chunks=range(1), **rows))

    def _put(self, leg: Leg, message: Message, wait: Callable[[], None] | None = None) -> None:
        rails, recorder = self._rails, self._rails.group.workspace.recorder
        send = partial(rails.put, leg, message)
        if recorder is not None:
            send = partial(recorder.around, len(rails.sending), 0, send, kind=KIND_SEND)

        def work() -> None:
            if wait is not None:
                wait()
            send()

        rails.sending.append((rails.stream.start(work), (message, wait)))

    def _join(self) -> None:
        """Let the current stream wait for what was put so far, whose memory goes."""
        for join, _ in self._rails.sending:
            join()
        self._rails.sending = []

    def guests(self, at: Stop) -> RoutedTokens:
        """Rows in the pool, as many as a part may have; ids of those that did not come are -1."""
        chunks, top_k = self._rails.parts[at.part], self._lists.words.shape[2] // 2
        ids = self._came.new_empty(CHUNK_ROWS * len(chunks), top_k)
        weights = torch.empty_like(ids, dtype=torch.float32)
        return RoutedTokens(self._rows(at, (ids, weights)), ids, weights)

    def guest_gradients(self, at: Stop) -> Tensor:
        """Rows in the pool."""
        return self._rows(at)

    def _rows(self, at: Stop, routing: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The rows of a stop, once they are there."""
        out, chunks = self._rails.legs.out, self._rails.parts[at.part]
        receive(out, self._came, self._number, self._call, range(at.slot, at.slot + 1), chunks, routing)
        return out.rows[at.slot % self._rails.ring, CHUNK_ROWS * chunks.start : CHUNK_ROWS * chunks.stop]

    def send_home(self, at: Stop, *results: Tensor) -> None:
        """Put rows; words, which are gradients of routing weights, with the last part."""
        rails, slots = self._rails, range(at.slot, at.slot + 1)
        self._gradients += [each.view(torch.int32) for each in results[1:]]
        is_last = at.part == rails.num_parts - 1
        words = torch.cat(self._gradients) if is_last and self._gradients else rails.no_words
        if is_last:
            self._gradients = []
        takes_turns = is_last and rails.is_ring and at.slot > 0
        if takes_turns:
            self._join()
        sums: dict[str, Any] = dict(
            x=aligned(results[0]), tokens=rails.rows_of_part[at.part], words=words, counts=self._came
        )
        sent = replace(self._own, slots=slots, chunks=rails.parts[at.part], **sums)
        self._put(rails.legs.home, replace(sent, has_words=is_last))
        if is_last:
            self._tell_of_room(rails.slots[at.slot + rails.ring : at.slot + rails.ring + 1])
        if takes_turns:
            self._receive_sums(range(at.slot - 1, at.slot), results, is_end=False)
            if following := rails.slots[at.slot + rails.ring - 1 : at.slot + rails.ring]:
                self._send_out(following)

    def arrive(self, *own: Tensor) -> tuple[Tensor, ...]:
        """Wait for all slots, add up, and end the pass."""
        rails = self._rails
        self._join()  # before the waits, whose blocks could fill the GPU that still has to send
        added = self._receive_sums(rails.slots[-1:] if rails.is_ring else rails.slots, own, is_end=True)
        rails.legs.home.epoch.add_(1)
        return added

    def _receive_sums(self, slots: range, results: Sequence[Tensor], *, is_end: bool) -> tuple[Tensor, ...]:
        """Wait for the sums of some slots, and add them up: at the end with own results, of which there are as many."""
        rails, home, most = self._rails, self._rails.legs.home, self._rails.max_tokens
        receive(home, self._home, self._number, self._call, slots, rails.all_chunks)
        if rails.is_ring and not self._totals:
            shapes = ((len(self._own.x), each.shape[1]) for each in results)
            self._totals = [torch.zeros(shape, device=home.rows.device) for shape in shapes]
        last = rails.nodes.num_nodes
        node, terms = last - 1 if rails.is_ring else home.node, range(slots.start, last if is_end else slots.stop)
        added: list[Tensor] = []
        totals: Sequence[Tensor | None] = self._totals or [None] * len(results)
        for own, total in zip(results, totals, strict=True):
            came = home.rows
            if added:  # gradients of routing weights
                words = home.words[:, LEG_HEADER : LEG_HEADER + most * own.shape[1]]
                came = words.view(torch.float32).unflatten(1, (most, own.shape[1]))
            mine = own if is_end else None
            added.append(add_nodes(mine, total, came, self._lists.places, home.shape, node, terms))
        return tuple(added)
