"""Device functions of the decode kernels for quantised weights: numbers, scales, and tokens in the order of the lanes.

``StepConstants.shared_scale`` says how many neighbours along the contraction share a scale, and so the layout:

* 0: float32, float16 or bfloat16 weights, without scales.
* 32, the MX types: every row has its own; e8m0 codes, 2^(code - 127), ``(S, rows, columns / 32)`` uint8.
* 128, block FP8: 128 rows share one too; ``(S, ceil(rows / 128), ceil(columns / 128))`` float32.

``lane``, weights in the 16 bytes that a thread loads at once, distinguishes MXFP4 from MXFP8: 32 and 16. The kernels
read MXFP4 as int32 words of eight e2m1 codes, for bits are shifted in words. Weights of block FP8 and MXFP8 are e4m3.

Where scales apply. *vector*: to the sum of a lane's products, whose weights share a scale. *matrix*: those of MX to the
weights, because a power of two rounds none above 2^-126; block FP8 to what 128 of the contraction add to the sums,
a part of a step that may be longer.
"""

import triton
import triton.language as tl

from .routing import lane_products, load_columns

MX = tl.constexpr(32)
BLOCK = tl.constexpr(128)
EIGHT = tl.constexpr(8)  # neighbours of a token in one load, and e2m1 codes in a word
CODED_LANE = tl.constexpr(32)  # e2m1 codes in 16 bytes
E2M1_IN_HALF = tl.constexpr(2.0**14)  # the biases of float16 and e2m1 are 15 and 1
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as ``triton.jit`` asks it, once


def _parts_asm() -> str:
    """A word of codes as eight float32: each code's bits go to the high byte of a float16, in four bytes at once.

    The codes of even and of odd places are moved apart; a pair of float16 has the codes k and k + 4.
    """
    lines = ["{.reg .b32 signs, sizes, codes, pair; .reg .b16 low, high;"]
    for place, sign_shift, size_shift in ((0, "shl.b32 signs, $8, 4;", "shl.b32 sizes, $8, 1;"),
                                          (1, "mov.b32 signs, $8;", "shr.u32 sizes, $8, 3;")):  # fmt: skip
        lines += [sign_shift, "and.b32 signs, signs, 0x80808080;", size_shift, "and.b32 sizes, sizes, 0x0E0E0E0E;"]
        lines += ["or.b32 codes, signs, sizes;"]
        for k, bytes_of_pair in ((place, "0x2404"), (place + 2, "0x3414")):
            lines += [f"prmt.b32 pair, codes, 0, {bytes_of_pair};", "mov.b32 {low, high}, pair;"]
            lines += [f"cvt.f32.f16 ${k}, low;", f"cvt.f32.f16 ${k + 4}, high;"]
    return " ".join([*lines, "}"])


def _bfloat16_asm() -> str:
    """A word of codes as eight bfloat16: the bits of the codes k and k + 4 as two subnormal numbers, times 2^126."""
    lines = ["{.reg .b32 signs, sizes, pair, power, zero; mov.b32 power, 0x7E807E80; mov.b32 zero, 0x80008000;"]
    for k in range(4):
        up, down = 6 - 4 * k, 4 * k - 6
        lines += [f"shl.b32 signs, $8, {12 - 4 * k};", "and.b32 signs, signs, 0x80008000;"]
        lines += [f"shl.b32 sizes, $8, {up};" if up > 0 else f"shr.u32 sizes, $8, {down};"]
        lines += ["and.b32 sizes, sizes, 0x01C001C0;", "or.b32 pair, signs, sizes;"]
        lines += ["fma.rn.bf16x2 pair, pair, power, zero;", f"mov.b32 {{${k}, ${k + 4}}}, pair;"]
    return " ".join([*lines, "}"])


PARTS_ASM, BFLOAT16_ASM = tl.constexpr(_parts_asm()), tl.constexpr(_bfloat16_asm())
EIGHT_FLOATS, EIGHT_HALVES = tl.constexpr("=f," * 8 + "r"), tl.constexpr("=h," * 8 + "r")


@triton.constexpr_function
def in_number(lane: int) -> int:
    """Weights in one element of memory, by those in 16 bytes: 8 where it is a word of e2m1 codes, else 1."""
    return EIGHT.value if lane == CODED_LANE.value else 1


@triton.jit
def stored_length(columns, LANE: tl.constexpr):
    """Elements of memory that hold a row of ``columns`` weights; the compiler learns that rows start at 16 bytes."""
    NUMBER: tl.constexpr = in_number(LANE)
    if NUMBER == 1:
        return columns
    else:
        return tl.multiple_of(columns // NUMBER, CODED_LANE // NUMBER)


@triton.jit
def in_order(numbers):
    """``(R, 8 C)`` of eight ``(R, C)``, the numbers of the codes 0 to 7 of each word."""
    # A code's place in its word is, bit by bit, which of a pair, of two pairs of even or odd places, and of both.
    evens = tl.join(tl.join(numbers[0], numbers[4]), tl.join(numbers[2], numbers[6]))
    odds = tl.join(tl.join(numbers[1], numbers[5]), tl.join(numbers[3], numbers[7]))
    return tl.join(evens, odds).reshape(numbers[0].shape[0], numbers[0].shape[1] * EIGHT)


@triton.jit
def e2m1_parts(words):
    """``(R, 8 C)`` float32: the 2^14th parts of the numbers whose codes are in ``words (R, C)`` int32.

    Sign, exponent and fraction of a code go to where float16 has them, whose bias is larger by 14.

    Example: the word 0x000F0001 has the codes 1 (0.5), 0, 0, 0, 15 (-6), 0, 0, 0. The float16 numbers of the first and
    the fifth are 0x0200 and 0x8E00: 0.5 * 2^-14 and -6 * 2^-14.
    """
    numbers = ()
    if INTERPRETED:
        for k in tl.static_range(8):
            code = (words >> (4 * k)) & 15
            half = ((code & 8) << 12) | ((code & 7) << 9)
            numbers += (half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
    else:
        numbers = tl.inline_asm_elementwise(
            PARTS_ASM, EIGHT_FLOATS, [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    return in_order(numbers)


@triton.jit
def load_stored(
    scales_ptr, slot, rows, k, groups, num_rows, num_cols,
    SCALES: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scales as they are stored, of a slot's weights at ``rows`` and in ``groups`` of the step that starts at ``k``.

    Blocks of integers that broadcast. The step is a power of two and divides ``k``; EVEN says that it divides the
    contraction. The scales of a row, and those before ``k``, are multiples of WIDTH.
    """
    row_length = tl.cdiv(num_cols, SCALES)
    if SCALES == BLOCK:
        rows = rows // BLOCK
        num_rows = tl.cdiv(num_rows, BLOCK)
    of_slot = slot.to(tl.int64) * num_rows * row_length
    of_rows = rows * row_length + k // SCALES
    if WIDTH > 1:
        of_slot, of_rows = tl.multiple_of(of_slot, WIDTH), tl.multiple_of(of_rows, [WIDTH, WIDTH])
    return load_columns(scales_ptr + of_slot + of_rows + groups, k // SCALES + groups < row_length, EVEN, "")


@triton.jit
def scale_values(stored, SCALES: tl.constexpr):
    """float32 of what is stored."""
    if SCALES == MX:
        # A scale is the exponent field of a float32, but for code 0: 2^-127 is half of the smallest normal number.
        return tl.maximum(stored.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        return stored


@triton.jit
def lane_scales(scales_ptr, slot, first_row, k, num_rows, num_cols, EVERY: tl.constexpr, STEP: tl.constexpr):
    """Vector form: ``(rows or 1, depth / lane)`` float32 scales of the lanes' weights; 0 if there are none.

    Of every EVERYth row; ``STEP.rows`` divides 16 and ``first_row``, so one block of 128 rows holds them all.
    """
    if STEP.shared_scale == 0:
        return 0
    else:
        rows = first_row + EVERY * tl.arange(0, STEP.rows if STEP.shared_scale == MX else 1)[None, :]
        groups = tl.arange(0, STEP.depth // STEP.lane)[:, None] * STEP.lane // STEP.shared_scale
        # Neighbouring lanes share a scale, which hides from the compiler that groups are neighbours in memory; it then
        # lays the first axis along the lanes. Written the other way round, scales would change lanes.
        stored = load_stored(scales_ptr, slot, rows, k, groups, num_rows, num_cols, STEP.shared_scale, STEP.even, 1)
        return scale_values(stored, STEP.shared_scale).T


@triton.jit
def lane_columns(ROWS: tl.constexpr, BLOCK_K: tl.constexpr, LANE: tl.constexpr, SCALES: tl.constexpr):
    """The columns of a step whose addresses ``load_lanes`` takes: all, or with scales the first 8 of each lane's.

    Rows that share a warp, because the step is shorter than 16 bytes for each of its lanes, have a copy of the token
    each: otherwise loads would be narrower and elements change lanes. Copies have one address, and cost no traffic.

    Example (BLOCK_K = 32, LANE = 16): 0 .. 31 without scales; with them 0 .. 7, 16 .. 23, up to 16 times. In MXFP4
    (BLOCK_K = 64, LANE = 32): 0 .. 7, 32 .. 39.
    """
    if SCALES == 0:
        return tl.arange(0, BLOCK_K)
    else:
        COPIES: tl.constexpr = min(ROWS, max(1, 32 * LANE // BLOCK_K))
        LENGTH: tl.constexpr = BLOCK_K // LANE * EIGHT
        index = tl.arange(0, LENGTH)
        return tl.broadcast_to((index // EIGHT * LANE + index % EIGHT)[None, :], (COPIES, LENGTH))


@triton.jit
def load_lanes(ptrs, in_range, STEP: tl.constexpr):
    """A step of a token, LANE neighbours in a thread as its weights are: ``(BLOCK_K,)``, or ``(copies, BLOCK_K)``.

    16 weights of a byte meet 32 bytes of the token: two loads, joined in registers, and 32 of half a byte four. A load
    of the whole step would give each thread 8 neighbours, and moving them to the threads of their weights would take
    shared memory.
    """
    low = load_columns(ptrs, in_range, STEP.even, "evict_last")
    if STEP.shared_scale == 0:
        return low
    else:
        LANE: tl.constexpr = STEP.lane
        copies: tl.constexpr = low.shape[0]
        lanes: tl.constexpr = low.shape[1] // EIGHT
        high = load_columns(ptrs + LANE // 2, in_range, STEP.even, "evict_last")
        if LANE == CODED_LANE:
            low = tl.join(low, load_columns(ptrs + EIGHT, in_range, STEP.even, "evict_last"))
            high = tl.join(high, load_columns(ptrs + LANE // 2 + EIGHT, in_range, STEP.even, "evict_last"))
            parts = tl.join(low, high).reshape(copies, lanes, EIGHT, 2, 2).permute(0, 1, 4, 3, 2)
        else:
            parts = tl.join(low, high).reshape(copies, lanes, EIGHT, 2).permute(0, 1, 3, 2)
        return parts.reshape(copies, lanes * LANE)


@triton.jit
def scaled_products(weights, x, scales, STEP: tl.constexpr):
    """``lane_products`` of the weights with their scales; ``x`` from ``load_lanes``."""
    LANE: tl.constexpr = STEP.lane
    if STEP.shared_scale == 0:
        return lane_products(weights, x, LANE)
    else:
        rows: tl.constexpr = weights.shape[0]
        copies: tl.constexpr = x.shape[0]
        columns: tl.constexpr = x.shape[1]
        if LANE == CODED_LANE:
            weights = e2m1_parts(weights)
        by_copy = weights.reshape(rows // copies, copies, columns).to(tl.float32)
        products = (by_copy * x.to(tl.float32)[None, :, :]).reshape(rows, columns // LANE, LANE)
        sums = tl.sum(products, axis=2)
        if LANE == CODED_LANE:
            sums *= E2M1_IN_HALF
        return sums * scales


@triton.constexpr_function
def part_of(depth: int, shared_scale: int) -> int:
    """Matrix form: columns of a step that are multiplied at once; a step of block FP8 has a part for each scale.

    Example: of a step of 256, 256 without scales and with those of MX, 128 with those of block FP8.
    """
    return min(depth, BLOCK.value) if shared_scale == BLOCK.value else depth


@triton.jit
def step_scales(scales_ptr, slot, rows, k, num_rows, num_cols, STEP: tl.constexpr):
    """Matrix form: for each part of a step its weights' ``part_scales``."""
    PART: tl.constexpr = part_of(STEP.depth, STEP.shared_scale)
    found = ()
    for part in tl.static_range(STEP.depth // PART):
        found += (part_scales(scales_ptr, slot, rows, k + part * PART, num_rows, num_cols, PART, STEP),)
    return found


@triton.jit
def part_scales(scales_ptr, slot, rows, k, num_rows, num_cols, PART: tl.constexpr, STEP: tl.constexpr):
    """``(R, PART / 32)`` (MX) or ``(R, 1)`` float32 scales of a part; 0 if there are none.

    Where the contraction is a multiple of the step, a row's codes are one load, which runs ahead as the weights do.
    """
    SCALES: tl.constexpr = STEP.shared_scale
    if SCALES == 0:
        return 0
    else:
        WIDTH: tl.constexpr = PART // MX if SCALES == MX else 1
        groups = tl.arange(0, WIDTH)[None, :]
        stored = load_stored(
            scales_ptr, slot, rows[:, None], k, groups, num_rows, num_cols, SCALES, STEP.even, WIDTH if STEP.even else 1
        )
        return scale_values(stored, SCALES)


@triton.jit
def step_and_next_scales(ahead, scales_ptr, slot, rows, k, num_rows, num_cols, STEP: tl.constexpr):
    """``(scales of the step at k, what to pass as ahead in the next step)``; at the first, ``step_scales`` of it.

    The compiler makes no pipeline of the loads of block FP8, one number for 128 rows; unless they are loaded a step
    ahead, every step waits for memory.
    """
    if STEP.shared_scale == BLOCK:
        # The last step loads its own again: a mask would take registers.
        following = tl.where(k + STEP.depth < num_cols, k + STEP.depth, k)
        return ahead, step_scales(scales_ptr, slot, rows, following, num_rows, num_cols, STEP)
    else:
        return step_scales(scales_ptr, slot, rows, k, num_rows, num_cols, STEP), ahead


@triton.jit
def scaled_dot(weights, x, sums, scales, STEP: tl.constexpr):
    """Matrix form: ``sums`` plus the weights ``(R, PART)``, or words of them, with their scales times the tokens
    ``(T, PART)``.
    """
    if STEP.shared_scale == 0:
        return tl.dot(weights, x.T, sums, input_precision=STEP.precision)
    elif STEP.shared_scale == BLOCK:
        return sums + scales * tl.dot(widen(weights, x.dtype), x.T, input_precision=STEP.precision)
    else:
        if x.dtype == tl.float16:
            # float16 cannot hold every scale; tf32 holds the fractions of float16, e4m3 and e2m1, and every exponent.
            x = x.to(tl.float32)
        rows: tl.constexpr = weights.shape[0]
        by_scale = widen(weights, x.dtype).reshape(rows, scales.shape[1], MX)
        weights = (by_scale * scales.to(x.dtype)[:, :, None]).reshape(rows, x.shape[1])
        # A product of its own, added afterwards; the last argument, which means nothing here, keeps the compiler from
        # accumulating in place. It would then split the product, and every piece wait for the one before.
        return sums + tl.dot(weights, x.T, input_precision=STEP.precision, max_num_imprecise_acc=MX)


@triton.jit
def matrix_products(
    row_ptrs, valid, desc, corner, scales_ptr, slot, weight_rows, num_rows, num_cols, STEP: tl.constexpr
):  # fmt: skip
    """Matrix form: ``(R, T)`` float32, R rows of a slot's weights times T rows of ``num_cols`` numbers at ``row_ptrs``.

    ``desc`` shows the weights, ``corner`` says where there, but for the column; ``weight_rows`` are their ``num_rows``.
    """
    PART: tl.constexpr = part_of(STEP.depth, STEP.shared_scale)
    NUMBER: tl.constexpr = in_number(STEP.lane)
    ROWS: tl.constexpr = weight_rows.shape[0]
    ks = tl.arange(0, PART)
    ptrs = row_ptrs + ks[None, :]
    sums = tl.zeros((ROWS, row_ptrs.shape[0]), dtype=tl.float32)
    ahead = step_scales(scales_ptr, slot, weight_rows, 0, num_rows, num_cols, STEP)
    for k in range(0, num_cols, STEP.depth):
        xs, ws = (), ()
        for part in tl.static_range(STEP.depth // PART):
            at = k + part * PART
            # The tail needs the mask; rows that are not valid are masked so that nothing is read for them.
            xs += (tl.load(ptrs + at, mask=valid[:, None] & (STEP.even | (at + ks < num_cols)[None, :]), other=0.0),)
            ws += (desc.load(corner + (at // NUMBER,)).reshape(ROWS, PART // NUMBER),)  # noqa: RUF005 - as Triton has it
        scales, ahead = step_and_next_scales(ahead, scales_ptr, slot, weight_rows, k, num_rows, num_cols, STEP)
        for part in tl.static_range(STEP.depth // PART):
            sums = scaled_dot(ws[part], xs[part], sums, scales[part], STEP)
    return sums


@triton.jit
def widen(weights, dtype: tl.constexpr):
    """e4m3 weights, or words of e2m1 codes, in a type that holds them all."""
    if weights.dtype == tl.int32 and dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            BFLOAT16_ASM, EIGHT_HALVES, [weights], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
        return in_order(numbers)
    elif weights.dtype == tl.int32:
        return (e2m1_parts(weights) * E2M1_IN_HALF).to(dtype)
    elif dtype == tl.bfloat16:
        # Converted to bfloat16 directly they would go one by one through a unit with a quarter of the speed.
        return weights.to(tl.float32).to(tl.bfloat16)
    else:
        return weights.to(dtype)
