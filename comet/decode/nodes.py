"""Decode over nodes: each node decodes its own experts, and rail peers add up what their nodes computed.

Letters: N nodes of L ranks, S = N - 1 other nodes; T tokens, K, D, E as everywhere. A node has E / N experts.

*Replicated tokens* (generation). All ranks hold the same tokens. Each node runs ``RankDecode`` on them, and experts of
other nodes have no slot there. Then each rank holds its node's sums ``(T, D)`` in float32, and sends them to its rail
peers. Each rank adds the sums of all nodes in the order of the nodes, so all ranks get the same bits.

*Tokens of the ranks' own*. A token with experts on another node travels to the rail peer there, as in
``comet.layer.nodes``. A rank decodes its own tokens and its guests in one step of its node, and sums travel home.

Example, replicated (N = 2, L = 1, E = 4, T = 1, K = 2): ids ``[[1, 2]]``, weights ``[[0.5, 2]]``. Expert 1, on node 0,
gives 32 in some column, and expert 2, on node 1, gives 3. Node 0 has the sum 16, node 1 has 6, both ranks return 22.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from comet.comm.collectives import all_gather_stacked, call_number
from comet.config import MoEConfig, require
from comet.decode.ranks import RankDecode
from comet.decode.weights import DecodeScratch, DecodeWeights
from comet.errors import CommTimeoutError, StepFailedError
from comet.kernels.decode.blocks import DecodeConfig
from comet.kernels.decode.step import Batch
from comet.kernels.network.legs import Leg, Message
from comet.kernels.network.put import put
from comet.kernels.network.put_cuda import put_cuda
from comet.kernels.network.receive import receive
from comet.kernels.runtime.limits import CHUNK_ROWS
from comet.kernels.runtime.nvrtc import is_available
from comet.layer.group import ExpertGroup
from comet.layer.nodes import inside_node, make_rails, pass_over_nodes
from comet.layer.rails.collective import Trip
from comet.layer.rails.network import Legs
from comet.layout import RoutedTokens
from comet.utils.graphs import hold_if_captured
from comet.utils.uncompiled import uncompiled

STEP = "decode step"
FIRST_CHUNK = range(1)  # float32 sums of 64 tokens take 128 rows of 16 bits


def decode_obstacle(group: ExpertGroup) -> str:
    """Return why a group has no warp decode, in words; empty where it has."""
    inside = group if group.nodes is None else group.nodes.inner
    return group.nodes_obstacle or inside.comm.memory_obstacle


class NodesDecode(ABC):
    """Decode steps of a group over several nodes, all of whose ranks take part.

    Arguments and results are those of ``RankDecode``, and ``DecodeWeights.slots`` name all E experts. No CUDA graph may
    hold a step with collectives of ``torch.distributed``, because in a graph their waits have no deadline.
    """

    collectives: bool  # whether steps run collectives of ``torch.distributed``

    def __init__(self, group: ExpertGroup, inner: RankDecode, max_tokens: int) -> None:
        assert group.nodes is not None, "the group spans several nodes"
        self.group, self.nodes, self.inner, self.max_tokens = group, group.nodes, inner, max_tokens
        legs = group.nodes.legs
        self.legs: Legs | None = None
        # A step has rows of all nodes at once; where slots take turns in memory, it runs by collectives.
        if inner.use_kernels and legs is not None and legs.room is None:
            # A rank that waited in vain inside its node sends nothing to others, and vice versa.
            out, home = (replace(leg, inner_fault=inner.fault) for leg in (legs.out, legs.home))
            self.legs = legs._replace(out=out, home=home)
        self.collectives = self.legs is None

    @property
    def fault(self) -> Tensor:
        return self.inner.fault

    @uncompiled
    def __call__(
        self,
        tokens: Tensor,
        top_k_ids: Tensor,
        top_k_weights: Tensor,
        weights: DecodeWeights,
        *,
        scratch: DecodeScratch | None = None,
        config: DecodeConfig | None = None,
    ) -> Tensor:
        """Run one step; collective over all nodes.

        Raises:
            StepFailedError: If a step failed on any rank.
            CommTimeoutError: If a rank did not come in time; by kernels on a GPU ``check`` raises it.
        """
        own = Batch(tokens, top_k_ids, top_k_weights)
        self.inner.check_inputs(own, weights)
        require(len(tokens) <= self.max_tokens, f"T={len(tokens)} tokens must be at most max_tokens={self.max_tokens}")
        with pass_over_nodes(self.group, STEP, collectives=self.collectives, refuses=True):
            output = self._run(own, weights, scratch, config)
            if not self.collectives and tokens.device.type == "cpu":
                self.check()
            return output

    @abstractmethod
    def _run(
        self, own: Batch, weights: DecodeWeights, scratch: DecodeScratch | None, config: DecodeConfig | None
    ) -> Tensor:
        """The step, of inputs that are right."""

    def check(self) -> None:
        """Report what went wrong; arguments and errors are those of ``RankDecode.check``. Waits for the device."""
        self.group.workspace.check()
        try:
            self.inner.check()
        except (CommTimeoutError, StepFailedError) as error:
            self.group.comm.board.note("last decode step inside its node, whose ranks count from 0,", error)
            self.group.comm.board.check()

    def restart(self) -> None:
        self.group.workspace.restart()


class ReplicatedNodesDecode(NodesDecode):
    """Steps of tokens that all ranks hold."""

    def __init__(self, moe: MoEConfig, group: ExpertGroup, *, max_tokens: int, use_kernels: bool | None = None) -> None:
        assert group.nodes is not None, "the group spans several nodes"
        inner = RankDecode(
            group.nodes.inner.comm, hidden_size=moe.hidden_size, max_tokens=max_tokens, use_kernels=use_kernels
        )
        super().__init__(group, inner, max_tokens)
        self._sums = None if self.legs is None else _LegSums(group, self.legs)

    def _run(
        self, own: Batch, weights: DecodeWeights, scratch: DecodeScratch | None, config: DecodeConfig | None
    ) -> Tensor:
        if not len(own.tokens):
            return own.tokens.new_empty(own.tokens.shape)
        with inside_node(self.nodes.node, collectives=self.collectives):
            sums = self.inner(*own, weights, scratch=scratch, config=config, out_dtype=torch.float32)
        if self._sums is not None:
            return self._sums.add_up(sums).to(own.tokens.dtype)
        return functools.reduce(torch.add, all_gather_stacked(sums, self.nodes.rails)).to(own.tokens.dtype)


class _LegSums:
    """Adds up the sums of all nodes by kernels, which send them as rows of the legs of layers.

    Why nothing is overwritten that a rank still reads: sums leave through ``out``, and a header without rows returns
    through ``home`` when they have been added up. So a step is a pass as ``comet.layer.rails.network`` knows it.
    """

    def __init__(self, group: ExpertGroup, legs: Legs) -> None:
        self.out, self.home = legs.out, legs.home
        num_slots, num_rows, self.hidden_size = legs.out.rows.shape
        device = legs.out.rows.device
        self.slots, self.node, self.num_nodes = range(num_slots), legs.out.node, num_slots + 1
        self.dtype, self.call = legs.out.rows.dtype, call_number(group.workspace.layers_made)
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.rows, self.no_words, self.no_number = rows, rows.new_empty(num_rows, 0), rows.new_zeros(1)
        numbers = torch.arange(CHUNK_ROWS + 1, dtype=torch.int32, device=device)
        self.counts = numbers[:, None].repeat(1, num_slots)  # row n holds n for each slot
        self.came = rows.new_empty(num_slots)
        self.put = functools.partial(put_cuda, ranks=legs.ranks) if is_available(device) else put

    def add_up(self, sums: Tensor) -> Tensor:
        """``(T, D)`` float32 of this node -> those of all nodes, added up in the order of the nodes."""
        self._pass(self.out, sums, num_rows=sums.nbytes // (self.hidden_size * self.dtype.itemsize))
        others = self.out.rows.view(torch.float32).view(len(self.slots), -1, self.hidden_size)[:, : len(sums)]
        parts = (
            sums if node == self.node else others[(self.node - 1 - node) % self.num_nodes]
            for node in range(self.num_nodes)
        )
        total = functools.reduce(torch.add, parts)
        # The group keeps the epoch.
        hold_if_captured(self.home.epoch, self.rows, self.counts, self.came, self.no_number)
        self._pass(self.home, sums, num_rows=0)
        self.home.epoch.add_(1)
        return total

    def _pass(self, leg: Leg, sums: Tensor, *, num_rows: int) -> None:
        """Send the first rows of ``sums`` to all rail peers, and wait for theirs."""
        message = Message(
            x=sums.view(self.dtype).view(-1, self.hidden_size), tokens=self.rows, words=self.no_words,
            counts=self.counts[num_rows], number=self.no_number, call=self.call, slots=self.slots, chunks=FIRST_CHUNK,
            has_words=True,
        )  # fmt: skip
        self.put(leg, message)
        receive(leg, self.came, self.no_number, self.call, self.slots, FIRST_CHUNK)


class GuestDecode(NodesDecode):
    """Steps of tokens of the ranks' own; a step inside a node takes N times ``max_tokens`` of each of its ranks."""

    def __init__(self, moe: MoEConfig, group: ExpertGroup, *, max_tokens: int, use_kernels: bool | None = None) -> None:
        assert group.nodes is not None, "the group spans several nodes"
        inner = RankDecode(
            group.nodes.inner.comm, hidden_size=moe.hidden_size, max_tokens=max_tokens * group.nodes.num_nodes,
            replicated=False, use_kernels=use_kernels,
        )  # fmt: skip
        super().__init__(group, inner, max_tokens)
        nodes = replace(group.nodes, legs=self.legs)
        self.rails = make_rails(moe, replace(group, nodes=nodes), use_kernels=inner.use_kernels, at_once=True)

    def _run(
        self, own: Batch, weights: DecodeWeights, scratch: DecodeScratch | None, config: DecodeConfig | None
    ) -> Tensor:
        ids = own.ids.clamp(-2, 2**31 - 1).int() if own.ids.dtype == torch.int64 else own.ids  # unknown ones stay so
        routed = RoutedTokens(*(each.contiguous() for each in (own.tokens, ids, own.routing_weights)))
        trip = self.rails.depart(routed, trains=False)
        guests = self._guests(trip)
        batch = Batch(*(torch.cat(each) for each in zip(routed, *guests, strict=True)))
        with inside_node(self.nodes.node, collectives=self.collectives):
            sums = self.inner(*batch, weights, scratch=scratch, config=config)
        mine, *theirs = sums.split([len(each.tokens) for each in (routed, *guests)])
        for stop in self.rails.stops:  # all guests are in the first part of a slot; the last part closes the slot
            trip.send_home(stop, theirs[stop.slot])
        return trip.arrive(mine)[0]

    def _guests(self, trip: Trip) -> list[RoutedTokens]:
        """The guests of each slot, with the ids of all experts."""
        first_expert = self.nodes.node * self.rails.experts_per_node
        found = []
        for stop in self.rails.stops:
            if stop.part == 0:
                part = trip.guests(stop).part(slice(0, self.max_tokens))
                ids = (part.top_k_ids + first_expert).masked_fill_(part.top_k_ids < 0, -1)
                found.append(part._replace(top_k_ids=ids))
        return found


def make_decode(moe: MoEConfig, group: ExpertGroup, *, max_tokens: int, replicated: bool) -> RankDecode | NodesDecode:
    """Decode steps of a group (collective).

    Raises:
        UnavailableError: If the ranks of the group, or of a node, share no memory.
    """
    if group.nodes is None:
        return RankDecode(group.comm, hidden_size=moe.hidden_size, max_tokens=max_tokens, replicated=replicated)
    return (ReplicatedNodesDecode if replicated else GuestDecode)(moe, group, max_tokens=max_tokens)
