"""Layer 0: dispatch || grouped GEMM || activation in one launch.

Blocks below ``comm_blocks`` first push this rank's token rows to the ranks that compute them (``dispatch.push_rows``);
when no push is left they become compute blocks. Compute blocks go through the (tile, column block) items in the order
of the schedule: tiles of local rows first, read from ``x`` itself, then tiles of received rows, each as soon as the
chunks it reads have arrived. They walk most of them by stride, with the next item's operands fetched ahead, and draw
tickets for the rest, so that free blocks take it.

In block FP8, rows are packed and hidden is quantised in the epilogue. Each of D / 128 steps multiplies the tile's rows
with 128 columns of gate and 128 of up, apart: tensor cores keep some 14 bits of a sum of e4m3 products, so no sum of
theirs is longer than a step, and only one product has to be held in addition to the accumulators. One is scaled while
the next is computed. A tile's 128 columns of hidden share a scale per row. Blocks draw tickets for all work items: a
tile takes long enough to hide the cost of a ticket, and one loop in the place of two needs fewer registers, of which a
tile takes all.

A communication block does not wait until all pushes of its rank have been drawn, and a compute block waits only for
the pushes of other ranks. So the launch always ends, also when its blocks run one after the other (the interpreter):
the communication blocks come first.

This is the twin of the kernel in CUDA C++ (``dispatch_gemm_cuda``), which Hopper runs: for the interpreter, float32
and other GPUs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...gemm.activation import activate, hidden_of
from ...gemm.fp8 import GROUP, SCALE_GROUP, group_scales, scaled_elements
from ...gemm.group_gemm import dot_precision
from ...gemm.tiles import GROUP_TILES, decode_tokens
from ...runtime.activation import Activation
from ...runtime.arguments import Scaled, SymmBuffer, TileTable, num_sms, parts
from ...runtime.primitives import PLACE_LAYER0, zero_after_arrival
from ...runtime.recorder import KIND_CONVERT, KIND_LAYER0_TILE, now, record
from ..settings import LaunchSettings
from .dispatch import COMM_BLOCKS, NUM_WARPS, DispatchLists, PushConstants, push_constants, push_rows

# Rounds of all blocks that are left to tickets, in addition to the rounds of the communication blocks.
TICKET_ROUNDS = tl.constexpr(3)
PUSH_WORDS = 512  # words of a packed row that a block moves at once, at most


class Sizes(NamedTuple):
    """M, D and F; in block FP8 also routed rows, and int32 words of a packed row."""

    M: int
    D: int
    F: int
    Q: int | None = None
    row_words: int | None = None


class Additions(NamedTuple):
    """Biases and scales of weights and results, where there are some."""

    biases: Tensor | None  # (e, 2F)
    w1_scales: Tensor | None  # (e, 2F / 128, D / 128) float32 of block FP8
    hidden_scales: Tensor | None  # (F / 128, Q) float32


class Operands(NamedTuple):
    """The operands in 16 or 32 bits, and the addresses of results."""

    x: Tensor  # (T, D)
    recv_offset: int  # elements from x to the received rows
    w1_desc: TensorDescriptor
    biases: Tensor | None  # (e, 2F)
    hidden_desc: TensorDescriptor
    pre_desc: TensorDescriptor | None


class DispatchGemmConstants(NamedTuple):
    """The constants for which the kernel is compiled; in block FP8 the shape of a tile is fixed."""

    block_m: int
    activation: Activation
    push: PushConstants
    block_f: int
    block_k: int = 0
    even_k: bool = True  # block_k divides D
    flatten: bool = False  # the next item's operands are fetched during the epilogue
    precision: str = ""  # ``input_precision`` of ``tl.dot``


@triton.jit
def rows_of_tile(tile, in_tile, symm, table, epoch, timeout_ns, rank, M, GEMM: tl.constexpr):
    """Received rows of a tile, with 0 once the chunks that hold them have arrived; own rows are always there.

    ``in_tile`` counts a tile's rows: made in here, in a caller's loop, it makes a recording kernel spill 296 bytes.

    Rows past the end of a tile read its first row: cheaper than masking every load, and no one reads the result.
    """
    BLOCK_M: tl.constexpr = GEMM.block_m
    first_row = tl.multiple_of(tl.load(table.tiles + tile * 4 + 1), BLOCK_M)
    valid = in_tile < tl.load(table.tiles + tile * 4 + 2)
    row_ids = tl.load(table.row_ids + first_row + tl.where(valid, in_tile, 0))
    phase = tl.load(table.tiles + tile * 4 + 3)
    begin = now(GEMM.push.events, GEMM.push.interpret)
    ready = begin
    zero = 0
    if phase > 0:
        # A flag's index is source * C + chunk, and a received row is source * M + i: one division gives it.
        source = row_ids // M
        zero = zero_after_arrival(
            symm.flags + row_ids // GEMM.push.chunk, source != rank, epoch, symm.fault, timeout_ns, PLACE_LAYER0,
            source, (row_ids % M) // GEMM.push.chunk, GEMM.push.interpret,
        )  # fmt: skip
        ready = now(GEMM.push.events, GEMM.push.interpret)
    return first_row, row_ids, zero, phase, begin, ready


@triton.jit
def hidden_tiles(
    items, stride, end, operands, symm, table, num_tiles, epoch, timeout_ns, rank, sizes,
    FLATTEN: tl.constexpr, GEMM: tl.constexpr,
):  # fmt: skip
    """Compute the work items ``items, items + stride, ..`` below ``end``: wait, multiply, activate, store.

    Flattened, the operands of the next item are fetched during the epilogue of the last.
    """
    INTERPRET: tl.constexpr = GEMM.push.interpret
    EVENTS: tl.constexpr = GEMM.push.events
    BLOCK_M: tl.constexpr = GEMM.block_m
    BLOCK_F: tl.constexpr = GEMM.block_f
    BLOCK_K: tl.constexpr = GEMM.block_k
    ACTIVATION: tl.constexpr = GEMM.activation
    x_ptr, D, F = operands.x, sizes.D, sizes.F
    num_cols = tl.cdiv(F, BLOCK_F)
    in_tile = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    for item in tl.range(items, end, stride, flatten=FLATTEN):
        tile, col = decode_tokens(item, num_tiles, num_cols, GROUP_TILES)
        expert = tl.load(table.tiles + tile * 4)
        first_row, row_ids, zero, phase, begin, ready = rows_of_tile(
            tile, in_tile, symm, table, epoch, timeout_ns, rank, sizes.M, GEMM
        )  # fmt: skip
        # Own rows never travel: they are read from x, received rows at their distance from x in the address space.
        is_own = row_ids // sizes.M == rank
        own = (row_ids - rank * sizes.M).to(tl.int64) * D
        offsets = tl.where(is_own, own, row_ids.to(tl.int64) * D + operands.recv_offset + zero)
        a_ptrs = x_ptr + tl.multiple_of(offsets, 16)[:, None] + ks[None, :]
        accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_F), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            if GEMM.even_k:
                a = tl.load(a_ptrs + k)
            else:
                a = tl.load(a_ptrs + k, mask=(k + ks < D)[None, :], other=0.0)
            b = operands.w1_desc.load([expert, 0, col * BLOCK_F, k]).reshape(2 * BLOCK_F, BLOCK_K)
            accumulator = tl.dot(a, b.T, accumulator, input_precision=GEMM.precision)
        # ---- epilogue: column f of gate and of up sit in the same thread; both are rounded before the activation, so
        # that hidden follows from what the backward pass reads
        element = x_ptr.dtype.element_ty
        if operands.biases is None:
            gate, up = accumulator.to(element).reshape(BLOCK_M, 2, BLOCK_F).permute(0, 2, 1).split()
        else:
            gate, up = accumulator.reshape(BLOCK_M, 2, BLOCK_F).permute(0, 2, 1).split()
            cols = col * BLOCK_F + tl.arange(0, BLOCK_F)
            biases = operands.biases + expert.to(tl.int64) * (2 * F) + cols
            gate = (gate + tl.load(biases, mask=cols < F, other=0.0).to(tl.float32)[None, :]).to(element)
            up = (up + tl.load(biases + F, mask=cols < F, other=0.0).to(tl.float32)[None, :]).to(element)
        if operands.pre_desc is not None:
            operands.pre_desc.store([first_row, 0, col * BLOCK_F], gate.reshape(BLOCK_M, 1, BLOCK_F))
            operands.pre_desc.store([first_row, 1, col * BLOCK_F], up.reshape(BLOCK_M, 1, BLOCK_F))
        hidden = activate(gate.to(tl.float32), up.to(tl.float32), ACTIVATION).to(element)
        operands.hidden_desc.store([first_row, col * BLOCK_F], hidden)
        record(symm.events, KIND_LAYER0_TILE, epoch, tile, col, phase, begin, ready, EVENTS, INTERPRET)


@triton.jit
def fp8_hidden_tile(
    item, w1_desc, hidden_desc, additions, symm, table, num_tiles, timeout_ns, rank, sizes, GEMM: tl.constexpr
):  # fmt: skip
    """Compute one work item in block FP8: wait, multiply, activate, quantise, store."""
    BLOCK_M: tl.constexpr = GEMM.block_m
    ACTIVATION: tl.constexpr = GEMM.activation
    D, F = sizes.D, sizes.F
    num_cols = F // GROUP
    num_blocks = D // GROUP
    tile, col = decode_tokens(item, num_tiles, num_cols, GROUP_TILES)
    expert = tl.load(table.tiles + tile * 4)
    epoch = tl.load(symm.epoch)  # loaded for each tile: a register that lives through the GEMM's loop is one too many
    first_row, row_ids, zero, phase, begin, ready = rows_of_tile(
        tile, tl.arange(0, BLOCK_M), symm, table, epoch, timeout_ns, rank, sizes.M, GEMM
    )  # fmt: skip
    words = row_ids.to(tl.int64) * sizes.row_words + zero
    elements_ptr = symm.rows.to(tl.pointer_type(tl.float8e4nv))
    a_ptrs = elements_ptr + tl.multiple_of(words * 4, 16)[:, None] + tl.arange(0, GROUP)[None, :]
    a_scales = symm.rows.to(tl.pointer_type(tl.float32)) + D // 4 + words
    gate_scales = additions.w1_scales + (expert * 2 * num_cols + col) * num_blocks
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
    hidden = hidden_of(gate, up, additions.biases, expert, cols, F, ACTIVATION)
    scales = group_scales(hidden)
    tl.store(additions.hidden_scales + col.to(tl.int64) * sizes.Q + first_row + tl.arange(0, BLOCK_M), scales)
    hidden_desc.store([first_row, col * GROUP], scaled_elements(hidden, scales, GEMM.push.interpret))
    record(
        symm.events, KIND_LAYER0_TILE, epoch, tile, col, phase, begin, ready, GEMM.push.events, GEMM.push.interpret
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "world_size", "comm_blocks", "timeout_ns", "recv_offset"])
def dispatch_gemm_kernel(
    x_ptr, recv_offset, w1_desc, additions, hidden_desc, pre_desc, sends, symm, table, sizes, rank, world_size,
    comm_blocks, timeout_ns, GEMM: tl.constexpr,
):  # fmt: skip
    """See the module; ``table.counters[0]`` holds push tickets, ``[1]`` tickets of work items, both start at 0.

    ``additions``, ``sends``, ``symm``, ``table``, ``sizes``, ``GEMM``: ``Additions``, ``DispatchLists``,
    ``SymmTensors``, ``TileTensors``, ``Sizes``, ``DispatchGemmConstants``. No ``pre_desc``: gate and up are not kept.
    In block FP8 ``x_ptr`` are this rank's own packed rows, which lie among the received ones.
    """
    PUSH: tl.constexpr = GEMM.push
    IN_FP8: tl.constexpr = additions.w1_scales is not None
    epoch = tl.load(symm.epoch)
    num_tiles = tl.load(table.num_tiles)
    num_items = num_tiles * tl.cdiv(sizes.F, GEMM.block_f)
    num_blocks = tl.num_programs(0)
    walked = 0
    if not IN_FP8:
        operands = Operands(x_ptr, recv_offset, w1_desc, additions.biases, hidden_desc, pre_desc)
        # Compute blocks walk whole rounds by stride; free blocks take the tail, converted comm blocks first.
        walked = tl.maximum(num_items - TICKET_ROUNDS * num_blocks, 0) // num_blocks * (num_blocks - comm_blocks)
    if tl.program_id(0) < comm_blocks:
        WIDTH = sizes.row_words if IN_FP8 else sizes.D
        push_rows(x_ptr, sends, symm, table.counters, epoch, rank, world_size, sizes.M, WIDTH, False, PUSH)
        converted = now(PUSH.events, PUSH.interpret)
        record(symm.events, KIND_CONVERT, epoch, 0, 0, 0, converted, converted, PUSH.events, PUSH.interpret)
    elif not IN_FP8:
        first, stride = tl.program_id(0) - comm_blocks, num_blocks - comm_blocks
        hidden_tiles(
            first, stride, walked, operands, symm, table, num_tiles, epoch, timeout_ns, rank, sizes, GEMM.flatten, GEMM
        )  # fmt: skip
    item = walked + tl.atomic_add(table.counters + 1, 1)
    while item < num_items:
        if IN_FP8:
            fp8_hidden_tile(
                item, w1_desc, hidden_desc, additions, symm, table, num_tiles, timeout_ns, rank, sizes, GEMM
            )  # fmt: skip
        else:
            hidden_tiles(
                item, 1, item + 1, operands, symm, table, num_tiles, epoch, timeout_ns, rank, sizes, False, GEMM
            )  # fmt: skip
        item = walked + tl.atomic_add(table.counters + 1, 1)


def dispatch_gemm(
    x: Tensor | None,
    w1: Tensor | Scaled,
    hidden: Tensor | Scaled,
    pre: Tensor | None,
    symm: SymmBuffer,
    sends: DispatchLists,
    table: TileTable,
    settings: LaunchSettings,
    b1: Tensor | None = None,
) -> None:
    """``dispatch_gemm_cuda`` in Triton, also in float32, of tiles by phase; rows of no tile are left alone."""
    (weights, w1_scales), (result, hidden_scales) = parts(w1), parts(hidden)
    experts, double_f, depth = weights.shape
    sizes, events, tile = Sizes(symm.max_tokens, depth, double_f // 2), symm.event_capacity, settings.tile
    if x is None:
        x = symm.rows[symm.rank * symm.max_tokens :]
        sizes = sizes._replace(Q=len(result), row_words=x.shape[1])
        push, w1_block = push_constants(x.dtype, x.shape[1], events, most=PUSH_WORDS), [1, 1, SCALE_GROUP, SCALE_GROUP]
        constants = DispatchGemmConstants(table.block_rows, settings.activation, push, SCALE_GROUP)
    else:
        push, w1_block = push_constants(x.dtype, depth, events), [1, 2, tile.block_f, tile.block_k]
        constants = DispatchGemmConstants(
            block_m=table.block_rows, block_f=tile.block_f, block_k=tile.block_k, even_k=depth % tile.block_k == 0,
            flatten=x.dtype != torch.float32, precision=dot_precision(x.dtype), activation=settings.activation,
            push=push,
        )  # fmt: skip
    num_blocks = 4 if triton.knobs.runtime.interpret else num_sms(x.device)
    dispatch_gemm_kernel[(num_blocks,)](
        x, (symm.rows.data_ptr() - x.data_ptr()) // x.element_size(),
        TensorDescriptor.from_tensor(weights.view(experts, 2, double_f // 2, depth), w1_block),
        Additions(b1, w1_scales, hidden_scales),
        TensorDescriptor.from_tensor(result, [table.block_rows, constants.block_f]),
        None if pre is None else _pre_descriptor(pre, table.block_rows, tile.block_f),
        sends, symm.tensors(num_blocks), table.tensors, sizes, symm.rank, symm.world_size,
        min(settings.comm_blocks or COMM_BLOCKS, num_blocks - 1), symm.timeout_ns,
        GEMM=constants, num_warps=NUM_WARPS, num_stages=tile.num_stages,
    )  # fmt: skip


def _pre_descriptor(pre: Tensor, block_rows: int, block_f: int) -> TensorDescriptor:
    """Gate and up as an axis of their own, so that a tile past the end of gate does not write into up."""
    return TensorDescriptor.from_tensor(pre.view(pre.shape[0], 2, -1), [block_rows, 1, block_f])
