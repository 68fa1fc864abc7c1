"""Arguments of the decode kernels: tensors of a step, the constants of a compilation, and memory where ranks meet.

Named tuples go to the kernels as they are, an argument each, which costs the host less than their members would. Of
integers in them Triton makes constants where they are 1, so those that change from step to step or from rank to rank
are arguments of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..experts.tables import CacheConstants, HostExperts
from ..runtime.activation import SWIGLU, Activation


class Batch(NamedTuple):
    """Tokens and their routing."""

    tokens: Tensor  # (T, D)
    ids: Tensor  # (T, K) int32 or int64
    routing_weights: Tensor  # (T, K) float32


class StepTensors(NamedTuple):
    """Tensors that both kernels read and write; J is at least T * K."""

    tokens: Tensor  # (T, D)
    ids: Tensor  # (T, K) int32 or int64; in a launch those of one wave
    routing_weights: Tensor  # (T, K) float32
    slots: Tensor  # (E,) int32
    hidden: Tensor  # (J, F)
    partials: Tensor  # (J, D) float32
    tickets: Tensor  # (D,) int32 zeros
    out: Tensor  # (T, D) result; of gathered tokens only this rank's own
    all_ids: Tensor | None = None  # with waves, ids of the experts of all of them; others are masked


class ExpertWeights(NamedTuple):
    """One of the two matrices of the experts in the S slots."""

    # w1 (S, 2F, D), gate rows, then up rows, or in turn, or w2 (S, D, F); float8_e4m3fn with scales, otherwise the
    # tokens' dtype. MXFP4: int32 with an eighth of the columns, eight e2m1 codes each, the first in the lowest bits;
    # starting at a multiple of 16 bytes
    elements: Tensor
    scales: (
        Tensor | None
    )  # MX (S, rows, columns / 32) uint8, or block (S, ceil(rows / 128), ceil(columns / 128)) float32
    # (S, rows) of a floating type, in the order of the elements' rows; with a cache those of all experts of the rank
    biases: Tensor | None


class StepConstants(NamedTuple):
    """The constants that the kernels are compiled with."""

    top_k: int  # K
    top_k_block: int  # power of two, at least K
    token_block: int  # power of two, at least T
    by_expert: bool  # groups are experts; else routed rows
    vector: bool  # the form of a block; else matrix
    lane: int  # weights in the 16 bytes that a thread loads at once
    shared_scale: int  # neighbours along the contraction that share a scale: 32 (MX), 128 (block FP8), 0 without
    precision: str  # ``input_precision`` of ``tl.dot``
    tile: int  # tokens of a pass
    gathered: bool  # tokens are those of all ranks
    dependent: bool  # a kernel may start while the one before drains
    interpret: bool
    cache: CacheConstants | None = None
    rows: int = 0  # columns of hidden, or of the output, that a block computes
    depth: int = 0  # columns of the contraction that it multiplies at once
    even: bool = True  # depth divides the contraction
    interleaved: bool = False  # rows of w1, of its scales and of b1 are gate and up in turn
    activation: Activation | None = None  # of gate/up; all below is of down
    fold: bool = False  # a block adds up all experts of a token
    ahead: int = 0  # vector form: steps of the contraction that are loaded before hidden is there
    world_size: int = 1
    word_cols: int = 0  # columns of the all-reduce for a block
    adds_up: bool = True  # this wave is the last


class Words(NamedTuple):
    """Memory where ranks meet (``decode.words``)."""

    addresses: Tensor  # (W,) int64 address of every rank's receive buffer
    epoch: Tensor  # (1,) int32, one more with every step
    fault: Tensor  # (8,) int64 record of a spin that met its deadline


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One decode step."""

    tensors: StepTensors
    w1: ExpertWeights
    w2: ExpertWeights  # same slots and dtype as w1
    shared_scale: int = 0  # see StepConstants
    activation: Activation = SWIGLU
    interleaved: bool = False  # see StepConstants
    host: HostExperts | None = None  # where experts come from that have no slot; None: they contribute nothing

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """D, F, E and S."""
        tensors = self.tensors
        return tensors.tokens.shape[1], tensors.hidden.shape[1], tensors.slots.shape[0], self.w2.elements.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """One rank's tokens, and where those of all ranks meet (``decode.gather``)."""

    tokens: Batch  # at most max_tokens
    addresses: Tensor  # (W,) int64 address of every rank's (2, W, max_tokens, stride) int64 words
    stride: int  # words of one token, at least D + 2 K


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveBuffer:
    """Memory where the ranks' sums meet, as one rank sees it."""

    words: Words  # every rank has (2, W, max_tokens, D) int64
    rank: int
    max_tokens: int  # that the words are laid out for; of each rank, where they are gathered
    timeout_ns: int  # deadline of every spin
    gather: Gather | None = None  # fills the step's tokens, ids and routing weights; None: all ranks hold the same ones

    @property
    def world_size(self) -> int:
        return self.words.addresses.numel()
