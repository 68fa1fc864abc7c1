"""The memory of one direction over the network, and the lists of tokens that travel.

Letters: N nodes, S = N - 1 slots, M tokens at most per rank, C = M / 128 chunks, K, D, as in ``comet.layer.plan``.

A rank sends to one rail peer per *slot*: from node n, slot s leads to node n + 1 + s, modulo N, and the way home back.
So a slot has the same number at both ends. Rows of a slot lie behind each other from its start. Its *words* are
a header of ``LEG_HEADER`` int32 (tokens, call, number of the call whose backward pass it is), and then some of each
token: on the way out K ids and K routing weights, on the way home of a backward pass K gradients.

Example: N=4, node 1: slots 0, 1, 2 lead to nodes 2, 3, 0, and what arrives in them comes from nodes 0, 3, 2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

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

    words: Tensor  # ``(S, LEG_HEADER + M * 2K)`` int32: arrive here
    rows: Tensor  # ``(S, M, D)``: arrive here
    flags: Tensor  # ``(S, 1 + C, 2)`` int32: the pass whose words, and whose rows by chunk, have arrived
    word_targets: Tensor  # ``(N,)`` int64: address of the words at the rail peer in each node
    row_targets: Tensor  # ``(N,)`` int64: the same of the rows
    flag_targets: Tensor  # ``(N,)`` int64: the same of the flags
    epoch: Tensor  # ``(1,)`` int32: passes that are over
    fault: Tensor  # ``(8,)`` int64: record of a wait that met its deadline
    inner_fault: Tensor  # ``(8,)`` int64: the same inside the node
    node: int  # this rank's
    is_home: bool
    timeout_ns: int  # deadline of every wait

    @property
    def tensors(self) -> LegTensors:
        """The tensors, as kernels take them."""
        return LegTensors(
            self.words, self.rows, self.flags, self.word_targets, self.row_targets, self.flag_targets, self.epoch,
            self.fault, self.inner_fault,
        )  # fmt: skip

    @property
    def shape(self) -> "LegShape":
        """The numbers that kernels are compiled for."""
        return LegShape(
            num_nodes=self.word_targets.numel(),
            num_chunks=self.flags.shape[1] - 1,
            chunk=CHUNK_ROWS,
            slot_words=self.words.shape[1],
            header=LEG_HEADER,
            is_home=self.is_home,
            interpret=triton.knobs.runtime.interpret,
        )


class LegShape(NamedTuple):
    """Constants of the kernels of a leg."""

    num_nodes: int  # N
    num_chunks: int  # C
    chunk: int  # rows that share a flag
    slot_words: int  # LEG_HEADER + M * 2K of the pool
    header: int
    is_home: bool
    interpret: bool


class SendLists(NamedTuple):
    """Which tokens of this rank travel, by slot; what lies behind the last of a list is undefined."""

    tokens: Tensor  # ``(S, M)`` int32: own tokens that travel
    places: Tensor  # ``(S, M)`` int32: the place of each own token among these, or -1
    counts: Tensor  # ``(S,)`` int32
    words: Tensor  # ``(S, M, 2K)`` int32: ids among the experts of the node, or -1, and the bits of routing weights


class Sent(NamedTuple):
    """The parts of a leg that one launch sends."""

    slots: range
    chunks: range  # the chunks of rows of each slot
    has_words: bool  # whether words and header are sent, too
