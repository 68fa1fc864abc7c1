"""Layer 0: dispatch || grouped GEMM || activation in one launch.

Blocks below ``comm_blocks`` first push this rank's token rows to the ranks that compute them (``dispatch.push_rows``);
when no push is left they become compute blocks. Compute blocks go through the (tile, column block) items in the order
of the schedule: tiles of local rows first, read from ``x`` itself, then tiles of received rows, each as soon as the
chunks it reads have arrived. They walk most of them by stride, with the next item's operands fetched ahead, and draw
tickets for the rest, so that whoever is free takes it.

A communication block waits for nobody until all pushes of its rank have been drawn, and a compute block waits only for
the pushes of other ranks. So the launch always ends, also when its blocks run one after the other (the interpreter):
the communication blocks come first.

This is the twin of the kernel in CUDA C++ (``dispatch_gemm_cuda``), which Hopper runs: for the interpreter, float32
and other GPUs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...gemm.activation import activate
from ...gemm.tiles import GROUP_TILES, decode_tokens
from ...runtime.activation import SWIGLU, Activation
from ...runtime.arguments import CHUNK_ROWS, TileTable, Wire, num_sms
from ...runtime.primitives import PLACE_LAYER0, zero_after_arrival
from ...runtime.recorder import KIND_CONVERT, KIND_LAYER0_TILE, now, record, recording
from .dispatch import COMM_BLOCKS, NUM_WARPS, PUSH_ROWS, Sends, push_rows

# Rounds of all blocks that are left to tickets, beside the rounds of the communication blocks.
TICKET_ROUNDS = tl.constexpr(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchGemmConfig:
    """Tile shape and split of the launch.

    Args:
        comm_blocks: Blocks that push rows before they compute; 0: ``COMM_BLOCKS``.
        block_f: Columns of hidden per tile; the GEMM tile is twice as wide (gate and up).
        block_k: Contraction step.
        push_cols: Columns a communication block moves at once, a power of two.
        flatten: Fetch the next item's operands during the epilogue.
        num_stages: Depth of the load pipeline.
        activation: Of the experts.
    """

    comm_blocks: int = 0
    block_f: int = 128
    block_k: int = 64
    push_cols: int = 1024
    flatten: bool = True
    num_stages: int = 4
    activation: Activation = SWIGLU


@triton.jit
def zero_after_rows(
    row_ids, flag_ptr, epoch, fault_ptr, timeout_ns, rank, M, CHUNK: tl.constexpr, INTERPRET: tl.constexpr
):
    """0 once the chunks that hold the received rows ``row_ids`` have arrived; own rows are always there."""
    # A flag's index is source * C + chunk, and a received row is source * M + i: one division gives it.
    source = row_ids // M
    return zero_after_arrival(
        flag_ptr + row_ids // CHUNK, source != rank, epoch, fault_ptr, timeout_ns, PLACE_LAYER0, source,
        (row_ids % M) // CHUNK, INTERPRET,
    )  # fmt: skip


@triton.jit
def hidden_tiles(
    items, stride, end, x_ptr, recv_offset, w1_desc, b1_ptr, hidden_desc, pre_desc, tiles_ptr, num_tiles, row_ids_ptr,
    flag_ptr, epoch, fault_ptr, timeout_ns, rank, M, D, F, events_ptr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_TILES: tl.constexpr,
    CHUNK: tl.constexpr, EVEN_K: tl.constexpr, SAVE_PRE: tl.constexpr, FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Compute the work items ``items, items + stride, ..`` below ``end``: wait, multiply, activate, store.

    Flattened, the operands of the next item are fetched during the epilogue of the last.
    """
    num_cols = tl.cdiv(F, BLOCK_F)
    in_tile = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    for item in tl.range(items, end, stride, flatten=FLATTEN):
        tile, col = decode_tokens(item, num_tiles, num_cols, GROUP_TILES)
        expert = tl.load(tiles_ptr + tile * 4)
        first_row = tl.multiple_of(tl.load(tiles_ptr + tile * 4 + 1), BLOCK_M)
        valid = in_tile < tl.load(tiles_ptr + tile * 4 + 2)
        # Rows past the end of a tile read its first row: cheaper than masking every load, and no one reads the result.
        row_ids = tl.load(row_ids_ptr + first_row + tl.where(valid, in_tile, 0))
        zero = 0
        phase = tl.load(tiles_ptr + tile * 4 + 3)
        begin = now(EVENTS, INTERPRET)
        ready = begin
        if phase > 0:
            zero = zero_after_rows(row_ids, flag_ptr, epoch, fault_ptr, timeout_ns, rank, M, CHUNK, INTERPRET)
            ready = now(EVENTS, INTERPRET)
        # Own rows never travel: they are read from x, received rows at their distance from x in the address space.
        is_own = row_ids // M == rank
        offsets = tl.where(is_own, (row_ids - rank * M).to(tl.int64) * D, row_ids.to(tl.int64) * D + recv_offset + zero)
        a_ptrs = x_ptr + tl.multiple_of(offsets, 16)[:, None] + ks[None, :]
        accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_F), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_ptrs + k)
            else:
                a = tl.load(a_ptrs + k, mask=(k + ks < D)[None, :], other=0.0)
            b = w1_desc.load([expert, 0, col * BLOCK_F, k]).reshape(2 * BLOCK_F, BLOCK_K)
            accumulator = tl.dot(a, b.T, accumulator, input_precision=PRECISION)
        # ---- epilogue: column f of gate and of up sit in the same thread; both are rounded before the activation, so
        # that hidden follows from what the backward pass reads
        element = x_ptr.dtype.element_ty
        if b1_ptr is None:
            gate, up = accumulator.to(element).reshape(BLOCK_M, 2, BLOCK_F).permute(0, 2, 1).split()
        else:
            gate, up = accumulator.reshape(BLOCK_M, 2, BLOCK_F).permute(0, 2, 1).split()
            cols = col * BLOCK_F + tl.arange(0, BLOCK_F)
            biases = b1_ptr + expert.to(tl.int64) * (2 * F) + cols
            gate = (gate + tl.load(biases, mask=cols < F, other=0.0).to(tl.float32)[None, :]).to(element)
            up = (up + tl.load(biases + F, mask=cols < F, other=0.0).to(tl.float32)[None, :]).to(element)
        if SAVE_PRE:
            pre_desc.store([first_row, 0, col * BLOCK_F], gate.reshape(BLOCK_M, 1, BLOCK_F))
            pre_desc.store([first_row, 1, col * BLOCK_F], up.reshape(BLOCK_M, 1, BLOCK_F))
        hidden = activate(gate.to(tl.float32), up.to(tl.float32), ACTIVATION).to(element)
        hidden_desc.store([first_row, col * BLOCK_F], hidden)
        record(events_ptr, KIND_LAYER0_TILE, epoch, tile, col, phase, begin, ready, EVENTS, INTERPRET)


@triton.jit(do_not_specialize=["rank", "world_size", "comm_blocks", "timeout_ns", "recv_offset"])
def dispatch_gemm_kernel(
    x_ptr, recv_offset, w1_desc, b1_ptr, hidden_desc, pre_desc, recv_addresses, flag_ptr, flag_addresses,
    send_token_ids, send_counts, tiles_ptr, num_tiles_ptr, row_ids_ptr, counters, epoch_ptr, fault_ptr,
    rank, world_size, comm_blocks, timeout_ns, M, D, F, events_ptr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_TILES: tl.constexpr,
    PUSH_ROWS: tl.constexpr, PUSH_COLS: tl.constexpr, CHUNK: tl.constexpr, EVEN_K: tl.constexpr,
    SAVE_PRE: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; ``counters[0]`` holds push tickets, ``counters[1]`` tickets of the tail, both start at 0."""
    epoch = tl.load(epoch_ptr)
    num_tiles = tl.load(num_tiles_ptr)
    num_items = num_tiles * tl.cdiv(F, BLOCK_F)
    num_blocks = tl.num_programs(0)
    # Compute blocks walk whole rounds by stride; the tail goes to whoever is free, converted comm blocks first.
    walked = tl.maximum(num_items - TICKET_ROUNDS * num_blocks, 0) // num_blocks * (num_blocks - comm_blocks)
    if tl.program_id(0) < comm_blocks:
        push_rows(
            x_ptr, send_token_ids, send_counts, recv_addresses, flag_addresses, counters, epoch, rank, world_size, M, D,
            events_ptr, False, PUSH_ROWS, PUSH_COLS, CHUNK, EVENTS, INTERPRET,
        )  # fmt: skip
        converted = now(EVENTS, INTERPRET)
        record(events_ptr, KIND_CONVERT, epoch, 0, 0, 0, converted, converted, EVENTS, INTERPRET)
    else:
        hidden_tiles(
            tl.program_id(0) - comm_blocks, num_blocks - comm_blocks, walked, x_ptr, recv_offset, w1_desc, b1_ptr,
            hidden_desc, pre_desc, tiles_ptr, num_tiles, row_ids_ptr, flag_ptr, epoch, fault_ptr, timeout_ns, rank, M,
            D, F, events_ptr, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_TILES, CHUNK, EVEN_K, SAVE_PRE, FLATTEN, PRECISION,
            ACTIVATION, EVENTS, INTERPRET,
        )  # fmt: skip
    item = walked + tl.atomic_add(counters + 1, 1)
    while item < num_items:
        hidden_tiles(
            item, 1, item + 1, x_ptr, recv_offset, w1_desc, b1_ptr, hidden_desc, pre_desc, tiles_ptr, num_tiles,
            row_ids_ptr, flag_ptr, epoch, fault_ptr, timeout_ns, rank, M, D, F, events_ptr,
            BLOCK_M, BLOCK_F, BLOCK_K, GROUP_TILES, CHUNK, EVEN_K, SAVE_PRE, False, PRECISION, ACTIVATION, EVENTS,
            INTERPRET,
        )  # fmt: skip
        item = walked + tl.atomic_add(counters + 1, 1)


def dispatch_gemm(
    x: Tensor,
    w1: Tensor,
    hidden: Tensor,
    pre: Tensor | None,
    wire: Wire,
    sends: Sends,
    table: TileTable,
    config: DispatchGemmConfig,
    b1: Tensor | None = None,
) -> None:
    """Send this rank's rows, receive the others', and compute hidden = activation(x w_gate, x w_up) of routed rows.

    Args:
        x: ``(T, D)`` this rank's tokens.
        w1: ``(e, 2F, D)`` gate rows, then up rows, same dtype.
        hidden: ``(Q, F)`` result; rows in the padding of a tile are undefined, rows of no tile are left alone.
        pre: ``(Q, 2F)`` receives gate | up for the backward pass, or ``None``.
        wire: Receive rows and flags.
        sends: Send lists.
        table: Tiles in schedule order.
        config: Tile shape and split.
        b1: ``(e, 2F)`` biases of gate | up, dtype of ``x``; ``None``: none.
    """
    experts, double_f, hidden_size = w1.shape
    ffn = double_f // 2
    interpret = triton.knobs.runtime.interpret
    num_blocks = 4 if interpret else num_sms(x.device)
    dispatch_gemm_kernel[(num_blocks,)](
        x, (wire.rows.data_ptr() - x.data_ptr()) // x.element_size(),
        TensorDescriptor.from_tensor(w1.view(experts, 2, ffn, hidden_size), [1, 2, config.block_f, config.block_k]),
        b1,
        TensorDescriptor.from_tensor(hidden, [table.block_rows, config.block_f]),
        _pre_descriptor(hidden if pre is None else pre, table.block_rows, config.block_f),
        wire.row_pointers, wire.flags, wire.flag_pointers, sends.token_ids, sends.counts,
        table.tiles, table.num_tiles, table.row_ids, table.counters, wire.epoch, wire.fault,
        wire.rank, wire.world_size, min(config.comm_blocks or COMM_BLOCKS, num_blocks - 1), wire.timeout_ns,
        wire.max_tokens, hidden_size, ffn,
        BLOCK_M=table.block_rows, BLOCK_F=config.block_f, BLOCK_K=config.block_k, GROUP_TILES=GROUP_TILES,
        PUSH_ROWS=PUSH_ROWS, PUSH_COLS=config.push_cols, CHUNK=CHUNK_ROWS,
        EVEN_K=hidden_size % config.block_k == 0, SAVE_PRE=pre is not None, FLATTEN=config.flatten,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", ACTIVATION=config.activation, INTERPRET=interpret,
        **recording(wire.recorder, num_blocks),
        num_warps=NUM_WARPS, num_stages=config.num_stages,
    )  # fmt: skip


def _pre_descriptor(pre: Tensor, block_rows: int, block_f: int) -> TensorDescriptor:
    """Gate and up as an axis of their own, so that a tile past the end of gate does not write into up."""
    return TensorDescriptor.from_tensor(pre.view(pre.shape[0], 2, -1), [block_rows, 1, block_f])
