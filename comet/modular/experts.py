"""Experts beside the grouped GEMMs: the reference and warp decode."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comet.graphs import hold_if_captured
from comet.modular.base import (
    BatchedReduce,
    ContiguousReduce,
    DelegateReduce,
    ExpertsBase,
    KernelExperts,
    NoOpReduce,
    plain,
    weighted_sum,
)
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
from comet.quantize import Weight
from comet.reference import expert_outputs, rank_partial, swiglu_expert

if TYPE_CHECKING:
    from comet.decode import DecodeWeights


class ReferenceExperts(ExpertsBase):
    """``comet.reference`` over either format, in plain torch; waits for the device. EP, TP and EP x TP.

    Quantised weights are dequantised to the tokens' dtype in every call.

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

    def apply(self, rows: Rows, w1: Weight, w2: Weight, scratch: Scratch) -> Tensor:
        """Expert by expert; see ``Experts.apply``."""
        assert isinstance(rows, ContiguousRows | BatchedRows)
        tokens, reduced = rows.tokens, isinstance(self.reduce, NoOpReduce)
        assert isinstance(tokens, Tensor)
        weights = (plain(w1, tokens.dtype), plain(w2, tokens.dtype))
        if isinstance(rows, BatchedRows):
            outputs = self._batches(tokens, rows.counts, *weights)
            return weighted_sum(outputs.flatten(0, 1), rows.row_slots, rows.top_k_weights) if reduced else outputs
        if reduced:
            return rank_partial(tokens, rows.top_k_ids, rows.top_k_weights, *weights, first_expert=0)
        outputs = expert_outputs(tokens, rows.top_k_ids, *weights, first_expert=0)
        return outputs.view(*rows.top_k_ids.shape, tokens.shape[1])

    @staticmethod
    def _batches(tokens: Tensor, counts: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        outputs = torch.zeros_like(tokens)
        for expert, count in enumerate(counts.tolist()):
            outputs[expert, :count] = swiglu_expert(tokens[expert, :count], w1[expert], w2[expert])
        return outputs


class WarpDecodeExperts(KernelExperts):
    """``comet.decode`` over contiguous rows, 64 at a time; sums in the down kernel. EP, TP and EP x TP. For few tokens.

    Weights in FP8 and MXFP8 are converted as they are read, where they are, so they have to be contiguous. The first
    call with a pair of them waits for the device.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: ``None`` or a ``NoOpReduce``: nothing is left to reduce.
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    formats = frozenset({ActivationFormat.CONTIGUOUS})
    reductions: tuple[type[TopKReduce], ...] = (NoOpReduce,)

    _quantized: tuple[Weight, Weight, DecodeWeights] | None = None

    @functools.cached_property
    def slots(self) -> Tensor:
        """``(e,)``: rows carry local ids, so every expert is in the slot of its own number."""
        return torch.arange(self.layout.experts_local, dtype=torch.int32, device=self.device)

    def scratch_shapes(self, problem: Problem) -> ScratchShapes:
        """The output only: what lies between the two kernels is theirs."""
        return ScratchShapes(regions={}, output=(problem.num_rows, problem.hidden_size))

    def apply(self, rows: Rows, w1: Weight, w2: Weight, scratch: Scratch) -> Tensor:
        """Decode step by decode step; see ``Experts.apply``."""
        from comet.decode import MAX_DECODE_TOKENS, warp_decode  # needs triton

        assert isinstance(rows, ContiguousRows)
        assert isinstance(rows.tokens, Tensor)
        assert scratch.output is not None
        weights = self._decode_weights(w1, w2)
        for first in range(0, rows.tokens.shape[0], MAX_DECODE_TOKENS):
            step = slice(first, first + MAX_DECODE_TOKENS)
            part = (rows.tokens[step], rows.top_k_ids[step], rows.top_k_weights[step])
            scratch.output[step] = warp_decode(*part, weights, use_kernels=self.use_kernels)
        return scratch.output

    def _decode_weights(self, w1: Weight, w2: Weight) -> DecodeWeights:
        """The weights in their slots; quantised ones are kept, because looking at their scales waits for the device."""
        from comet.decode import DecodeWeights

        if isinstance(w1, Tensor) or isinstance(w2, Tensor):
            assert isinstance(w1, Tensor)
            assert isinstance(w2, Tensor)
            return DecodeWeights(w1=w1.contiguous(), w2=w2.contiguous(), slots=self.slots)
        if self._quantized is None or self._quantized[0] is not w1 or self._quantized[1] is not w2:
            held = DecodeWeights(
                w1=w1.elements, w2=w2.elements, slots=self.slots, w1_scales=w1.scales, w2_scales=w2.scales
            )
            self._quantized = (w1, w2, held)
        held = self._quantized[2]
        hold_if_captured(w1.elements, held.w1, *([] if held.w1_scales is None else [held.w1_scales]))
        hold_if_captured(w2.elements, held.w2, *([] if held.w2_scales is None else [held.w2_scales]))
        return held
