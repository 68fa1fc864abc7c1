"""The memory of one direction over the network, and the lists of tokens that travel.

Letters: N nodes, S = N - 1 slots, a ring of R <= S places, M tokens at most per rank, C = M / 128 chunks, K, D, as in
``comet.layer.plan``.

A rank sends to one rail peer per *slot*: from node n, slot s leads to node n + 1 + s, modulo N, and the way home back.
So a slot has the same number at both ends. Its rows and words lie in place s modulo R of the ring, and its flags in
memory of their own. The *words* are a header of ``LEG_HEADER`` int32 (tokens, call, number of the call whose backward
pass it is), and then some of each token: on the way out K ids and K routing weights, on the way home of a backward pass
K gradients.

A third leg has no rows. Its header says that the receiver of a slot has room for guests.

Example: N=4, node 1: slots 0, 1, 2 lead to nodes 2, 3, 0, and what arrives in them comes from nodes 0, 3, 2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from ..runtime.faults import Place
from ..runtime.limits import CHUNK_ROWS, LEG_HEADER


class LegTensors(NamedTuple):
    """The tensors of a ``Leg`` in the form that kernels take."""

    words: Tensor
    rows: Tensor
    flags: Tensor
    word_targets: Tensor
    row_targets: Tensor
    flag_targets: Tensor
    epoch: Tensor
    fault: Tensor
    inner_fault: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One direction, as one rank sees it. Where targets are not mapped, they are this rank's own staging memory."""

    words: Tensor  # ``(R, LEG_HEADER + M * 2K)`` int32: arrive here
    rows: Tensor  # ``(R, M, D)``: arrive here
    flags: Tensor  # ``(S, 1 + C, 2)`` int32: the pass whose words, and whose rows by chunk, have arrived
    word_targets: Tensor  # ``(N,)`` int64: address of the words at the rail peer in each node
    row_targets: Tensor  # ``(N,)`` int64: the same of the rows
    flag_targets: Tensor  # ``(N,)`` int64: the same of the flags
    epoch: Tensor  # ``(1,)`` int32: passes that are over
    fault: Tensor  # ``(8,)`` int64: record of a wait that met its deadline
    inner_fault: Tensor  # ``(8,)`` int64: the same inside the node
    node: int  # this rank's
    place: Place  # what arrives: ``GUESTS``, ``SUMS`` or ``ROOM``
    timeout_ns: int  # deadline of every wait

    @property
    def tensors(self) -> LegTensors:
        """The tensors, as kernels take them."""
        return LegTensors(
            self.words, self.rows, self.flags, self.word_targets, self.row_targets, self.flag_targets, self.epoch,
            self.fault, self.inner_fault,
        )  # fmt: skip

    @property
    def is_home(self) -> bool:
        """Whether it leads to the node that a slot of the way out comes from."""
        return self.place is not Place.GUESTS

    @property
    def shape(self) -> "LegShape":
        """The numbers that kernels are compiled for."""
        return LegShape(
            num_nodes=self.word_targets.numel(),
            ring=self.words.shape[0],
            num_chunks=self.flags.shape[1] - 1,
            chunk=CHUNK_ROWS,
            slot_words=self.words.shape[1],
            header=LEG_HEADER,
            place=int(self.place),
            is_home=self.is_home,
            interpret=triton.knobs.runtime.interpret,
        )


class LegShape(NamedTuple):
    """Constants of the kernels of a leg."""

    num_nodes: int  # N
    ring: int  # R
    num_chunks: int  # C
    chunk: int  # rows that share a flag
    slot_words: int  # LEG_HEADER + M * 2K of the pool
    header: int
    place: int
    is_home: bool
    interpret: bool


class SendLists(NamedTuple):
    """Which tokens of this rank travel, by slot; what lies behind the last of a list is undefined."""

    tokens: Tensor  # ``(S, M)`` int32: own tokens that travel
    places: Tensor  # ``(S, M)`` int32: the place of each own token among these, or -1
    counts: Tensor  # ``(S,)`` int32
    words: Tensor  # ``(S, M, 2K)`` int32: ids among the experts of the node, or -1, and the bits of routing weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """The words and rows of one launch for some slots of a leg; peers see flags of pass ``epoch + 1``."""

    x: Tensor  # ``(T, D)`` contiguous
    tokens: Tensor  # ``(S, M)`` int32: the row of ``x`` at each place of a slot, or ``(M,)`` for all slots
    words: Tensor  # ``(S, M, w)`` int32 words of each, or ``(M, w)``; w may be 0
    counts: Tensor  # ``(S,)`` int32
    number: Tensor  # ``(1,)`` int32: the call whose backward pass this is; 0: a forward pass
    call: int  # the layer, and whether a gradient is wanted
    slots: range
    chunks: range  # the chunks of rows of each slot
    has_words: bool  # whether words and header are sent, too
