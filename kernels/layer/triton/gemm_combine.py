"""Layer 1: grouped GEMM || weighted top-k reduce || combine, in one launch.

The hidden columns are cut into panels, and the GEMM finishes a panel over all experts before it starts the next. The
GEMM has a share for all but ``comm_blocks`` blocks, and blocks draw the shares. The last blocks to come find none: they
reduce, send and add up each panel as soon as it is complete (``combine.combine_panels``), while the others are at the
next one, and join them later. Every slot is written once and every order is fixed: results are bitwise reproducible.

A block waits for the GEMM only when all shares are drawn, each by a block that never waits in it. So the launch ends
with any number of resident blocks: where other kernels hold SMs, some blocks draw several shares.

This is the twin of the kernel in CUDA C++ (``gemm_combine_cuda``), which Hopper runs: for the interpreter, float32,
more than 16 experts of a token, and other GPUs.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...gemm.fp8 import SCALE_GROUP
from ...gemm.group_gemm import dot_precision
from ...runtime.arguments import CombineLists, Scaled, SymmBuffer, TileTable, num_sms, parts
from ...runtime.limits import CHUNK_FLAGS, COMBINE_CHUNK_ROWS, PANEL_COUNTERS
from ...runtime.recorder import KIND_CONVERT, now, record
from ..settings import LaunchSettings, TileShape
from .combine import CombineConstants, CombineSizes, Turn, combine_panels, slot_block
from .dispatch import COMM_BLOCKS, NUM_WARPS, move_cols
from .gemm_panels import PanelConstants, PanelTensors, gemm_panels

MOVE_ROWS = 8  # that the reduce and the final sum handle at once
MOVE_COLS = 512  # of these at most
SUM_TOKENS = COMBINE_CHUNK_ROWS  # of one sum ticket
SHARES, FIRST_COUNTER = tl.constexpr(1), tl.constexpr(PANEL_COUNTERS)


@triton.jit(do_not_specialize=["rank", "comm_blocks", "num_panels", "timeout_ns", "T"])
def gemm_combine_kernel(
    a_desc, b_desc, gemm, out_ptr, returns, symm, table, sizes, rank, comm_blocks, num_panels, timeout_ns, T,
    GEMM: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    """See the module; counter 0 holds the tickets, SHARES those of the GEMM, panel counters follow at PANEL_COUNTERS.

    ``gemm``, ``returns``, ``symm``, ``table``, ``sizes``: ``PanelTensors``, ``CombineLists``, ``SymmTensors``,
    ``TileTensors``, ``CombineSizes``.
    """
    num_tiles = tl.load(table.num_tiles)
    num_cols = tl.cdiv(sizes.D, GEMM.block_n)
    panel_counters = table.counters + FIRST_COUNTER
    compute_blocks = tl.num_programs(0) - comm_blocks
    share = tl.atomic_add(table.counters + SHARES, 1)
    while share < compute_blocks:
        gemm_panels(
            a_desc, b_desc, gemm, symm, table.tiles, num_tiles, num_cols, num_panels, share, compute_blocks,
            panel_counters, sizes, GEMM,
        )  # fmt: skip
        if GEMM.events:
            converted = now(GEMM.events, GEMM.interpret)
            epoch = tl.load(symm.epoch)
            record(symm.events, KIND_CONVERT, epoch, 1, 0, 0, converted, converted, GEMM.events, GEMM.interpret)
        share = tl.atomic_add(table.counters + SHARES, 1)
    # Loaded late: in float32 a register that is live through the GEMM's loop is one too many.
    turn = Turn(tl.load(symm.epoch), rank, timeout_ns, num_tiles, num_cols, num_panels, T)
    combine_panels(
        gemm.y, out_ptr, returns, symm, table.counters, panel_counters, turn, sizes.M, sizes.D, COMBINE
    )  # fmt: skip


def gemm_combine(
    a: Tensor | Scaled,
    b: Tensor | Scaled,
    y: Tensor,
    out: Tensor,
    symm: SymmBuffer,
    returns: CombineLists,
    table: TileTable,
    settings: LaunchSettings,
    bias: Tensor | None = None,
) -> None:
    """``gemm_combine_cuda`` in Triton, also in float32 and with more entries of a sum."""
    (a, a_scales), (b, b_scales) = parts(a), parts(b)
    tile, b_is_kn = settings.tile if b_scales is None else fp8_tile(settings.tile), returns.grads is not None
    block_n, block_k, top_k = tile.block_n, tile.block_k, returns.row_slots.shape[1]
    interpret = triton.knobs.runtime.interpret
    recording = dict(events=symm.event_capacity, interpret=interpret)
    # The interpreter runs block after block: the first must finish the GEMM before any waits for it.
    num_blocks = 2 if interpret else num_sms(a.device) - settings.reserved_sms
    gemm_combine_kernel[(num_blocks,)](
        TensorDescriptor.from_tensor(a, [table.block_rows, block_k]),
        TensorDescriptor.from_tensor(b, [1, block_k, block_n] if b_is_kn else [1, block_n, block_k]),
        PanelTensors(a_scales, b_scales, bias, y), out, returns, symm.tensors(num_blocks), table.tensors,
        CombineSizes(symm.max_tokens, a.shape[0], out.shape[1], a.shape[1]),
        symm.rank, min(settings.comm_blocks or COMM_BLOCKS, num_blocks - 1), settings.num_panels, symm.timeout_ns,
        out.shape[0],
        GEMM=PanelConstants(
            block_m=table.block_rows, block_n=block_n, block_k=block_k, b_is_kn=b_is_kn,
            flatten=y.dtype != torch.float32, precision=dot_precision(y.dtype), **recording,
        ),
        COMBINE=CombineConstants(
            block_n=block_n, world_size=symm.world_size, top_k=top_k, top_k_block=slot_block(top_k), tokens=SUM_TOKENS,
            rows=MOVE_ROWS, cols=move_cols(y.dtype, out.shape[1], MOVE_COLS), chunk=COMBINE_CHUNK_ROWS,
            flags=CHUNK_FLAGS, **recording,
        ),
        num_warps=NUM_WARPS, num_stages=tile.num_stages,
    )  # fmt: skip


def fp8_tile(tile: TileShape) -> TileShape:
    """That of block FP8, half as wide: a row and a step have one scale then, and nothing spills."""
    return replace(tile, block_n=tile.block_n // 2, block_k=SCALE_GROUP)
