"""Layer 1: grouped GEMM || weighted top-k reduce || combine.

The hidden columns are cut into panels, and the GEMM finishes a panel over all experts before it starts the next. Comm
blocks reduce, send and add up each panel as soon as it is complete (``combine.combine_panels``) while the compute
blocks are at the next one. Every slot is written once and every order is fixed: results are bitwise reproducible.

Comm blocks are placed in one of two ways:

*Dedicated*: one launch, whose last ``comm_blocks`` blocks have an SM each and never compute; the compute
blocks join them when their share of the GEMM is done. A block waits for the GEMM only after its own share of it, so the
launch ends, if its blocks are resident together.

*Colocated*: every SM holds a compute block and a comm block. The GEMM is bound by the tensor cores, reduce
and send by memory: on an SM of its own a comm block leaves the tensor cores idle, beside a compute block it
takes nothing but registers and memory traffic. There are two launches, because all blocks of one launch get as many
registers. The second is a programmatic dependent of the first: it starts when every compute block has started, so no
comm block takes the place of a compute block it waits for. Where there is no room beside (float32, other chips), it
starts as compute blocks end: slower, not wrong.

On Hopper larger layers, and their gradients, are one launch in CUDA C++ instead of these two (``gemm_combine_cuda``).
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
    COMBINE_CHUNK_ROWS,
    MAX_PANELS,
    Returns,
    Scaled,
    TileTable,
    Wire,
    num_sms,
    parts,
)
from ...runtime.recorder import KIND_CONVERT, now, record, recording
from ..gemm_combine import Split, gemm_combine_cuda, runs_cuda
from .combine import NUM_SMS, column_parts, combine_panels, slot_block
from .dispatch import COMM_BLOCKS, NUM_WARPS
from .gemm_panels import PANEL_COUNTERS, gemm_panels, gemm_panels_kernel

# Registers of a thread beside each other: 256 x 184 + 128 x 144 = 65536.
COMPUTE_REGISTERS = 184
COMM_REGISTERS = 144
COMM_WARPS = 4
MOVE_ROWS = 8  # that the reduce and the final sum handle at once; more where panels have parts
SUM_TOKENS = COMBINE_CHUNK_ROWS  # of one sum ticket
LINE_BYTES = 128  # of memory
LEAST_PARTS = 4  # two parts of a panel, or three, take longer than one
# Comm blocks per SM: the first runs beside the compute block, the others where one has ended.
COMM_WAVES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCombineConfig:
    """Tile shape and split of the launch.

    Args:
        comm_blocks: Blocks that never compute; 0: comm blocks have a part of every SM (*colocated*).
        num_panels: Column panels, at most 16 and at most the column blocks of D.
        block_n: Columns of a GEMM tile.
        block_k: Contraction step.
        move_cols: Columns the reduce and the final sum handle at once, a power of two; fewer where panels have parts
            (``cut_panels``).
        flatten: Fetch the next item's operands during the epilogue.
        num_stages: Depth of the load pipeline.
        cuda_kernels: Whether all ranks have the launches in CUDA C++, whose flags are not those of Triton's.
        reserved_sms: How many are left to kernels of other streams. Where these hold some and wait for other
            ranks, a split launch ends only if all of its blocks that compute find a place.
    """

    comm_blocks: int = 0
    num_panels: int = 4
    block_n: int = 256
    block_k: int = 64
    move_cols: int = 512
    flatten: bool = True
    num_stages: int = 4
    cuda_kernels: bool = True
    reserved_sms: int = 0


@triton.jit(do_not_specialize=["rank", "comm_blocks", "num_panels", "num_parts", "timeout_ns", "T"])
def gemm_combine_kernel(
    a_desc, b_desc, bias_ptr, y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts,
    combine_ptr, combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses,
    tiles_ptr, num_tiles_ptr, counters, epoch_ptr, fault_ptr,
    rank, comm_blocks, num_panels, num_parts, timeout_ns, T, M, D, CONTRACTION, events_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_TILES: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, HAS_GRADS: tl.constexpr,
    B_IS_KN: tl.constexpr, FLATTEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PART_STEP: tl.constexpr, CHUNK: tl.constexpr, PANELS: tl.constexpr, PANEL_COUNTERS: tl.constexpr,
    PRECISION: tl.constexpr, EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; counter 0 holds the tickets, panel counters follow at PANEL_COUNTERS."""
    epoch = tl.load(epoch_ptr)
    num_tiles = tl.load(num_tiles_ptr)
    num_cols = tl.cdiv(D, BLOCK_N)
    panel_counters = counters + PANEL_COUNTERS
    compute_blocks = tl.num_programs(0) - comm_blocks
    if tl.program_id(0) < compute_blocks:
        gemm_panels(
            a_desc, b_desc, None, None, bias_ptr, y_ptr, tiles_ptr, num_tiles, num_cols, num_panels, tl.program_id(0),
            compute_blocks, panel_counters, epoch_ptr, 0, D, CONTRACTION, events_ptr, BLOCK_M, BLOCK_N, BLOCK_K,
            GROUP_TILES, B_IS_KN, FLATTEN, PRECISION, EVENTS, INTERPRET,
        )  # fmt: skip
        converted = now(EVENTS, INTERPRET)
        record(events_ptr, KIND_CONVERT, epoch, 1, 0, 0, converted, converted, EVENTS, INTERPRET)
    combine_panels(
        y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts, combine_ptr,
        combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses, counters, panel_counters,
        fault_ptr, timeout_ns, epoch, rank, num_tiles, num_cols, num_panels, num_parts, T, M, D, events_ptr, W, K,
        K_BLOCK, WEIGHTED, HAS_GRADS, BLOCK_N, PART_STEP, TOKENS, ROWS, COLS, CHUNK, PANELS, EVENTS, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "num_panels", "num_parts", "timeout_ns", "T"])
def combine_kernel(
    y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts, combine_ptr,
    combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses, num_tiles_ptr, counters,
    epoch_ptr, fault_ptr, rank, num_panels, num_parts, timeout_ns, T, M, D, events_ptr,
    BLOCK_N: tl.constexpr, PART_STEP: tl.constexpr, W: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr, HAS_GRADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, PANELS: tl.constexpr, PANEL_COUNTERS: tl.constexpr, EVENTS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """The comm blocks. What is launched after this one may read what the compute blocks stored, too."""
    combine_panels(
        y_ptr, out_ptr, grads_out, row_slots, row_weights, row_grads, send_rows, recv_counts, combine_ptr,
        combine_addresses, combine_grads, combine_grad_addresses, flag_ptr, flag_addresses, counters,
        counters + PANEL_COUNTERS, fault_ptr, timeout_ns, tl.load(epoch_ptr), rank, tl.load(num_tiles_ptr),
        tl.cdiv(D, BLOCK_N), num_panels, num_parts, T, M, D, events_ptr, W, K, K_BLOCK, WEIGHTED, HAS_GRADS, BLOCK_N,
        PART_STEP, TOKENS, ROWS, COLS, CHUNK, PANELS, EVENTS, INTERPRET,
    )  # fmt: skip
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


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
        bias: ``(e, D)`` of a floating type; ``None``: none. Ranks that differ in it must not have ``cuda_kernels``.
    """
    may_be_cuda = config.cuda_kernels and bias is None
    if may_be_cuda and b_is_kn == (returns.grads is not None) and runs_cuda(y, b, wire, returns, table):
        split = Split(
            num_panels=config.num_panels,
            reserved_sms=config.reserved_sms,
            comm_blocks=config.comm_blocks,
        )
        gemm_combine_cuda(a, b, y, out, wire, returns, table, split)
        return
    (a, a_scales), (b, b_scales) = parts(a), parts(b)
    block_n, block_k = config.block_n, config.block_k
    b_rows = block_n if b_scales is None else block_n // 2
    interpret = triton.knobs.runtime.interpret
    # The interpreter runs block after block: the first must finish the GEMM before any waits for it.
    num_blocks = 2 if interpret else num_sms(a.device) - config.reserved_sms
    arguments = combine_arguments(out, wire, returns, table, config) | dict(
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
    )
    shape = dict(num_warps=NUM_WARPS, num_stages=config.num_stages)
    is_scaled = a_scales is not None
    if config.comm_blocks and not is_scaled:
        events = recording(wire.recorder, num_blocks)
        launch(gemm_combine_kernel, num_blocks, arguments | events, shape)
        return
    # A tile in FP8 takes all registers: its blocks get SMs of their own, and so do some comm blocks.
    compute_blocks = num_blocks - arguments["comm_blocks"] if is_scaled else num_blocks
    compute = {"maxnreg": COMPUTE_REGISTERS} if a.element_size() == 2 and not interpret else {}
    launch(gemm_panels_kernel, compute_blocks, arguments | recording(wire.recorder, num_blocks), shape | compute)
    comm_shape = dict(num_warps=COMM_WARPS) | ({} if interpret else {"launch_pdl": True, "maxnreg": COMM_REGISTERS})
    events = recording(wire.recorder, COMM_WAVES * num_blocks, first=num_blocks)
    launch(combine_kernel, COMM_WAVES * num_blocks, arguments | events, comm_shape)


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
        CHUNK=COMBINE_CHUNK_ROWS,
        PANELS=MAX_PANELS,
        PANEL_COUNTERS=PANEL_COUNTERS,
        **cut_panels(out, wire, config),
    )


def cut_panels(out: Tensor, wire: Wire, config: GemmCombineConfig) -> dict[str, int]:
    """How the comm blocks cut panels: parts, and rows and columns of a step; by the names of the kernels' parameters.

    With few tokens a part is at least a line wide, and one step has a line of as many rows as a chunk has.

    Example: float32, M=128 and W=2 make 8 chunks: D=416 in one panel has 6 parts, steps of 32 rows and 32 columns.
    """
    part_step = LINE_BYTES // out.element_size()
    in_last_panel = out.shape[1] // (2 * config.num_panels * part_step)
    parts = column_parts(wire.max_tokens, wire.world_size, NUM_SMS, in_last_panel, config.num_panels)
    rows, cols = MOVE_ROWS, config.move_cols
    if config.comm_blocks or parts < LEAST_PARTS:
        return dict(num_parts=1, PART_STEP=part_step, ROWS=rows, COLS=cols)
    more = min(SUM_TOKENS // rows, cols // part_step)
    return dict(num_parts=parts, PART_STEP=part_step, ROWS=rows * more, COLS=cols // more)


def launch(kernel: Any, num_blocks: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Launch a kernel with those of the arguments it has a parameter for."""
    kernel[(num_blocks,)](**{name: arguments[name] for name in kernel.arg_names}, **options)
