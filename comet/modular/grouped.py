"""Experts by two grouped GEMMs with SwiGLU between them, over contiguous or batched rows.

Pre-activations stay in float32 (float64 for float64), so that rounding is that of ``comet.reference``. Nothing waits
for a GPU. Running them needs triton, also on a CPU, where the kernel's torch twin runs.

Weights in FP8 or MXFP8 are dequantised to the tokens' dtype in every call, all that the rank holds: that reads e * 3FD
bytes, writes and reads again twice as many (in 16 bits), and takes as much scratch memory, however few the rows are.
Many rows hide it behind the GEMMs; few are for ``WarpDecodeExperts``, which converts what it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu

from comet.collectives import accumulator_dtype
from comet.config import check_kernel_dtype
from comet.modular.base import KernelExperts, Regions, plain, weight_regions
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedRows,
    ContiguousRows,
    FusedHandle,
    Problem,
    Rows,
    Scratch,
    ScratchShapes,
    TopKReduce,
)
from comet.modular.reduce import BatchedReduce, ContiguousReduce, DelegateReduce, NoOpReduce, weighted_sum
from comet.modular.tiles import routed_capacity, tiles_of_batches, tiles_of_ids
from comet.quantize import FP8, Weight

if TYPE_CHECKING:
    from comet.kernels.arguments import TileTable

BLOCK_ROWS = 64


class _Grouped(KernelExperts, ABC):
    """What both formats share: everything quantised is made plain before it is multiplied."""

    def scratch_shapes(self, problem: Problem) -> ScratchShapes:
        """Hidden and output rows as the format needs them, and whatever has to be dequantised."""
        shapes = self._shapes(problem)
        regions = {**weight_regions(problem), **shapes.regions}
        if self.takes_fp8:
            batched = problem.num_experts * problem.batch_rows
            regions["tokens"] = ((batched or problem.num_rows, problem.hidden_size), problem.dtype)
        return ScratchShapes(regions=regions, output=shapes.output)

    def apply(self, rows: Rows, w1: Weight, w2: Weight, scratch: Scratch) -> Tensor:
        """Dequantise where there is something to, then multiply; see ``Experts.apply``."""
        regions, dtype = scratch.regions, scratch.regions["hidden"].dtype
        assert not isinstance(rows, FusedHandle), "the composer pairs the fused layer with itself"
        tokens = rows.tokens
        assert isinstance(tokens, FP8) == self.takes_fp8
        if isinstance(tokens, FP8):
            tokens = tokens.dequantize(dtype, out=regions["tokens"].view(tokens.elements.shape))
        weights = (plain(w1, dtype, regions.get("w1")).contiguous(), plain(w2, dtype, regions.get("w2")).contiguous())
        return self._multiply(rows, tokens, *weights, scratch)

    @abstractmethod
    def _shapes(self, problem: Problem) -> ScratchShapes:
        """Memory for the rows in the format of the class."""

    @abstractmethod
    def _multiply(self, rows: Rows, tokens: Tensor, w1: Tensor, w2: Tensor, scratch: Scratch) -> Tensor:
        """Both GEMMs over ``tokens``, those of ``rows`` in the dtype of the weights."""


class GroupedContiguous(_Grouped):
    """Sorts the slots of contiguous rows by expert into GEMM tiles, on the device. EP, TP and EP x TP; any dtype.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: What is left to ``finalize``; ``None``: ``ContiguousReduce``.
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    formats = frozenset({ActivationFormat.CONTIGUOUS})
    reductions: tuple[type[TopKReduce], ...] = (ContiguousReduce, DelegateReduce, NoOpReduce)

    def _shapes(self, problem: Problem) -> ScratchShapes:
        """Pre-activations, hidden rows and output rows of every routed row, padded per expert to whole tiles."""
        reduced = isinstance(self.reduce, NoOpReduce)
        per_row = (problem.num_rows,) if reduced else (problem.num_rows, problem.top_k)
        routed = routed_capacity(problem, BLOCK_ROWS)
        regions = {**_hidden_regions(problem, routed), "outputs": ((routed, problem.hidden_size), problem.dtype)}
        return ScratchShapes(regions=regions, output=(*per_row, problem.hidden_size))

    def _multiply(self, rows: Rows, tokens: Tensor, w1: Tensor, w2: Tensor, scratch: Scratch) -> Tensor:
        """Sort, multiply, and gather back to slots."""
        assert isinstance(rows, ContiguousRows)
        assert scratch.output is not None
        outputs = scratch.regions["outputs"]
        table, row_slots = tiles_of_ids(rows.top_k_ids, w1.shape[0], outputs.shape[0], BLOCK_ROWS)
        swiglu_experts(tokens, w1, w2, table, scratch, outputs, gather=True, use_kernels=self.use_kernels)
        if isinstance(self.reduce, NoOpReduce):
            return scratch.output.copy_(weighted_sum(outputs, row_slots, rows.top_k_weights))
        torch.index_select(outputs, 0, row_slots.clamp(min=0).flatten(), out=scratch.output.view(-1, outputs.shape[1]))
        return scratch.output


class GroupedBatched(_Grouped):
    """Multiplies each expert's batch where it lies. EP, TP and EP x TP; any dtype.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: What is left to ``finalize``; ``None``: ``BatchedReduce``.
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    formats = frozenset({ActivationFormat.BATCHED})
    reductions: tuple[type[TopKReduce], ...] = (BatchedReduce, DelegateReduce, NoOpReduce)

    def _shapes(self, problem: Problem) -> ScratchShapes:
        """Pre-activations and hidden rows of every batched row; the output rows too, where they are reduced here."""
        batched = problem.num_experts * problem.batch_rows
        regions = _hidden_regions(problem, batched)
        if not isinstance(self.reduce, NoOpReduce):
            return ScratchShapes(regions=regions, output=(problem.num_experts, problem.batch_rows, problem.hidden_size))
        outputs = ((batched, problem.hidden_size), problem.dtype)
        return ScratchShapes(regions={**regions, "outputs": outputs}, output=(problem.num_rows, problem.hidden_size))

    def _multiply(self, rows: Rows, tokens: Tensor, w1: Tensor, w2: Tensor, scratch: Scratch) -> Tensor:
        """Multiply in place of the batches."""
        assert isinstance(rows, BatchedRows)
        assert scratch.output is not None
        reduced = isinstance(self.reduce, NoOpReduce)
        outputs = scratch.regions["outputs"] if reduced else scratch.output.flatten(0, 1)
        table = tiles_of_batches(rows.counts, rows.batch_rows, BLOCK_ROWS)
        flat = tokens.flatten(0, 1)
        swiglu_experts(flat, w1, w2, table, scratch, outputs, gather=False, use_kernels=self.use_kernels)
        if reduced:
            scratch.output.copy_(weighted_sum(outputs, rows.row_slots, rows.top_k_weights))
        return scratch.output


class DequantizingContiguous(GroupedContiguous):
    """``GroupedContiguous`` that wants its rows in FP8, so that they travel in half the bytes, and dequantises them."""

    takes_fp8 = True


class DequantizingBatched(GroupedBatched):
    """``GroupedBatched`` that wants its rows in FP8, so that they travel in half the bytes, and dequantises them."""

    takes_fp8 = True


def swiglu_experts(
    tokens: Tensor,
    w1: Tensor,
    w2: Tensor,
    table: TileTable,
    scratch: Scratch,
    outputs: Tensor,
    *,
    gather: bool,
    use_kernels: bool,
) -> None:
    """``outputs[q] = w2[expert] (silu(gate) * up)`` for the rows of the tiles, gathered by ``row_ids`` or in place.

    Args:
        tokens: ``(N, D)`` or ``(Q, D)``.
        w1: ``(e, 2F, D)``.
        w2: ``(e, D, F)``.
        table: Tiles.
        scratch: Holds ``gate_up (Q, 2F)`` and ``hidden (Q, F)``.
        outputs: ``(Q, D)`` result; rows of no tile are undefined.
        gather: Whether row q reads ``tokens[table.row_ids[q]]``.
        use_kernels: Triton kernel or its torch twin.
    """
    from comet.kernels.group_gemm import GemmConfig, group_gemm, group_gemm_torch  # needs triton

    if use_kernels:  # not every transport asks for the pool's dtype
        check_kernel_dtype(tokens.dtype, tokens.device)
    gemm = group_gemm if use_kernels else group_gemm_torch
    config = GemmConfig.select(tokens.dtype)
    gate_up, hidden = scratch.regions["gate_up"], scratch.regions["hidden"]
    gemm(tokens, w1, gate_up, table, gather=gather, layout="nk", config=config)
    gate, up = gate_up.chunk(2, dim=1)
    hidden.copy_(silu(gate) * up)
    gemm(hidden, w2, outputs, table, gather=False, layout="nk", config=config)


def _hidden_regions(problem: Problem, num_rows: int) -> Regions:
    return {
        "gate_up": ((num_rows, 2 * problem.ffn_size), accumulator_dtype(problem.dtype)),
        "hidden": ((num_rows, problem.ffn_size), problem.dtype),
    }
