"""What the decode kernels are launched on: the tensors of a step, and where the ranks meet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..experts.tables import HostExperts
from ..runtime.activation import SWIGLU, Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tensors of one decode step.

    Args:
        tokens: ``(T, D)``.
        ids: ``(T, K)`` int32 or int64.
        routing_weights: ``(T, K)`` float32.
        slots: ``(E,)`` int32.
        w1: ``(S, 2F, D)``; float8_e4m3fn with scales, otherwise the tokens' dtype. MXFP4: ``(S, 2F, D / 8)`` int32,
            eight e2m1 codes each, the first in the lowest bits; starting at a multiple of 16 bytes.
        w2: ``(S, D, F)`` or ``(S, D, F / 8)``, dtype of ``w1``.
        hidden: ``(J, F)`` at least T*K rows.
        partials: ``(J, D)`` float32, likewise.
        tickets: ``(D,)`` int32 zeros.
        out: ``(T, D)`` result; of gathered tokens only this rank's own.
        w1_scales: ``None``, MX ``(S, 2F, D / 32)`` uint8, or block ``(S, ceil(2F / 128), ceil(D / 128))`` float32.
        w2_scales: ``None``, MX ``(S, D, F / 32)`` uint8, or block ``(S, ceil(D / 128), ceil(F / 128))`` float32.
        shared_scale: Neighbours along the contraction that share a scale: 32 (MX types), 128 (block FP8), 0 without.
        activation: Of all experts.
        b1: ``None``, or biases ``(S, 2F)``, gate, then up, of a floating type.
        b2: ``None``, or biases ``(S, D)`` of a floating type.
        host: Where experts come from that have no slot; ``None``: they contribute nothing.
        waves: ``(N, R)`` of ``expert_waves.split_waves``; ``None``: there are slots for all experts of the step.
        all_ids: With waves, ids of the experts of all of them, others masked; ``ids`` where the host computes none.
    """

    tokens: Tensor
    ids: Tensor
    routing_weights: Tensor
    slots: Tensor
    w1: Tensor
    w2: Tensor
    hidden: Tensor
    partials: Tensor
    tickets: Tensor
    out: Tensor
    w1_scales: Tensor | None = None
    w2_scales: Tensor | None = None
    shared_scale: int = 0
    activation: Activation = SWIGLU
    b1: Tensor | None = None
    b2: Tensor | None = None
    host: HostExperts | None = None
    waves: Tensor | None = None
    all_ids: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, D and F."""
        return self.w2.shape[0], self.w2.shape[1], self.hidden.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """One rank's tokens, and where those of all ranks meet (see ``decode.gather``).

    Args:
        tokens: ``(T_r, D)``, at most ``max_tokens``.
        ids: ``(T_r, K)`` int32 or int64.
        routing_weights: ``(T_r, K)`` float32.
        addresses: ``(W,)`` int64 address of every rank's ``(2, W, max_tokens, stride)`` int64 words.
        stride: Words of one token, at least D + 2 K.
    """

    tokens: Tensor
    ids: Tensor
    routing_weights: Tensor
    addresses: Tensor
    stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Landing:
    """Where the ranks' sums meet, as one rank sees it (see ``decode.words``).

    Args:
        addresses: ``(W,)`` int64 address of every rank's ``(2, W, max_tokens, D)`` int64 words.
        epoch: ``(1,)`` int32, one more with every step.
        fault: ``(8,)`` int64 record of a spin that met its deadline.
        rank: This rank.
        max_tokens: Tokens the words are laid out for; of each rank, where they are gathered.
        timeout_ns: Deadline of every spin.
        gather: Fills the step's tokens, ids and routing weights; ``None``: all ranks hold the same ones.
    """

    addresses: Tensor
    epoch: Tensor
    fault: Tensor
    rank: int
    max_tokens: int
    timeout_ns: int
    gather: Gather | None = None
