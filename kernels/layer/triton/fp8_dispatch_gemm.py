"""Layer 0 in block FP8: as ``dispatch_gemm``, on packed rows, with hidden quantised in the epilogue.

Each of D / 128 steps multiplies the tile's rows with 128 columns of gate and 128 of up, apart: tensor cores keep some
14 bits of a sum of e4m3 products, so no sum of theirs is longer than a step, and only one product has to be held beside
the accumulators. One is scaled while the next is computed. A tile's 128 columns of hidden share a scale per row.

Blocks draw tickets for all work items: a tile takes long enough to hide what a ticket costs, and one loop in the place
of two needs fewer registers, of which a tile takes all.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...gemm.activation import hidden_of
from ...gemm.fp8 import GROUP, SCALE_GROUP, group_scales, scaled_elements
from ...gemm.tiles import GROUP_TILES, decode_tokens
from ...runtime.activation import Activation
from ...runtime.arguments import Scaled, SymmBuffer, TileTable, num_sms
from ...runtime.recorder import KIND_CONVERT, KIND_LAYER0_TILE, now, record
from ..settings import LaunchSettings
from .dispatch import COMM_BLOCKS, NUM_WARPS, DispatchLists, push_constants, push_rows
from .dispatch_gemm import DispatchGemmConstants, Sizes, zero_after_rows

PUSH_WORDS = 512  # of a packed row that a block moves at once, at most


class Fp8Tensors(NamedTuple):
    """What the kernel reads and writes beside elements."""

    w1_scales: Tensor  # (e, 2F / 128, D / 128) float32
    biases: Tensor | None  # (e, 2F)
    hidden_scales: Tensor  # (F / 128, Q) float32


@triton.jit
def fp8_hidden_tile(
    item, w1_desc, hidden_desc, scaled, symm, table, num_tiles, timeout_ns, rank, sizes, GEMM: tl.constexpr
):  # fmt: skip
    """Compute one work item: wait, multiply, activate, quantise, store."""
    BLOCK_M: tl.constexpr = GEMM.block_m
    ACTIVATION: tl.constexpr = GEMM.activation
    EVENTS: tl.constexpr = GEMM.push.events
    INTERPRET: tl.constexpr = GEMM.push.interpret
    D, F = sizes.D, sizes.F
    num_cols = F // GROUP
    num_blocks = D // GROUP
    in_tile = tl.arange(0, BLOCK_M)
    tile, col = decode_tokens(item, num_tiles, num_cols, GROUP_TILES)
    expert = tl.load(table.tiles + tile * 4)
    first_row = tl.multiple_of(tl.load(table.tiles + tile * 4 + 1), BLOCK_M)
    valid = in_tile < tl.load(table.tiles + tile * 4 + 2)
    row_ids = tl.load(table.row_ids + first_row + tl.where(valid, in_tile, 0))
    zero = 0
    epoch = tl.load(symm.epoch)  # of every tile anew: a register that is live through the GEMM's loop is one too many
    phase = tl.load(table.tiles + tile * 4 + 3)
    begin = now(EVENTS, INTERPRET)
    ready = begin
    if phase > 0:
        zero = zero_after_rows(row_ids, symm, epoch, timeout_ns, rank, sizes.M, GEMM.push.chunk, INTERPRET)
        ready = now(EVENTS, INTERPRET)
    words = row_ids.to(tl.int64) * sizes.row_words + zero
    elements_ptr = symm.rows.to(tl.pointer_type(tl.float8e4nv))
    a_ptrs = elements_ptr + tl.multiple_of(words * 4, 16)[:, None] + tl.arange(0, GROUP)[None, :]
    a_scales = symm.rows.to(tl.pointer_type(tl.float32)) + D // 4 + words
    gate_scales = scaled.w1_scales + (expert * 2 * num_cols + col) * num_blocks
    up_scales = gate_scales + num_cols * num_blocks
    gate = tl.zeros((BLOCK_M, GROUP), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, GROUP), dtype=tl.float32)
    # Scales are fetched a step ahead, so that a product is scaled while the next one is computed.
    row_scales, gate_scale, up_scale = tl.load(a_scales), tl.load(gate_scales), tl.load(up_scales)
    for block in range(0, num_blocks):
        k = block * GROUP
        a = tl.load(a_ptrs + k)
        gate_b = w1_desc.load([expert, 0, col * GROUP, k]).reshape(GROUP, GROUP)
        up_b = w1_desc.load([expert, 1, col * GROUP, k]).reshape(GROUP, GROUP)
        to_gate, to_up = row_scales * gate_scale, row_scales * up_scale
        following = tl.minimum(block + 1, num_blocks - 1)
        row_scales = tl.load(a_scales + following)
        gate_scale, up_scale = tl.load(gate_scales + following), tl.load(up_scales + following)
        gate += tl.dot(a, gate_b.T) * to_gate[:, None]
        up += tl.dot(a, up_b.T) * to_up[:, None]
    cols = (col * GROUP + tl.arange(0, GROUP))[None, :]
    hidden = hidden_of(gate, up, scaled.biases, expert, cols, F, ACTIVATION)
    scales = group_scales(hidden)
    tl.store(scaled.hidden_scales + col.to(tl.int64) * sizes.Q + first_row + in_tile, scales)
    hidden_desc.store([first_row, col * GROUP], scaled_elements(hidden, scales, INTERPRET))
    record(symm.events, KIND_LAYER0_TILE, epoch, tile, col, phase, begin, ready, EVENTS, INTERPRET)


@triton.jit(do_not_specialize=["rank", "world_size", "comm_blocks", "timeout_ns"])
def fp8_dispatch_gemm_kernel(
    w1_desc, hidden_desc, scaled, sends, symm, table, sizes, rank, world_size, comm_blocks, timeout_ns,
    GEMM: tl.constexpr,
):  # fmt: skip
    """See the module; ``table.counters[0]`` holds push tickets, ``[1]`` tickets of work items, both start at 0."""
    PUSH: tl.constexpr = GEMM.push
    if tl.program_id(0) < comm_blocks:
        epoch = tl.load(symm.epoch)
        own = symm.rows + rank.to(tl.int64) * sizes.M * sizes.row_words
        push_rows(own, sends, symm, table.counters, epoch, rank, world_size, sizes.M, sizes.row_words, False, PUSH)
        converted = now(PUSH.events, PUSH.interpret)
        record(symm.events, KIND_CONVERT, epoch, 0, 0, 0, converted, converted, PUSH.events, PUSH.interpret)
    num_tiles = tl.load(table.num_tiles)
    num_items = num_tiles * (sizes.F // GROUP)
    item = tl.atomic_add(table.counters + 1, 1)
    while item < num_items:
        fp8_hidden_tile(item, w1_desc, hidden_desc, scaled, symm, table, num_tiles, timeout_ns, rank, sizes, GEMM)
        item = tl.atomic_add(table.counters + 1, 1)


def fp8_dispatch_gemm(
    w1: Scaled,
    hidden: Scaled,
    symm: SymmBuffer,
    sends: DispatchLists,
    table: TileTable,
    settings: LaunchSettings,
    b1: Tensor | None = None,
) -> None:
    """``dispatch_gemm_cuda`` of block FP8 in Triton; the shape of a tile is fixed."""
    experts, double_f, hidden_size = w1.elements.shape
    ffn = double_f // 2
    interpret = triton.knobs.runtime.interpret
    num_blocks = 4 if interpret else num_sms(symm.rows.device)
    halves = w1.elements.view(experts, 2, ffn, hidden_size)
    fp8_dispatch_gemm_kernel[(num_blocks,)](
        TensorDescriptor.from_tensor(halves, [1, 1, SCALE_GROUP, SCALE_GROUP]),
        TensorDescriptor.from_tensor(hidden.elements, [table.block_rows, SCALE_GROUP]),
        Fp8Tensors(w1.scales, b1, hidden.scales), sends, symm.tensors(num_blocks), table.tensors,
        Sizes(symm.max_tokens, hidden_size, ffn, hidden.elements.shape[0], symm.rows.shape[1]),
        symm.rank, symm.world_size, min(settings.comm_blocks or COMM_BLOCKS, num_blocks - 1), symm.timeout_ns,
        GEMM=fp8_constants(settings.activation, table.block_rows, symm.rows.shape[1], symm.event_capacity),
        num_warps=NUM_WARPS, num_stages=settings.tile.num_stages,
    )  # fmt: skip


def fp8_constants(activation: Activation, block_rows: int, row_words: int, events: int) -> DispatchGemmConstants:
    """What the kernel is compiled for, of tiles of ``block_rows`` rows."""
    push = push_constants(torch.int32, row_words, events, most=PUSH_WORDS)
    return DispatchGemmConstants(block_rows, activation, push)
