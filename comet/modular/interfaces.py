"""The three interfaces of a modular MoE layer, what travels between them, and the reductions.

    routed tokens -> PrepareFinalize.prepare -> received rows -> Experts.apply -> outputs
                  -> PrepareFinalize.finalize, which applies the TopKReduce the experts ask for -> tokens

Letters: T tokens of this rank, K experts per token, D, e experts of this rank, F this rank's slice of their width, W
ranks; N received rows of this rank, B rows reserved per expert in the batched format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from comet.comm.base import Communicator
from comet.config import MoEConfig
from comet.layer.backend import Backend
from comet.layer.group import ExpertGroup
from comet.layer.plan import Plan
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.quantization.formats import WEIGHT_TYPES, Weight
from comet.reference.layer import weighted_sum


class ActivationFormat(Enum):
    """How ``prepare`` hands rows to the experts: as ``ContiguousRows``, ``BatchedRows`` or a ``FusedHandle``."""

    CONTIGUOUS = "contiguous"
    BATCHED = "batched"
    HANDLE = "handle"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContiguousRows:
    """Received rows one after the other, each with the slots that this rank computes."""

    tokens: Tensor  # (N, D); a row all of whose slots are -1 may hold anything, NaN included
    top_k_ids: Tensor  # (N, K) int32 **local** experts, 0 .. e-1; -1 where the slot is masked or computed elsewhere
    top_k_weights: Tensor

    @property
    def row_slots(self) -> Tensor:
        """``(N, K)`` int32: slot k of row n is the output n * K + k; -1 where nowhere.

        Example: ids ``[[0, 2], [-1, 1]]`` give ``[[0, 1], [-1, 3]]``.
        """
        ids = self.top_k_ids
        numbers = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
        return numbers.masked_fill(ids < 0, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchedRows:
    """Received rows copied to each of their local experts."""

    tokens: Tensor  # (e, B, D); row j of expert i is valid below counts[i] and may hold anything past it
    counts: Tensor  # (e,) int32
    row_slots: Tensor  # (N, K) int32: where slot k of received row n is, as expert * B + row; -1 where nowhere
    top_k_weights: Tensor  # (N, K) float32; anything where row_slots is -1

    @property
    def batch_rows(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedHandle:
    """A promise of rows: the fused layer moves them while it computes."""

    tokens: Tensor  # (T, D) this rank's tokens, not sent yet
    plan: Plan
    backend: Backend


Rows = ContiguousRows | BatchedRows | FusedHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """The result of ``prepare``."""

    rows: Rows
    route: Any  # for finalize of the same object: how the rows came, in a type of its own


Receiver = Callable[[], Received]


class TopKReduce:
    """Turns the experts' outputs into one row per received row: the weighted sum over its slots."""

    formats: frozenset[ActivationFormat]  # formats of rows it can reduce

    def apply(self, outputs: Tensor, rows: Rows) -> Tensor:
        """Outputs in the layout the class names, to ``(N, D)`` in their dtype, zero where a row has no slot here."""
        assert not isinstance(rows, FusedHandle), "the composer pairs the fused layer with itself"
        return weighted_sum(outputs.flatten(0, 1), rows.row_slots, rows.top_k_weights)


class NoOpReduce(TopKReduce):
    """The experts have weighted and summed: outputs are ``(N, D)``."""

    formats = frozenset(ActivationFormat)

    def apply(self, outputs: Tensor, rows: Rows) -> Tensor:
        """The outputs themselves."""
        return outputs


class ContiguousReduce(TopKReduce):
    """Outputs are ``(N, K, D)``, one per slot of a received row."""

    formats = frozenset({ActivationFormat.CONTIGUOUS})


class BatchedReduce(TopKReduce):
    """Outputs are ``(e, B, D)``, one per batched row."""

    formats = frozenset({ActivationFormat.BATCHED})


class DelegateReduce(TopKReduce):
    """Outputs are as for ``ContiguousReduce`` or ``BatchedReduce``; ``finalize`` may reduce them in its own way."""

    formats = frozenset({ActivationFormat.CONTIGUOUS, ActivationFormat.BATCHED})


class PrepareFinalize(ABC):
    """Brings tokens to the ranks of their experts, and outputs back."""

    layout: ExpertLayout  # the experts over the ranks; the same object's rank is this rank
    activation_format: ActivationFormat  # format of the rows it hands out
    uses_collectives = False  # whether rows travel by collectives of torch.distributed
    comm: Communicator  # the communicator of the group

    def prepare(self, routed: RoutedTokens) -> Received:
        """Send the tokens, and wait for those of all ranks (collective)."""
        return self.prepare_no_receive(routed)()

    @abstractmethod
    def prepare_no_receive(self, routed: RoutedTokens) -> Receiver:
        """Send the tokens as ``prepare`` does; the receiver, to be called once, waits for those of all ranks.

        A class that sends messages of its own looks at the tokens first, and sends inside of ``comm.in_flight``.
        """

    @abstractmethod
    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """Reduce the outputs, send them home and add up those of all ranks: ``(T, D)`` (collective)."""


class Experts(ABC):
    """Runs received rows through the local experts.

    Args:
        reduce: What is left to ``finalize``, one of ``reductions``; ``None``: the first of them.
    """

    formats: frozenset[ActivationFormat]  # formats of rows it takes
    reductions: tuple[type[TopKReduce], ...]  # kinds of reduction it can leave to finalize, the default first
    reduce: TopKReduce  # the one it leaves
    weight_types: frozenset[type[Weight]] = frozenset(WEIGHT_TYPES)  # what weights it computes with
    takes_interleaved = False  # whether it computes what ``interleaved`` says
    interleaved = False  # whether rows of w1, its scales and b1 are gate and up in turn, as gpt-oss has them

    def __init__(self, config: MoEConfig, group: ExpertGroup, *, reduce: TopKReduce | None = None) -> None:
        self.layout = group.layout(config)
        self.activation = config.activation
        self.biased = config.expert_bias
        self.reduce = reduce or self.reductions[0]()

    @abstractmethod
    def apply(self, rows: Rows, w1: Weight, w2: Weight, output: Tensor, biases: Biases | None = None) -> Tensor:
        """Compute the outputs that ``reduce`` expects.

        Args:
            w1: ``(e, 2F, D)`` gate rows, then up rows, or ``interleaved``; of one of ``weight_types``.
            output: Memory for what is returned, in its shape and dtype (``output_shape``), for experts that want it.
            biases: ``(e, 2F)`` and ``(e, D)`` to add on this rank, dtype of the outputs; ``None``: there are none.

        Returns:
            Unweighted outputs of every slot, ``(N, K, D)`` or batched ``(e, B, D)``, undefined where nothing was to
            compute; or, when the reduction is a no-op, finished ``(N, D)``.
        """
