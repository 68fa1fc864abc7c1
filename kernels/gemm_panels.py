"""The GEMM of layer 1: column panel by column panel over all experts, each published when it is complete."""

import triton
import triton.language as tl

from .primitives import after_block
from .recorder import KIND_LAYER1_TILE, now, record
from .tiles import decode_columns

PANEL_COUNTERS = 16  # where the panels' counters begin among a launch's counters


@triton.jit
def gemm_panels(
    a_desc, b_desc, y_ptr, tiles_ptr, num_tiles, num_cols, num_panels, first_item, stride, panel_counters, epoch_ptr, D,
    CONTRACTION, events_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr, B_IS_KN: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Every ``stride``-th (panel, tile, column block) from ``first_item`` on; each adds 1 to its panel's counter."""
    rows = tl.arange(0, BLOCK_M)
    for item in tl.range(first_item, num_tiles * num_cols, stride, flatten=FLATTEN):
        tile, col, panel = decode_columns(item, num_tiles, num_cols, num_panels, GROUP_TILES)
        begin = now(EVENTS, INTERPRET)
        expert = tl.load(tiles_ptr + tile * 4)
        first_row = tl.multiple_of(tl.load(tiles_ptr + tile * 4 + 1), BLOCK_M)
        valid = rows < tl.load(tiles_ptr + tile * 4 + 2)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, CONTRACTION, BLOCK_K):
            a = a_desc.load([first_row, k])
            if B_IS_KN:
                b = b_desc.load([expert, k, col * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
                accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
            else:
                b = b_desc.load([expert, col * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
                accumulator = tl.dot(a, b.T, accumulator, input_precision=PRECISION)
        cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
        target = y_ptr + first_row.to(tl.int64) * D + rows[:, None] * D + cols[None, :]
        tl.store(target, accumulator.to(y_ptr.dtype.element_ty), mask=valid[:, None] & (cols < D)[None, :])
        tl.atomic_add(panel_counters + panel, after_block(1, INTERPRET), sem="release", scope="gpu")
        if EVENTS:  # read late: a register that is live through the GEMM's loop is one too many
            epoch = tl.load(epoch_ptr)
            record(events_ptr, KIND_LAYER1_TILE, epoch, tile, col, panel, begin, begin, EVENTS, INTERPRET)


@triton.jit(do_not_specialize=["num_panels"])
def gemm_panels_kernel(
    a_desc, b_desc, y_ptr, tiles_ptr, num_tiles_ptr, counters, epoch_ptr, num_panels, D, CONTRACTION, events_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_TILES: tl.constexpr,
    B_IS_KN: tl.constexpr, FLATTEN: tl.constexpr, PANEL_COUNTERS: tl.constexpr, PRECISION: tl.constexpr,
    EVENTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The compute blocks."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
    gemm_panels(
        a_desc, b_desc, y_ptr, tiles_ptr, tl.load(num_tiles_ptr), tl.cdiv(D, BLOCK_N), num_panels, tl.program_id(0),
        tl.num_programs(0), counters + PANEL_COUNTERS, epoch_ptr, D, CONTRACTION, events_ptr, BLOCK_M,
        BLOCK_N, BLOCK_K, GROUP_TILES, B_IS_KN, FLATTEN, PRECISION, EVENTS, INTERPRET,
    )  # fmt: skip
