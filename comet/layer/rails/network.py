"""Rails by kernels: rows go straight into the memory of rail peers, flags say what has arrived, the host reads nothing.

Memory (N nodes, S = N - 1 slots, M, K, D; C = M / 128 chunks), per rank, for all layers of a group:

============  ==========================  =================================================================
region        shape                       written by rail peers
============  ==========================  =================================================================
``out``       rows ``(S, M, D)``          guests, or gradients of their sums, in the order of their owner's tokens
              words                       header; ids and routing weights of guests
              flags ``(S, 1 + C, 2)``     the pass whose words, and whose rows by chunk of 128, are there
``home``      the same                    sums, or gradients of tokens; words: gradients of routing weights
============  ==========================  =================================================================

Over NVSHMEM there is as much again for staging: ``2 S M (D itemsize + 8K)`` bytes become twice that.

Why nothing is overwritten that a rank still reads: a rank ends a pass only when sums of all slots are home, and a
peer sends sums of a slot when it has used the guests of that slot. So when this rank sends guests of the next pass, the
peer is done with those of this one, and the puts of this one have left their staging memory. Sums of the next pass are
sent by a peer after the guests of the next pass came from here, and these are sent when this rank has added up the sums
of this pass. A rank whose pass failed sends nothing more, to rail peers or inside its node. A restart zeroes flags and
epoch of both legs when all ranks have met, and no rank sends before all have met again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comet.comm.collectives import call_number
from comet.kernels.network.legs import Leg, SendLists, Sent
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

# With fewer tokens reserved, the guests of a slot are one run: the host and short kernels bound the layer.
SPLIT_TOKENS = 2048


class DeviceRails(Rails):
    """Rails by kernels, for layers whose work inside a node is kernels, too.

    Args:
        num_parts: Runs in which the guests of a slot are computed, where many tokens are reserved.
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
        parts = num_parts if self.max_tokens >= SPLIT_TOKENS else 1
        size = -(-num_chunks // parts)
        self.parts = [range(first, min(first + size, num_chunks)) for first in range(0, num_chunks, size)]
        self.num_parts, self.all_chunks = len(self.parts), range(num_chunks)
        self.most_guests = CHUNK_ROWS * size
        # The row of each place among the rows of a part.
        self.rows_of_part = [torch.arange(self.max_tokens, **ints) - CHUNK_ROWS * chunks.start for chunks in self.parts]
        self.no_words = torch.zeros(self.max_tokens, 0, **ints)
        self.no_number = torch.zeros(1, **ints)
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
        trip = DeviceTrip(self, lists, self.no_number, call_number(self.call, trains))
        trip.send_out(routed.tokens.detach(), lists.words)
        return trip

    def depart_backward(self, kept: Sequence[Tensor], grad: Tensor) -> DeviceTrip:
        """Send gradients of the tokens that travelled."""
        tokens, places, counts, number = kept
        trip = DeviceTrip(self, SendLists(tokens, places, counts, self.no_words), number, call_number(self.call, True))
        trip.send_out(grad, self.no_words.expand(len(self.slots), -1, -1))
        return trip


class DeviceTrip(Trip):
    """A pass by kernels; those that send run on a stream of their own."""

    def __init__(self, rails: DeviceRails, lists: SendLists, number: Tensor, call: int) -> None:
        self._rails, self._lists, self._number, self._call = rails, lists, number, call
        self._came = torch.empty_like(lists.counts)  # how many guests came through each slot
        self._home = torch.empty_like(lists.counts)
        self._gradients: list[Tensor] = []  # gradients of the routing weights of a slot, part by part
        rails.sending = []

    @property
    def kept(self) -> tuple[Tensor, ...]:
        lists = self._lists
        return lists.tokens, lists.places, lists.counts, self._rails.legs.out.epoch + 1

    def send_out(self, rows: Tensor, words: Tensor) -> None:
        """Send rows and words of own tokens through all slots."""
        rails, lists = self._rails, self._lists
        self._put(rails.legs.out, rows, lists.tokens, words, lists.counts, Sent(rails.slots, rails.all_chunks, True))

    def _put(self, leg: Leg, rows: Tensor, tokens: Tensor, words: Tensor, counts: Tensor, sent: Sent) -> None:
        given = (leg, aligned(rows), tokens, words, counts, self._number, self._call, sent)
        rails, recorder = self._rails, self._rails.group.workspace.recorder
        send = partial(rails.put, *given)
        if recorder is not None:
            send = partial(recorder.around, len(rails.sending), 0, send, kind=KIND_SEND)
        rails.sending.append((rails.stream.start(send), given))

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
        return out.rows[at.slot, CHUNK_ROWS * chunks.start : CHUNK_ROWS * chunks.stop]

    def send_home(self, at: Stop, *results: Tensor) -> None:
        """Put rows; words, which are gradients of routing weights, with the last part."""
        rails = self._rails
        self._gradients += [each.view(torch.int32) for each in results[1:]]
        is_last = at.part == rails.num_parts - 1
        words = torch.cat(self._gradients) if is_last and self._gradients else rails.no_words
        if is_last:
            self._gradients = []
        sent = Sent(range(at.slot, at.slot + 1), rails.parts[at.part], is_last)
        self._put(rails.legs.home, results[0], rails.rows_of_part[at.part], words, self._came, sent)

    def arrive(self, *own: Tensor) -> tuple[Tensor, ...]:
        """Wait for all slots, add up, and end the pass."""
        rails, home = self._rails, self._rails.legs.home
        for join, _ in rails.sending:  # before the waits, whose blocks could fill the GPU that still has to send
            join()
        rails.sending = []
        receive(home, self._home, self._number, self._call, rails.slots, rails.all_chunks)
        added = [add_nodes(own[0], home.rows, self._lists.places, home.shape, home.node)]
        if len(own) == 2:
            top_k = own[1].shape[1]
            words = home.words[:, LEG_HEADER : LEG_HEADER + rails.max_tokens * top_k].view(torch.float32)
            returned = words.unflatten(1, (rails.max_tokens, top_k))
            added.append(add_nodes(own[1], returned, self._lists.places, home.shape, home.node))
        home.epoch.add_(1)
        return tuple(added)
