"""The quantisers, to the bit, against the formats' definitions in Python integers and numpy bit arithmetic."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from comet.quantization.formats import (
    FP8,
    MXFP4,
    MXFP8,
    decode_e8m0,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_rows,
)

RULES = ["floor", "fit"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def e4m3_value(code: int) -> float:
    """The number a code stands for, from its bit fields: sign, 4 exponent bits with bias 7, 3 fraction bits."""
    sign, exponent, fraction = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if (exponent, fraction) == (15, 7):
        return math.nan
    return sign * float(fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))


MAGNITUDES = [e4m3_value(code) for code in range(127)]


def e4m3_code(value: Fraction | float, is_negative: bool) -> int:
    """The nearest code, ties to the even one; past the largest number, the largest."""
    size, above = abs(value), bisect_left(MAGNITUDES, abs(value))
    if above == len(MAGNITUDES):
        above -= 1
    elif above > 0:
        doubled, middle = 2 * size, MAGNITUDES[above - 1] + MAGNITUDES[above]  # both exact
        if doubled < middle or (doubled == middle and above % 2 == 1):
            above -= 1
    return above | (128 if is_negative else 0)


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def expected_mx_block(values: list[float], rule: str) -> tuple[list[int], int]:
    """Element codes and scale code of one block, in exact fractions."""
    amax = max(Fraction(abs(value)) for value in values)
    exponent = -127
    if amax:
        floor_log2 = math.floor(math.log2(amax))
        floor_log2 += (amax >= Fraction(2) ** (floor_log2 + 1)) - (amax < Fraction(2) ** floor_log2)
        exponent = max(-127, floor_log2 - 8)
        if rule == "fit":
            while exponent < 119 and amax / Fraction(2) ** exponent > 464:
                exponent += 1
    scale = Fraction(2) ** exponent
    return [e4m3_code(Fraction(value) / scale, math.copysign(1, value) < 0) for value in values], exponent + 127


def codes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)


def random_values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of all sizes the type has, some zero, some blocks flat, some in one binade."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    smallest, largest = (-149, 126) if dtype != torch.float16 else (-24, 13)
    spread = torch.randint(smallest, largest, (*shape[:-1], 1), generator=generator)
    near = torch.randint(-22, 1, shape, generator=generator)
    values = torch.ldexp(values.double(), (spread + near).double()).to(dtype)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, torch.zeros((), dtype=dtype), values)


def test_all_e4m3_codes_decode_and_come_back() -> None:
    everything = torch.arange(256, dtype=torch.uint8)
    exact = torch.tensor([e4m3_value(code) for code in range(256)])
    packed = MXFP8(elements=everything.view(torch.float8_e4m3fn), scales=torch.full((8,), 127, dtype=torch.uint8))
    is_number = ~exact.isnan()
    assert torch.equal(packed.dequantize()[is_number].view(torch.int32), exact[is_number].view(torch.int32))
    assert packed.dequantize().isnan().nonzero().flatten().tolist() == [127, 255]
    # One number beside 448 in each block, so that the scale is 1.
    for code in [code for code in range(256) if code % 128 != 127]:
        block = torch.zeros(32)
        block[0], block[1] = 448.0, e4m3_value(code)
        block[1] = -0.0 if code == 128 else block[1]
        for packed in (quantize_mxfp8(block), quantize_mxfp8(block, rule="fit"), quantize_fp8(block[None])):
            assert codes(packed.elements).flatten()[1] == code


def test_all_e8m0_codes() -> None:
    decoded = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert decoded.dtype == torch.float32
    for code in range(255):
        assert decoded[code].item() == math.ldexp(1.0, code - 127)
    assert decoded[255].isnan()
    for code in range(255):  # and every scale reaches the numbers
        elements = torch.full((32,), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        packed = MXFP8(elements=elements, scales=torch.tensor([code], dtype=torch.uint8))
        assert packed.dequantize().tolist() == [math.ldexp(1.0, code - 127)] * 32


def test_every_tie_goes_to_the_even_code_and_its_neighbours_to_the_nearer() -> None:
    for lower in range(126):
        middle = (MAGNITUDES[lower] + MAGNITUDES[lower + 1]) / 2
        even = lower + lower % 2
        below, above = (float(np.nextafter(np.float32(middle), np.float32(to))) for to in (0, 1000))
        block = torch.tensor([448.0, middle, -middle, below, above, -below, -above] + [0.0] * 25)
        wanted = [126, even, 128 + even, lower, lower + 1, 128 + lower, 129 + lower] + [0] * 25
        assert codes(quantize_mxfp8(block).elements).tolist() == wanted
        assert codes(quantize_fp8(block[None]).elements)[0].tolist() == wanted


@pytest.mark.parametrize(
    ("largest", "floor", "fit"),
    [  # (value of the element, scale)
        (448.0, (448, 1), (448, 1)),
        (464.0, (448, 1), (448, 1)),  # the tie between 448 and 480
        (464.1, (448, 1), (240, 2)),
        (511.0, (448, 1), (256, 2)),
        (512.0, (256, 2), (256, 2)),
        (255.0, (448, 0.5), (256, 1)),
        (2.0**127, (256, 2.0**119), (256, 2.0**119)),
        (FLOAT32_MAX, (448, 2.0**119), (448, 2.0**119)),  # one more and it would dequantise to infinity
        (2.0**-118, (512 / 2, 2.0**-126), (256, 2.0**-126)),
        (2.0**-120, (128, 2.0**-127), (128, 2.0**-127)),  # no smaller scale
        (2.0**-136, (2.0**-9, 2.0**-127), (2.0**-9, 2.0**-127)),
        (2.0**-137, (0, 2.0**-127), (0, 2.0**-127)),  # half of the smallest number goes to the even 0
        (2.0**-149, (0, 2.0**-127), (0, 2.0**-127)),
        (0.0, (0, 2.0**-127), (0, 2.0**-127)),
    ],
)
def test_mxfp8_scale_of_an_amax(largest: float, floor: tuple[float, float], fit: tuple[float, float]) -> None:
    for rule, (element, scale) in (("floor", floor), ("fit", fit)):
        packed = quantize_mxfp8(torch.tensor([0.0] * 31 + [-largest]), rule=rule)
        assert packed.elements[31].item() == -element
        assert math.copysign(1, packed.elements[31].item()) == -1, "the sign of zero is kept"
        assert decode_e8m0(packed.scales).item() == scale
        assert packed.dequantize()[31].item() == -element * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_random_tensors_are_quantised_as_exact_fractions_say(rule: str, dtype: torch.dtype) -> None:
    weight = random_values((3, 20, 96), seed=11, dtype=dtype)
    packed = quantize_mxfp8(weight, rule=rule)
    assert packed.elements.shape == weight.shape
    assert packed.scales.shape == (3, 20, 3)
    blocks = weight.float().reshape(-1, 32).tolist()
    wanted = [expected_mx_block(block, rule) for block in blocks]
    assert codes(packed.elements).reshape(-1, 32).tolist() == [elements for elements, _ in wanted]
    assert packed.scales.flatten().tolist() == [scale for _, scale in wanted]
    exact = [[e4m3_value(code) * 2.0 ** (scale - 127) for code in elements] for elements, scale in wanted]
    assert packed.dequantize().reshape(-1, 32).tolist() == exact  # Python floats are exact here: so is float32


def expected_fp8(values: np.ndarray, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Element codes and scales by loops over blocks: inverse and product in float32, bits cleared as an integer."""
    rows, columns = values.shape
    elements = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-rows // block_rows), -(-columns // 128)), np.float32)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * block_rows : (i + 1) * block_rows, j * 128 : (j + 1) * 128]
        quotient = np.abs(values[part]).max() / np.float32(448)
        bits = float_bits(float(quotient)) // 16 * 16 if quotient > 2.0**-126 else 1 << 23
        scales[i, j] = np.array(bits, np.uint32).view(np.float32)
        scaled = values[part] * (np.float32(1) / scales[i, j])
        elements[part] = [[e4m3_code(float(x), bool(np.signbit(x))) for x in row] for row in scaled]
    return elements, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 129), (5, 300), (0, 128)])
@pytest.mark.parametrize("block_rows", [128, 1])
def test_fp8_blocks_and_rows_against_loops(shape: tuple[int, int], block_rows: int, dtype: torch.dtype) -> None:
    values = random_values(shape, seed=sum(shape), dtype=dtype)
    packed = (quantize_fp8 if block_rows == 128 else quantize_rows)(values)
    elements, scales = expected_fp8(values.float().numpy(), block_rows)
    assert np.array_equal(codes(packed.elements).numpy(), elements)
    assert np.array_equal(packed.scales.numpy().view(np.uint32), scales.view(np.uint32))
    dequantised = packed.dequantize()
    for i, j in np.ndindex(*shape):
        if i % 40 == 0:
            exact = e4m3_value(int(elements[i, j])) * float(scales[i // block_rows, j // 128])
            assert dequantised[i, j].item() == exact, "dequantising is exact in float32"


@pytest.mark.parametrize("largest", [FLOAT32_MAX, 2.0**127, 448.0, 2.0**-117, 2.0**-126, 2.0**-149, 0.0])
def test_fp8_scale_of_extreme_blocks(largest: float) -> None:
    packed = quantize_fp8(torch.tensor([[largest, -0.0]]))
    wanted = max(2.0**-126, largest / 448)
    assert abs(packed.scales.item() / wanted - 1) < 2.0**-19
    error = abs(packed.dequantize()[0, 0].item() - largest)
    assert error <= max(largest * 2.0**-19, 2.0**-136)
    assert codes(packed.elements)[0, 1] == 128


def quantisers() -> dict:
    return {
        "mxfp8 floor": quantize_mxfp8,
        "mxfp8 fit": lambda values: quantize_mxfp8(values, rule="fit"),
        "mxfp4": quantize_mxfp4,
        "fp8": quantize_fp8,
        "rows": quantize_rows,
    }


@pytest.mark.parametrize("name", quantisers())
@pytest.mark.parametrize("seed", range(5))
def test_quantising_a_dequantised_tensor_gives_the_same_bits(name: str, seed: int) -> None:
    first = quantisers()[name](random_values((2, 140, 160), seed))
    second = quantisers()[name](first.dequantize())
    assert torch.equal(codes(first.elements), codes(second.elements))
    assert torch.equal(first.scales, second.scales)


@pytest.mark.parametrize("name", quantisers())
def test_strided_and_trainable_inputs_and_leading_dimensions(name: str) -> None:
    values = random_values((64, 3, 2, 160), seed=2)
    strided = values.permute(1, 2, 0, 3)[..., ::5]  # (3, 2, 64, 32), no stride of one
    packed = quantisers()[name](torch.nn.Parameter(strided))
    whole = quantisers()[name](strided.contiguous())
    assert not packed.elements.requires_grad
    assert not packed.scales.requires_grad
    assert torch.equal(codes(packed.elements), codes(whole.elements))
    assert torch.equal(packed.scales, whole.scales)
    for i, j in np.ndindex(3, 2):
        alone = quantisers()[name](strided[i, j])
        assert torch.equal(codes(packed.elements[i, j]), codes(alone.elements))
        assert torch.equal(packed.scales[i, j], alone.scales)
    assert quantisers()[name](torch.zeros(2, 0, 64)).dequantize().shape == (2, 0, 64)


def test_dequantised_half_types_are_rounded_once() -> None:
    values = random_values((40, 64), seed=3, dtype=torch.float16)
    for packed in (quantize_mxfp8(values), quantize_mxfp4(values), quantize_fp8(values), quantize_rows(values)):
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(packed.dequantize(dtype), packed.dequantize().to(dtype))
            assert packed.dequantize(dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_the_largest_numbers_stay_finite_in_their_own_type(rule: str, dtype: torch.dtype) -> None:
    """65504 is nearest to 256 * 2^8 = 65536, which is infinite in float16."""
    values = torch.finfo(dtype).max * torch.linspace(-1, 1, 320, dtype=torch.float64).view(10, 32).to(dtype)
    for packed in (quantize_mxfp8(values, rule=rule), quantize_fp8(values), quantize_rows(values)):
        off = (packed.dequantize(dtype).double() - values.double()).abs()
        assert (off <= 0.125 * values.double().abs().amax()).all()
    if dtype == torch.float16:
        assert quantize_mxfp8(values, rule="fit").dequantize(dtype)[-1, -1] == 61440


def test_fit_has_the_smaller_mean_square_error() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 1024, generator=generator)
    for weight in (normal, torch.rand(64, 1024, generator=generator) - 0.5, (2 * normal).exp()):
        floor, fit = ((quantize_mxfp8(weight, rule=rule).dequantize() - weight).square().mean() for rule in RULES)
        assert fit < 0.9 * floor


def test_worked_examples() -> None:
    block = torch.tensor([-5.0, 1.0, 0.3] + [0.0] * 29)
    packed = quantize_mxfp8(block)
    assert packed.scales.tolist() == [121]
    assert packed.elements.float().tolist() == [-320.0, 64.0, 20.0] + [0.0] * 29
    assert packed.dequantize().tolist() == [-5.0, 1.0, 0.3125] + [0.0] * 29
    packed = quantize_fp8(torch.tensor([[7.0, -1.0, 0.3]]))
    assert packed.scales.tolist() == [[2.0**-6]]
    assert packed.elements.float().tolist() == [[448.0, -64.0, 20.0]]
    assert packed.dequantize().tolist() == [[7.0, -1.0, 0.3125]]
    packed = quantize_rows(torch.tensor([[7.0, -1.0], [14.0, 0.3]]))
    assert packed.scales.tolist() == [[2.0**-6], [2.0**-5]]
    assert packed.elements.float().tolist() == [[448.0, -64.0], [448.0, 10.0]]
    assert packed.dequantize().tolist() == [[7.0, -1.0], [14.0, 0.3125]]
    decoded = decode_e8m0(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert decoded[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert decoded[4].isnan()


def with_bad(value: float, *where: int, shape: tuple[int, ...] = (2, 3, 64)) -> Tensor:
    values = torch.zeros(shape)
    values[where] = value
    values[-1, -1, -1] = math.nan  # not the first one
    return values


E4M3 = torch.zeros(4, 64, dtype=torch.float8_e4m3fn)
E2M1 = torch.zeros(4, 32, dtype=torch.uint8)
BYTES = torch.full((4, 2), 127, dtype=torch.uint8)
E8M0 = BYTES.view(torch.float8_e8m0fnu)
NOT_A_SCALE = torch.tensor([[0, 254]] * 3 + [[1, 255]]).byte()
ONES = torch.ones(4, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_mxfp8(torch.zeros(4, 48)), "contraction=48 must be a positive multiple of 32"),
        (lambda: quantize_mxfp8(torch.zeros(4, 0)), "contraction=0 must be a positive multiple of 32"),
        (lambda: quantize_mxfp8(torch.tensor(1.0)), "contraction=0 must be a positive multiple of 32"),
        (lambda: quantize_mxfp8(torch.zeros(32, dtype=torch.int8)), "weight.dtype=torch.int8 must be one of"),
        (lambda: quantize_mxfp8(torch.zeros(32).double()), "weight.dtype=torch.float64 must be one of"),
        (lambda: quantize_mxfp8(torch.zeros(32), rule="ceil"), "rule='ceil' must be one of ('floor', 'fit')"),
        (lambda: quantize_mxfp8(with_bad(math.nan, 0, 2, 5)), "weight[0, 2, 5]=nan must be finite"),
        (lambda: quantize_mxfp8(with_bad(-math.inf, 1, 0, 63)), "weight[1, 0, 63]=-inf must be finite"),
        (lambda: quantize_mxfp8(with_bad(math.inf, 1, 0, 33).half()), "weight[1, 0, 33]=inf must be finite"),
        (lambda: quantize_mxfp4(torch.zeros(4, 48)), "contraction=48 must be a positive multiple of 32"),
        (lambda: quantize_mxfp4(torch.zeros(32).double()), "weight.dtype=torch.float64 must be one of"),
        (lambda: quantize_mxfp4(with_bad(math.nan, 0, 2, 5)), "weight[0, 2, 5]=nan must be finite"),
        (lambda: quantize_fp8(with_bad(math.nan, 0, 2, 5)), "weight[0, 2, 5]=nan must be finite"),
        (lambda: quantize_rows(with_bad(math.inf, 0, 1, 0)), "tokens[0, 1, 0]=inf must be finite"),
        (lambda: quantize_rows(torch.zeros(4, 8).int()), "tokens.dtype=torch.int32 must be one of"),
        (lambda: quantize_rows(torch.zeros(8)), "tokens.shape=(8,) must be (..., rows, columns), columns at least 1"),
        (lambda: quantize_fp8(torch.zeros(4, 0)), "weight.shape=(4, 0) must be (..., rows, columns), columns at least"),
        (lambda: MXFP8(elements=E4M3.byte(), scales=BYTES), "elements of dtype torch.uint8 must be torch.float8"),
        (lambda: MXFP8(elements=E4M3[:, :40], scales=BYTES), "contraction=40 must be a positive multiple of 32"),
        (lambda: MXFP8(elements=E4M3, scales=E8M0), "float8_e8m0fnu must be torch.uint8 (view e8m0 scales as uint8)"),
        (lambda: MXFP8(elements=E4M3, scales=BYTES[:, :1]), "scales of shape (4, 1) must be (..., K/32) = (4, 2) with"),
        (lambda: MXFP8(elements=E4M3, scales=NOT_A_SCALE), "scales[3, 1]=255 must be at most 254; 255 is the NaN of"),
        (lambda: MXFP8(elements=E4M3, scales=BYTES.to("meta")), "scales is on meta, must be on cpu"),
        (lambda: MXFP4(elements=E4M3, scales=BYTES), "elements of dtype torch.float8_e4m3fn must be torch.uint8"),
        (lambda: MXFP4(elements=E2M1[:, :24], scales=BYTES), "contraction=48 must be a positive multiple of 32"),
        (lambda: MXFP4(elements=torch.tensor(1).byte(), scales=BYTES), "elements of shape () must be (..., K/2)"),
        (lambda: MXFP4(elements=E2M1, scales=BYTES[:, :1]), "scales of shape (4, 1) must be (..., K/32) = (4, 2) with"),
        (lambda: MXFP4(elements=E2M1, scales=NOT_A_SCALE), "scales[3, 1]=255 must be at most 254; 255 is the NaN of"),
        (lambda: FP8(elements=E4M3, scales=ONES), "scales of shape (4, 1) must be (..., N/128, K/128) = (1, 1) with"),
        (lambda: FP8(elements=E4M3, scales=ONES[:1].half()), "scales of dtype torch.float16 must be torch.float32"),
        (lambda: FP8(elements=E4M3.half(), scales=ONES), "elements of dtype torch.float16 must be torch.float8_e4m3fn"),
        (lambda: FP8(elements=E4M3, scales=ONES, block_rows=64), "block_rows=64 must be 1 or 128"),
        (lambda: FP8(elements=E4M3, scales=ONES * math.inf, block_rows=1), "scales[0, 0]=inf must be finite and not"),
        (lambda: FP8(elements=E4M3, scales=-ONES[:1]), "scales[0, 0]=-1.0 must be finite and not negative"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_scales_that_are_trusted_are_not_looked_at() -> None:
    scales = torch.full((4, 2), 255, dtype=torch.uint8)
    for kind, elements in ((MXFP8, E4M3), (MXFP4, E2M1)):
        assert kind(elements=elements, scales=scales, trusted=True).scales is scales
        with pytest.raises(ValueError, match="must be at most 254"):
            kind(elements=elements, scales=scales)
