"""Experts beside the grouped GEMMs: the reference, warp decode, and rows that arrive in FP8."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from comet.config import MoEConfig
from comet.group import ExpertGroup
from comet.modular.base import ExpertsBase, KernelExperts
from comet.modular.grouped import GroupedContiguous
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedRows,
    ContiguousRows,
    Problem,
    Rows,
    Scratch,
    ScratchShapes,
    TopKReduce,
)
from comet.modular.reduce import BatchedReduce, ContiguousReduce, DelegateReduce, NoOpReduce, weighted_sum
from comet.quantize import FP8
from comet.reference import expert_outputs, rank_partial, swiglu_expert


class ReferenceExperts(ExpertsBase):
    """``comet.reference`` over either format, in plain torch; waits for the device. EP, TP and EP x TP.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: What is left to ``finalize``; ``None``: nothing.
    """

    formats = frozenset({ActivationFormat.CONTIGUOUS, ActivationFormat.BATCHED})
    reductions: tuple[type[TopKReduce], ...] = (NoOpReduce, ContiguousReduce, BatchedReduce, DelegateReduce)

    def scratch_shapes(self, problem: Problem) -> ScratchShapes:
        """None: it allocates as it goes."""
        return ScratchShapes(regions={}, output=None)

    def apply(self, rows: Rows, w1: Tensor, w2: Tensor, scratch: Scratch) -> Tensor:
        """Expert by expert; see ``Experts.apply``."""
        reduced = isinstance(self.reduce, NoOpReduce)
        if isinstance(rows, BatchedRows):
            outputs = self._batches(rows, w1, w2)
            return weighted_sum(outputs.flatten(0, 1), rows.row_slots, rows.top_k_weights) if reduced else outputs
        assert isinstance(rows, ContiguousRows)
        assert isinstance(rows.tokens, Tensor)
        if reduced:
            return rank_partial(rows.tokens, rows.top_k_ids, rows.top_k_weights, w1, w2, first_expert=0)
        outputs = expert_outputs(rows.tokens, rows.top_k_ids, w1, w2, first_expert=0)
        return outputs.view(*rows.top_k_ids.shape, rows.tokens.shape[1])

    @staticmethod
    def _batches(rows: BatchedRows, w1: Tensor, w2: Tensor) -> Tensor:
        outputs = torch.zeros_like(rows.tokens)
        for expert, count in enumerate(rows.counts.tolist()):
            outputs[expert, :count] = swiglu_expert(rows.tokens[expert, :count], w1[expert], w2[expert])
        return outputs


class WarpDecodeExperts(KernelExperts):
    """``comet.decode`` over contiguous rows, 64 at a time; sums in the down kernel. EP, TP and EP x TP. For few tokens.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: ``None`` or a ``NoOpReduce``: nothing is left to reduce.
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    formats = frozenset({ActivationFormat.CONTIGUOUS})
    reductions: tuple[type[TopKReduce], ...] = (NoOpReduce,)

    def __init__(
        self,
        config: MoEConfig,
        group: ExpertGroup,
        *,
        reduce: TopKReduce | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        super().__init__(config, group, reduce=reduce, use_kernels=use_kernels)
        # Rows carry local ids, so every expert is in the slot of its own number.
        self.slots = torch.arange(self.layout.experts_local, dtype=torch.int32, device=group.device)

    def scratch_shapes(self, problem: Problem) -> ScratchShapes:
        """The output only: what lies between the two kernels is theirs."""
        return ScratchShapes(regions={}, output=(problem.num_rows, problem.hidden_size))

    def apply(self, rows: Rows, w1: Tensor, w2: Tensor, scratch: Scratch) -> Tensor:
        """Decode step by decode step; see ``Experts.apply``."""
        from comet.decode import MAX_DECODE_TOKENS, DecodeWeights, warp_decode  # needs triton

        assert isinstance(rows, ContiguousRows)
        assert isinstance(rows.tokens, Tensor)
        assert scratch.output is not None
        weights = DecodeWeights(w1=w1.contiguous(), w2=w2.contiguous(), slots=self.slots)
        for first in range(0, rows.tokens.shape[0], MAX_DECODE_TOKENS):
            step = slice(first, first + MAX_DECODE_TOKENS)
            part = (rows.tokens[step], rows.top_k_ids[step], rows.top_k_weights[step])
            scratch.output[step] = warp_decode(*part, weights, use_kernels=self.use_kernels)
        return scratch.output


class DequantizingExperts(GroupedContiguous):
    """``GroupedContiguous`` that wants its rows in FP8, so that they travel in half the bytes, and dequantises them."""

    takes_fp8 = True

    def apply(self, rows: Rows, w1: Tensor, w2: Tensor, scratch: Scratch) -> Tensor:
        """Dequantise, then as ``GroupedContiguous``."""
        assert isinstance(rows, ContiguousRows)
        assert isinstance(rows.tokens, FP8)
        return super().apply(replace(rows, tokens=rows.tokens.dequantize(w1.dtype)), w1, w2, scratch)
