"""The GEMM of layer 1: column panel by column panel over all experts, each published when it is complete."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...gemm.fp8 import GROUP
from ...gemm.tiles import GROUP_TILES, decode_columns
from ...runtime.primitives import after_block
from ...runtime.recorder import KIND_LAYER1_TILE, now, record


@triton.jit
def multiply_tile(a_desc, b_desc, expert, first_row, first_col, CONTRACTION, GEMM: tl.constexpr):
    """One tile of the product, ``(BLOCK_M, BLOCK_N)`` float32."""
    BLOCK_M: tl.constexpr = GEMM.block_m
    BLOCK_N: tl.constexpr = GEMM.block_n
    BLOCK_K: tl.constexpr = GEMM.block_k
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, CONTRACTION, BLOCK_K):
        a = a_desc.load([first_row, k])
        if GEMM.b_is_kn:
            b = b_desc.load([expert, k, first_col]).reshape(BLOCK_K, BLOCK_N)
            accumulator = tl.dot(a, b, accumulator, input_precision=GEMM.precision)
        else:
            b = b_desc.load([expert, first_col, k]).reshape(BLOCK_N, BLOCK_K)
            accumulator = tl.dot(a, b.T, accumulator, input_precision=GEMM.precision)
    return accumulator


@triton.jit
def multiply_fp8_tile(
    a_desc, b_desc, gemm, expert, first_row, first_col, Q, D, CONTRACTION, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The same in block FP8, of columns that share their scales."""
    num_blocks = CONTRACTION // GROUP
    a_scales = gemm.a_scales + first_row + tl.arange(0, BLOCK_M)
    b_scales = gemm.b_scales + (expert * (D // GROUP) + first_col // GROUP) * num_blocks
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    row_scales, scale = tl.load(a_scales), tl.load(b_scales)
    for block in range(0, num_blocks):
        a = a_desc.load([first_row, block * GROUP])
        b = b_desc.load([expert, first_col, block * GROUP]).reshape(BLOCK_N, GROUP)
        scales = row_scales * scale
        # Fetched a step ahead, so that a product is scaled while the next one is computed.
        following = tl.minimum(block + 1, num_blocks - 1)
        row_scales, scale = tl.load(a_scales + following * Q), tl.load(b_scales + following)
        accumulator += tl.dot(a, b.T) * scales[:, None]
    return accumulator


@triton.jit
def store_tile(y_ptr, tile, first_row, first_col, num_rows, D):
    """Store the first ``num_rows`` rows of a float32 tile, of its columns those below D."""
    rows, cols = tl.arange(0, tile.shape[0]), first_col + tl.arange(0, tile.shape[1])
    # Offsets that are the same for all tiles would be kept in registers through the GEMM's loop.
    target = y_ptr + (first_row + rows)[:, None].to(tl.int64) * D + cols[None, :]
    tl.store(target, tile.to(y_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (cols < D)[None, :])


@triton.jit
def with_bias(tile, bias_ptr, expert, first_col, D):
    """A float32 tile with its expert's row of ``(e, D)`` biases; as it is where ``bias_ptr`` is ``None``."""
    if bias_ptr is not None:
        cols = first_col + tl.arange(0, tile.shape[1])
        bias = tl.load(bias_ptr + expert.to(tl.int64) * D + cols, mask=cols < D, other=0.0)
        tile += bias.to(tl.float32)[None, :]
    return tile


class PanelConstants(NamedTuple):
    """The constants for which the GEMM is compiled."""

    block_m: int
    block_n: int
    block_k: int
    b_is_kn: bool  # the contraction is b's middle axis
    flatten: bool  # the next item's operands are fetched during the epilogue
    precision: str  # ``input_precision`` of ``tl.dot``
    events: int  # that a block records at most
    interpret: bool


class PanelTensors(NamedTuple):
    """The tensors that the GEMM reads and writes, other than a and b."""

    a_scales: Tensor | None  # (C / 128, Q) of block FP8
    b_scales: Tensor | None  # (e, D / 128, C / 128)
    bias: Tensor | None  # (e, D)
    y: Tensor  # (Q, D)


@triton.jit
def gemm_panels(
    a_desc, b_desc, gemm, symm, tiles_ptr, num_tiles, num_cols, num_panels, first_item, stride, panel_counters, sizes,
    GEMM: tl.constexpr,
):  # fmt: skip
    """Every ``stride``-th (panel, tile, column block) from ``first_item`` on; each adds 1 to its panel's counter."""
    BLOCK_M: tl.constexpr = GEMM.block_m
    BLOCK_N: tl.constexpr = GEMM.block_n
    D = sizes.D
    # In float32, what the compiler would compute ahead of this loop is too much for the registers.
    for item in tl.range(first_item, num_tiles * num_cols, stride, flatten=GEMM.flatten, disable_licm=not GEMM.flatten):
        tile, col, panel = decode_columns(item, num_tiles, num_cols, num_panels, GROUP_TILES)
        begin = now(GEMM.events, GEMM.interpret)
        expert = tl.load(tiles_ptr + tile * 4)
        first_row = tl.multiple_of(tl.load(tiles_ptr + tile * 4 + 1), BLOCK_M)
        num_rows = tl.load(tiles_ptr + tile * 4 + 2)
        if gemm.a_scales is None:
            product = multiply_tile(a_desc, b_desc, expert, first_row, col * BLOCK_N, sizes.contraction, GEMM)
        else:
            product = multiply_fp8_tile(
                a_desc, b_desc, gemm, expert, first_row, col * BLOCK_N, sizes.Q, D, sizes.contraction, BLOCK_M, BLOCK_N
            )  # fmt: skip
        product = with_bias(product, gemm.bias, expert, col * BLOCK_N, D)
        store_tile(gemm.y, product, first_row, col * BLOCK_N, num_rows, D)
        tl.atomic_add(panel_counters + panel, after_block(1, GEMM.interpret), sem="release", scope="gpu")
        if GEMM.events:  # read late: a register that is live through the GEMM's loop is one too many
            epoch = tl.load(symm.epoch)
            record(
                symm.events, KIND_LAYER1_TILE, epoch, tile, col, panel, begin, begin, GEMM.events, GEMM.interpret
            )  # fmt: skip
