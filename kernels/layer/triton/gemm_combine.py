"""Layer 1: grouped GEMM || weighted top-k reduce || combine, in one launch.

The hidden columns are cut into panels, and the GEMM finishes a panel over all experts before it starts the next. The
last ``comm_blocks`` blocks never compute: they reduce, send and add up each panel as soon as it is complete
(``combine.combine_panels``), while the compute blocks are at the next one; these join them when their share of the GEMM
is done. Every slot is written once and every order is fixed: results are bitwise reproducible.

A block waits for the GEMM only after its own share of it, so the launch ends, if its blocks are resident together.

This is the twin of the kernel in CUDA C++ (``gemm_combine_cuda``), which Hopper runs: for the interpreter, float32,
more than 16 experts of a token, and other GPUs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...gemm.tiles import GROUP_TILES
from ...runtime.arguments import (
    CHUNK_FLAGS,
    COMBINE_CHUNK_ROWS,
    PANEL_COUNTERS,
    Returns,
    Scaled,
    TileTable,
    Wire,
    num_sms,
    parts,
)
from ...runtime.recorder import KIND_CONVERT, now, record, recording
from .combine import combine_panels, slot_block
from .dispatch import COMM_BLOCKS, NUM_WARPS
from .gemm_panels import gemm_panels

MOVE_ROWS = 8  # that the reduce and the final sum handle at once
SUM_TOKENS = COMBINE_CHUNK_ROWS  # of one sum ticket


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCombineConfig:
    """Tile shape and split of the launch.

    Args:
        comm_blocks: Blocks that never compute; 0: ``COMM_BLOCKS``.
        num_panels: Column panels, at most 16 and at most the column blocks of D.
        block_n: Columns of a GEMM tile.
        block_k: Contraction step.
        move_cols: Columns the reduce and the final sum handle at once, a power of two.
        flatten: Fetch the next item's operands during the epilogue.
        num_stages: Depth of the load pipeline.
        reserved_sms: How many are left to kernels of other streams. Where these hold some and wait for other ranks, the
            launch ends only if all of its blocks that compute find a place.
    """

    comm_blocks: int = 0
    num_panels: int = 4
    block_n: int = 256
    block_k: int = 64
    move_cols: int = 512
    flatten: bool = True
    num_stages: int = 4
    reserved_sms: int = 0


@triton.jit(do_not_specialize=["rank", "comm_blocks", "num_panels", "timeout_ns", "T"])
def gemm_combine_kernel(
    a_desc, b_desc, a_scales, b_scales, bias_ptr, y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads,
    send_rows, recv_counts, combine_ptr, combine_addresses, combine_grads, combine_grad_addresses, flag_ptr,
    flag_addresses, tiles_ptr, num_tiles_ptr, counters, epoch_ptr, fault_ptr,
    rank, comm_blocks, num_panels, timeout_ns, T, M, Q, D, CONTRACTION, events_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_TILES: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, HAS_GRADS: tl.constexpr,
    B_IS_KN: tl.constexpr, FLATTEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, FLAGS: tl.constexpr, PANEL_COUNTERS: tl.constexpr, PRECISION: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; counter 0 holds the tickets, panel counters follow at PANEL_COUNTERS."""
    epoch = tl.load(epoch_ptr)
    num_tiles = tl.load(num_tiles_ptr)
    num_cols = tl.cdiv(D, BLOCK_N)
    panel_counters = counters + PANEL_COUNTERS
    compute_blocks = tl.num_programs(0) - comm_blocks
    if tl.program_id(0) < compute_blocks:
        gemm_panels(
            a_desc, b_desc, a_scales, b_scales, bias_ptr, y_ptr, tiles_ptr, num_tiles, num_cols, num_panels,
            tl.program_id(0), compute_blocks, panel_counters, epoch_ptr, Q, D, CONTRACTION, events_ptr, BLOCK_M,
            BLOCK_N, BLOCK_K, GROUP_TILES, B_IS_KN, FLATTEN, PRECISION, EVENTS, INTERPRET,
        )  # fmt: skip
        converted = now(EVENTS, INTERPRET)
        record(events_ptr, KIND_CONVERT, epoch, 1, 0, 0, converted, converted, EVENTS, INTERPRET)
    combine_panels(
        y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts, combine_ptr,
        combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses, counters, panel_counters,
        fault_ptr, timeout_ns, epoch, rank, num_tiles, num_cols, num_panels, T, M, D, events_ptr, W, K, K_BLOCK,
        WEIGHTED, HAS_GRADS, BLOCK_N, TOKENS, ROWS, COLS, CHUNK, FLAGS, EVENTS, INTERPRET,
    )  # fmt: skip


def gemm_combine(
    a: Tensor | Scaled,
    b: Tensor | Scaled,
    y: Tensor,
    out: Tensor,
    wire: Wire,
    returns: Returns,
    table: TileTable,
    config: GemmCombineConfig,
    *,
    b_is_kn: bool = False,
    bias: Tensor | None = None,
) -> None:
    """y = a @ b[expert] + bias[expert] for all routed rows, then out[t] = sum of token t's rows over all ranks.

    Args:
        a: ``(Q, C)`` routed rows; in block FP8 with scales ``(C / 128, Q)``.
        b: ``(e, D, C)``, or ``(e, C, D)`` with ``b_is_kn``; in block FP8 with scales ``(e, D / 128, C / 128)``.
        y: ``(Q, D)`` scratch for the expert outputs.
        out: ``(T, D)`` result.
        wire: Combine rows and ``(W, 4C, 16)`` flags.
        returns: Which rows to add up for whom.
        table: Tiles.
        config: Tile shape, panels and placement.
        b_is_kn: The contraction is b's middle axis.
        bias: ``(e, D)`` of a floating type; ``None``: none.
    """
    (a, a_scales), (b, b_scales) = parts(a), parts(b)
    block_n, block_k = config.block_n, config.block_k
    b_rows = block_n if b_scales is None else block_n // 2
    interpret = triton.knobs.runtime.interpret
    # The interpreter runs block after block: the first must finish the GEMM before any waits for it.
    num_blocks = 2 if interpret else num_sms(a.device) - config.reserved_sms
    gemm_combine_kernel[(num_blocks,)](
        a_desc=TensorDescriptor.from_tensor(a, [table.block_rows, block_k]),
        b_desc=TensorDescriptor.from_tensor(b, [1, block_k, block_n] if b_is_kn else [1, b_rows, block_k]),
        a_scales=a_scales,
        b_scales=b_scales,
        bias_ptr=bias,
        y_ptr=y,
        tiles_ptr=table.tiles,
        comm_blocks=min(config.comm_blocks or COMM_BLOCKS, num_blocks - 1),
        Q=a.shape[0],
        CONTRACTION=a.shape[1],
        BLOCK_M=table.block_rows,
        BLOCK_K=block_k,
        GROUP_TILES=GROUP_TILES,
        B_IS_KN=b_is_kn,
        FLATTEN=config.flatten,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32",
        INTERPRET=interpret,
        **combine_arguments(out, wire, returns, table, config),
        **recording(wire.recorder, num_blocks),
        num_warps=NUM_WARPS,
        num_stages=config.num_stages,
    )


def combine_arguments(
    out: Tensor, wire: Wire, returns: Returns, table: TileTable, config: GemmCombineConfig
) -> dict[str, Any]:
    """What the comm blocks read, by the names of the kernels' parameters."""
    top_k, grads = returns.row_slots.shape[1], returns.grads
    unused = returns.row_slots
    return dict(
        out_ptr=out,
        grads_out=unused if grads is None else grads.out,
        row_slots=returns.row_slots,
        row_weights=unused if returns.row_weights is None else returns.row_weights,
        row_grads=unused if grads is None else grads.row_grads,
        send_rows=returns.send_rows,
        recv_counts=returns.recv_counts,
        combine_ptr=wire.rows,
        combine_addresses=wire.row_pointers,
        combine_grads=unused if grads is None else grads.landing,
        combine_grad_addresses=wire.row_pointers if grads is None else grads.landing_pointers,
        flag_ptr=wire.flags,
        flag_addresses=wire.flag_pointers,
        num_tiles_ptr=table.num_tiles,
        counters=table.counters,
        epoch_ptr=wire.epoch,
        fault_ptr=wire.fault,
        rank=wire.rank,
        num_panels=config.num_panels,
        timeout_ns=wire.timeout_ns,
        T=out.shape[0],
        M=wire.max_tokens,
        D=out.shape[1],
        BLOCK_N=config.block_n,
        W=wire.world_size,
        K=top_k,
        K_BLOCK=slot_block(top_k),
        WEIGHTED=returns.row_weights is not None,
        HAS_GRADS=grads is not None,
        TOKENS=SUM_TOKENS,
        ROWS=MOVE_ROWS,
        COLS=config.move_cols,
        CHUNK=COMBINE_CHUNK_ROWS,
        FLAGS=CHUNK_FLAGS,
        PANEL_COUNTERS=PANEL_COUNTERS,
    )
