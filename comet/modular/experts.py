"""Experts: warp decode, the fused layer's, and two grouped GEMMs with an activation between.

Pre-activations of the grouped GEMMs stay in float32 (float64 for float64), so that rounding is that of
``comet.reference.layer``. They do not wait for a GPU. Running them needs triton, also on a CPU, where the kernel's
torch twin runs.

Weights in FP8 or MXFP8 are dequantised to the tokens' dtype in every call, all that the rank holds: that reads e * 3FD
bytes, writes and reads again twice as many (in 16 bits), and takes as much memory, however few the rows are.
Many rows hide it behind the GEMMs; few are for ``WarpDecodeExperts``, which converts what it reads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from comet.comm.collectives import accumulator_dtype
from comet.config import MoEConfig, check_kernels, require, resolve_kernels
from comet.layer.group import ExpertGroup
from comet.layout import Biases, added_biases, positions_in_groups, round_up
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedReduce,
    BatchedRows,
    ContiguousReduce,
    ContiguousRows,
    DelegateReduce,
    Experts,
    FusedHandle,
    NoOpReduce,
    Rows,
    TopKReduce,
)
from comet.quantization.formats import Weight
from comet.reference.layer import weighted_sum
from comet.utils.graphs import hold_if_captured

if TYPE_CHECKING:
    from comet.decode import DecodeWeights
    from comet.kernels.runtime.arguments import TileTable


class KernelExperts(Experts):
    """Experts whose work Triton kernels can do.

    Args:
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: ExpertGroup,
        *,
        reduce: TopKReduce | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        super().__init__(config, group, reduce=reduce)
        self.device = group.device
        self.use_kernels = resolve_kernels(group.device, use_kernels)
        if self.use_kernels:
            check_kernels(group.workspace.shape.dtype, group.device)


def plain(values: Weight, dtype: torch.dtype) -> Tensor:
    """A tensor as it is, anything quantised in ``dtype``."""
    return values if isinstance(values, Tensor) else values.dequantize(dtype)


def tiles_of_ids(top_k_ids: Tensor, num_experts: int, block_rows: int) -> tuple[TileTable, Tensor]:
    """Lay the slots out by expert, each expert's from a multiple of ``block_rows`` on.

    Example: ids ``[[1, 0], [1, -1]]``, 2 experts, tiles of 16: row_ids is 0 at routed row 0, and 0, 1 at routed rows 16
    and 17; row_slots ``[[16, 0], [17, -1]]``; two tiles, ``[0, 0, 1, 0]`` and ``[1, 16, 2, 0]``.

    Args:
        top_k_ids: ``(N, K)`` local experts or -1.

    Returns:
        Tiles with ``row_ids (Q,)``, 0 in the padding; and ``(N, K)`` int32 routed row of each slot, -1 for none.
    """
    ids, device = top_k_ids.flatten().long(), top_k_ids.device
    # Always enough, with each expert's rows padded to whole tiles.
    capacity = round_up(len(ids) + min(len(ids), num_experts) * (block_rows - 1), block_rows)
    bins = ids.where(ids >= 0, num_experts)
    rank_in_bin, counts = positions_in_groups(bins, num_experts + 1)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    starts[1:] = ((counts[:-1] + block_rows - 1) // block_rows).cumsum(0) * block_rows
    row_slots = (starts[bins] + rank_in_bin).where(ids >= 0, -1)
    # Entries without a place go to one row behind the last, which is cut off.
    row_ids = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
    rows = torch.arange(bins.numel(), dtype=torch.int32, device=device) // top_k_ids.shape[1]
    row_ids[row_slots.where(ids >= 0, capacity)] = rows
    table = _tiles(starts[:-1], counts[:-1], capacity // block_rows, block_rows, row_ids[:-1])
    return table, row_slots.int().view(top_k_ids.shape)


def tiles_of_batches(counts: Tensor, batch_rows: int, block_rows: int) -> TileTable:
    """The tiles of batches of ``batch_rows`` rows that hold something, by expert.

    Example: counts ``[1, 0, 20]``, batches of 32, tiles of 16: three tiles, ``[0, 0, 1, 0]``, ``[2, 64, 16, 0]`` and
    ``[2, 80, 4, 0]``.
    """
    starts = torch.arange(counts.numel(), device=counts.device) * batch_rows
    most_tiles = counts.numel() * -(-batch_rows // block_rows)
    return _tiles(starts, counts.long(), most_tiles, block_rows, counts.new_empty(0))


def _tiles(starts: Tensor, counts: Tensor, most_tiles: int, block_rows: int, row_ids: Tensor) -> TileTable:
    """The tiles of each expert's ``counts (e,)`` rows from ``starts (e,)`` on; no ``row_ids``: rows lie in place."""
    from comet.kernels.runtime.arguments import TileTable  # needs triton

    per_expert = (counts + block_rows - 1) // block_rows
    tiles_until = per_expert.cumsum(0)
    tile = torch.arange(most_tiles, device=counts.device)
    experts = torch.searchsorted(tiles_until, tile, right=True).clamp(max=counts.numel() - 1)
    first = (tile - (tiles_until - per_expert)[experts]) * block_rows
    valid = (counts[experts] - first).clamp(0, block_rows)
    return TileTable(
        tiles=torch.stack([experts, starts[experts] + first, valid, torch.zeros_like(experts)], dim=1).int(),
        num_tiles=tiles_until[-1:].int(),
        row_ids=row_ids,
        counters=row_ids.new_empty(0),  # only the fused kernels count
        block_rows=block_rows,
    )


BLOCK_ROWS = 64


class GroupedContiguous(KernelExperts):
    """Sorts the slots of contiguous rows by expert into GEMM tiles, on the device; quantised weights are made plain.

    EP, TP and EP x TP; any dtype.
    """

    formats = frozenset({ActivationFormat.CONTIGUOUS})
    reductions: tuple[type[TopKReduce], ...] = (ContiguousReduce, DelegateReduce, NoOpReduce)
    takes_interleaved = True

    def apply(self, rows: Rows, w1: Weight, w2: Weight, output: Tensor, biases: Biases | None = None) -> Tensor:
        """Lay the rows out in tiles, multiply, and hand the outputs out as ``reduce`` wants them."""
        assert not isinstance(rows, FusedHandle), "the composer pairs the fused layer with itself"
        w1, w2 = (plain(each, output.dtype).contiguous() for each in (w1, w2))
        tokens, is_reduced = rows.tokens.contiguous().flatten(0, -2), isinstance(self.reduce, NoOpReduce)
        table, row_slots = self._lay_out(rows, w1.shape[0])
        in_place = isinstance(rows, BatchedRows) and not is_reduced
        num_rows = table.row_ids.numel() or tokens.shape[0]
        outputs = output.flatten(0, 1) if in_place else output.new_empty(num_rows, output.shape[-1])
        added = [] if biases is None else [bias[self._row_experts(rows, table)] for bias in biases]
        self._multiply(tokens, w1, w2, table, outputs, *added)
        if is_reduced:
            return output.copy_(weighted_sum(outputs, row_slots, rows.top_k_weights))
        if not in_place:
            torch.index_select(outputs, 0, row_slots.clamp(min=0).flatten(), out=output.view(-1, outputs.shape[1]))
        return output

    def _lay_out(self, rows: Any, num_experts: int) -> tuple[TileTable, Tensor]:
        """Tiles of Q rows, and ``(N, K)`` int32 the one of each slot, -1 for none."""
        return tiles_of_ids(rows.top_k_ids, num_experts, BLOCK_ROWS)

    def _row_experts(self, rows: Any, table: TileTable) -> Tensor:
        """``(Q,)`` the expert of each row."""
        return table.tiles[:, 0].repeat_interleave(BLOCK_ROWS)

    def _multiply(
        self, tokens: Tensor, w1: Tensor, w2: Tensor, table: TileTable, outputs: Tensor, *added: Tensor
    ) -> None:
        """``outputs[q] = w2[expert] activation(gate, up)`` for the rows of the tiles; rows of no tile are undefined.

        Tokens are ``(N, D)`` that ``table.row_ids`` gathers, or ``(Q, D)`` in place; ``added`` are biases of each row,
        ``(Q, 2F)`` and ``(Q, D)``.
        """
        from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm, group_gemm_torch  # needs triton

        if self.use_kernels:  # not every transport asks for the pool's dtype
            check_kernels(tokens.dtype, tokens.device)
        gemm, config = group_gemm if self.use_kernels else group_gemm_torch, GemmConfig.select(tokens.dtype)
        gate_up = tokens.new_empty(outputs.shape[0], w1.shape[1], dtype=accumulator_dtype(tokens.dtype))
        gemm(tokens, w1, gate_up, table, gather=table.row_ids.numel() > 0, layout="nk", config=config)
        if added:
            gate_up += added[0]
        halves = (gate_up[:, ::2], gate_up[:, 1::2]) if self.interleaved else gate_up.chunk(2, dim=1)
        hidden = self.activation.forward(*halves).to(tokens.dtype)
        gemm(hidden, w2, outputs, table, gather=False, layout="nk", config=config)
        if added:
            outputs += added[1]


class GroupedBatched(GroupedContiguous):
    """Multiplies each expert's batch where it lies. EP, TP and EP x TP; any dtype."""

    formats = frozenset({ActivationFormat.BATCHED})
    reductions: tuple[type[TopKReduce], ...] = (BatchedReduce, DelegateReduce, NoOpReduce)

    def _lay_out(self, rows: Any, num_experts: int) -> tuple[TileTable, Tensor]:
        return tiles_of_batches(rows.counts, rows.batch_rows, BLOCK_ROWS), rows.row_slots

    def _row_experts(self, rows: Any, table: TileTable) -> Tensor:
        return torch.arange(rows.counts.numel(), device=rows.counts.device).repeat_interleave(rows.batch_rows)


class WarpDecodeExperts(KernelExperts):
    """``comet.decode`` over contiguous rows, 64 at a time; sums in the down kernel. EP, TP and EP x TP. For few tokens.

    Weights in FP8 and MXFP8 are converted as they are read, where they are, so they have to be contiguous. The first
    call with a pair of them waits for the device.
    """

    formats = frozenset({ActivationFormat.CONTIGUOUS})
    reductions: tuple[type[TopKReduce], ...] = (NoOpReduce,)
    takes_interleaved = True

    _quantized: tuple[Weight, Weight, DecodeWeights] | None = None

    @functools.cached_property
    def slots(self) -> Tensor:
        """``(e,)``: rows carry local ids, so every expert is in the slot of its own number."""
        return torch.arange(self.layout.experts_local, dtype=torch.int32, device=self.device)

    def apply(self, rows: Rows, w1: Weight, w2: Weight, output: Tensor, biases: Biases | None = None) -> Tensor:
        """Decode step by decode step."""
        from comet.decode import MAX_DECODE_TOKENS, warp_decode  # needs triton

        assert isinstance(rows, ContiguousRows)
        weights = self._decode_weights(w1, w2, biases)
        for first in range(0, rows.tokens.shape[0], MAX_DECODE_TOKENS):
            step = slice(first, first + MAX_DECODE_TOKENS)
            part = (rows.tokens[step], rows.top_k_ids[step], rows.top_k_weights[step])
            output[step] = warp_decode(*part, weights, use_kernels=self.use_kernels)
        return output

    def _decode_weights(self, w1: Weight, w2: Weight, biases: Biases | None) -> DecodeWeights:
        """The weights in their slots; quantised ones are kept, because looking at their scales waits for the device."""
        from comet.decode import DecodeWeights

        of_layer: dict[str, Any] = dict(slots=self.slots, activation=self.activation, interleaved=self.interleaved)
        if isinstance(w1, Tensor) or isinstance(w2, Tensor):
            assert isinstance(w1, Tensor)
            assert isinstance(w2, Tensor)
            if biases is not None:
                of_layer |= dict(b1=biases.b1.contiguous(), b2=biases.b2.contiguous())
            return DecodeWeights(w1=w1.contiguous(), w2=w2.contiguous(), **of_layer)
        if biases is not None:
            raise NotImplementedError(f"expert_bias=True must be False for {type(w1).__name__} weights of warp decode")
        if self._quantized is None or self._quantized[0] is not w1 or self._quantized[1] is not w2:
            held = DecodeWeights(w1=w1.elements, w2=w2.elements, w1_scales=w1.scales, w2_scales=w2.scales, **of_layer)
            self._quantized = (w1, w2, held)
        held = self._quantized[2]
        hold_if_captured(w1.elements, held.w1, *([] if held.w1_scales is None else [held.w1_scales]))
        hold_if_captured(w2.elements, held.w2, *([] if held.w2_scales is None else [held.w2_scales]))
        return held


class FusedExperts(Experts):
    """Layer 0 and layer 1 of the handle's plan. Goes only with ``FusedPrepareFinalize``."""

    formats = frozenset({ActivationFormat.HANDLE})
    reductions: tuple[type[TopKReduce], ...] = (NoOpReduce,)
    weight_types: frozenset[type[Weight]] = frozenset({Tensor})

    def apply(self, rows: Rows, w1: Weight, w2: Weight, output: Tensor, biases: Biases | None = None) -> Tensor:
        """Run both fused pipelines: ``(T, D)``, finished (collective)."""
        assert isinstance(rows, FusedHandle)
        assert isinstance(w1, Tensor)
        assert isinstance(w2, Tensor)
        backend, plan = rows.backend, rows.plan
        mine, theirs = self.activation, backend.settings.activation
        require(mine == theirs, f"activation={mine} of FusedExperts must be that of FusedPrepareFinalize, {theirs}")
        b1, b2 = (None if bias is None else bias.contiguous() for bias in added_biases(biases, backend.layout))
        hidden, _ = backend.dispatch_gemm(rows.tokens, w1.contiguous(), plan, b1, save_pre_activation=False)
        return backend.gemm_combine(hidden, w2.contiguous(), plan, b2)
