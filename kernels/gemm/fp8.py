"""Block FP8 inside kernels: e4m3 elements with float32 scales, as ``comet.quantization.formats`` defines them.

A weight has a scale per block of 128 x 128, an activation one per row and 128 columns. A packed row is what travels: D
bytes of elements, then D / 128 scales.
"""

import triton
import triton.language as tl
from torch import Tensor

SCALE_GROUP = 128  # columns that share a scale, and rows of a weight's block
PACKED_GROUPS = 32  # groups of 128 columns of one block

GROUP = tl.constexpr(SCALE_GROUP)
E4M3_MAX = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
SCALE_BITS = tl.constexpr(-16)  # all but the last 4: element times scale is exact in float32
SMALLEST_STEP_EXPONENT = tl.constexpr(127 - 9)  # e4m3 numbers below 2^-6 are multiples of 2^-9
ROUNDER = tl.constexpr(1.5 * 2**23)  # plus and minus that many steps rounds to a whole step, ties to even


@triton.jit
def to_e4m3(values, INTERPRET: tl.constexpr):
    """float32 to the nearest e4m3, ties to even; past 448 becomes 448."""
    if INTERPRET:  # its cast cuts off
        values = tl.minimum(tl.maximum(values, -E4M3_MAX), E4M3_MAX)
        bits = values.to(tl.int32, bitcast=True)
        exponents = tl.maximum(((bits >> 23) & 0xFF) - 3, SMALLEST_STEP_EXPONENT)
        shift = (exponents << 23).to(tl.float32, bitcast=True) * ROUNDER
        magnitudes = tl.abs(values) + shift - shift
        values = (magnitudes.to(tl.int32, bitcast=True) | ((bits >> 31) << 31)).to(tl.float32, bitcast=True)
    return values.to(tl.float8e4nv)


@triton.jit
def group_scales(values):
    """Scales ``(M,)`` of the rows of float32 ``values (M, 128)``, as ``comet.quantization`` finds them."""
    largest = tl.max(tl.abs(values), axis=1)
    scales = tl.maximum(tl.math.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32)), SMALLEST_SCALE)
    return (scales.to(tl.int32, bitcast=True) & SCALE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def scaled_elements(values, scales, INTERPRET: tl.constexpr):
    """``values (M, 128)`` times the inverses of their scales ``(M,)``, in e4m3, by the same rule."""
    inverses = tl.math.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    return to_e4m3(values * inverses[:, None], INTERPRET)


@triton.jit
def pack_rows_kernel(
    x_ptr, words_ptr, num_groups, row_words, D: tl.constexpr, GROUPS: tl.constexpr, INTERPRET: tl.constexpr
):
    """Quantise GROUPS groups of 128 columns of the rows ``(T, D)``; ``num_groups`` = T * D / 128."""
    per_row: tl.constexpr = D // GROUP
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    valid = groups < num_groups
    cols = tl.arange(0, GROUP)
    values = tl.load(x_ptr + groups[:, None].to(tl.int64) * GROUP + cols[None, :], mask=valid[:, None], other=0.0)
    values = values.to(tl.float32)
    scales = group_scales(values)
    elements = scaled_elements(values, scales, INTERPRET)
    row = (groups // per_row).to(tl.int64) * row_words
    in_row = groups % per_row
    first_byte = tl.multiple_of(row * 4 + in_row * GROUP, 16)
    tl.store(
        words_ptr.to(tl.pointer_type(tl.float8e4nv)) + first_byte[:, None] + cols[None, :], elements, valid[:, None]
    )  # fmt: skip
    tl.store(words_ptr.to(tl.pointer_type(tl.float32)) + row + D // 4 + in_row, scales, valid)


def pack_rows(x: Tensor, words: Tensor) -> None:
    """Quantise rows to e4m3 with a scale per 128 columns, as ``quantize_rows`` of ``comet.quantization.formats`` does.

    Args:
        x: ``(T, D)`` contiguous, D a multiple of 128.
        words: ``(T, ..)`` int32, result: elements in the first D bytes of a row, then scales; 64 bytes a multiple.
    """
    num_tokens, hidden_size = x.shape
    num_groups = num_tokens * (hidden_size // SCALE_GROUP)
    if num_groups:
        pack_rows_kernel[(-(-num_groups // PACKED_GROUPS),)](
            x, words, num_groups, words.shape[1], D=hidden_size, GROUPS=PACKED_GROUPS,
            INTERPRET=triton.knobs.runtime.interpret, num_warps=4,
        )  # fmt: skip
