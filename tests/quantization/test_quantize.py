"""The quantisers, to the bit: elements and scales are those of ml_dtypes, layouts those of published models."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    quantize_mx,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_rows,
)

ml_dtypes = pytest.importorskip("ml_dtypes", reason="install comet-moe[dev]")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
fit_mxfp8 = partial(quantize_mxfp8, rule="fit")
QUANTISERS: dict[str, Callable[..., Any]] = {
    "mxfp8 floor": quantize_mxfp8, "mxfp8 fit": fit_mxfp8, "mxfp4": quantize_mxfp4, "fp8": quantize_fp8,
    "rows": quantize_rows,
}  # fmt: skip
of_all_quantisers = pytest.mark.parametrize("quantise", QUANTISERS.values(), ids=QUANTISERS)


@dataclass(frozen=True)
class Elements:
    """Numbers of eight or four bits, as ml_dtypes has them."""

    kind: Any
    num_codes: int
    largest: float
    exponent: int  # the exponent of ``largest``

    @property
    def numbers(self) -> np.ndarray:
        """The float32 numbers of all codes."""
        return np.arange(self.num_codes, dtype=np.uint8).view(self.kind).astype(np.float32)

    def rounded(self, values: Tensor | np.ndarray) -> np.ndarray:
        """Return codes of numbers; larger numbers than ``largest`` become ``largest``."""
        limited = np.clip(np.asarray(values, np.float64), -self.largest, self.largest)
        return limited.astype(np.float32).astype(self.kind).view(np.uint8)


E4M3_NUMBERS = Elements(ml_dtypes.float8_e4m3fn, 256, 448.0, 8)
E2M1_NUMBERS = Elements(ml_dtypes.float4_e2m1fn, 16, 6.0, 2)


def elements_of(packed: MXFP8 | MXFP4 | FP8) -> Elements:
    return E2M1_NUMBERS if isinstance(packed, MXFP4) else E4M3_NUMBERS


def codes(packed: MXFP8 | MXFP4 | FP8) -> Tensor:
    """``(..., K)`` uint8; of a byte of MXFP4 the low half first."""
    found = packed.elements.view(torch.uint8)
    return torch.stack((found & 15, found >> 4), dim=-1).flatten(-2) if isinstance(packed, MXFP4) else found


def packed_codes(everything: Tensor, scales: Tensor, kind: type) -> MXFP8 | MXFP4:
    elements = everything[..., ::2] | everything[..., 1::2] << 4 if kind is MXFP4 else everything
    return kind(elements=elements if kind is MXFP4 else elements.view(torch.float8_e4m3fn), scales=scales)


def scales_in_float64(packed: MXFP8 | MXFP4) -> np.ndarray:
    return packed.scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def bits(values: Tensor) -> list[int]:
    """Return the bits of float32 numbers, so that the sign of zero counts, too."""
    return values.float().view(torch.int32).tolist()


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


def in_blocks(values: np.ndarray, largest: float) -> Tensor:
    """Return blocks ``(n, 1, 32)``, one for each row of ``values (n, m)``; ``largest`` comes first, so scales are 1."""
    blocks = torch.zeros(len(values), 1, 32)
    blocks[:, 0, 0] = largest
    blocks[:, 0, 1 : 1 + values.shape[1]] = torch.from_numpy(values)
    return blocks


@pytest.mark.parametrize(("kind", "form"), [(MXFP8, E4M3_NUMBERS), (MXFP4, E2M1_NUMBERS)])
def test_all_codes_and_scales_decode_as_the_library_says(kind: type, form: Elements) -> None:
    everything = (torch.arange(256) % form.num_codes).byte()
    packed = packed_codes(everything, torch.full((8,), 127, dtype=torch.uint8), kind)
    is_number = torch.from_numpy(~np.isnan(form.numbers)).repeat(256 // form.num_codes)
    for dtype in DTYPES:
        wanted = torch.from_numpy(form.numbers).to(dtype).repeat(256 // form.num_codes)
        found = packed.dequantize(dtype)
        assert bits(found[is_number]) == bits(wanted[is_number])
        assert torch.equal(~found.isnan(), is_number)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    pair = torch.tensor([form.rounded(each) for each in (1.0, -2.0)], dtype=torch.uint8).repeat(16)
    packed = packed_codes(pair.expand(255, 32), scales, kind)
    wanted = scales_in_float64(packed) * np.array([1.0, -2.0] * 16)
    assert np.array_equal(packed.dequantize().double().numpy()[:254], wanted[:254])
    decoded = decode_e8m0(torch.arange(256, dtype=torch.uint8), torch.float64)
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert np.array_equal(decoded.numpy(), wanted, equal_nan=True)
    assert torch.equal(decode_e8m0(torch.arange(255, dtype=torch.uint8)).double(), decoded[:255])


@of_all_quantisers
def test_numbers_come_back_and_middles_go_to_the_even_code(quantise: Callable[..., Any]) -> None:
    """Try every number, the middle between two, and its neighbours in float32, of both signs."""
    form = elements_of(quantise(torch.zeros(1, 32)))
    numbers = form.numbers[~np.isnan(form.numbers)]
    found = quantise(in_blocks(numbers[:, None], form.largest))
    assert codes(found)[:, 0, 1].tolist() == np.arange(form.num_codes, dtype=np.uint8)[~np.isnan(form.numbers)].tolist()
    positive = numbers[: len(numbers) // 2]
    middles = (positive[:-1] + positive[1:]) / 2
    beside = [np.nextafter(middles, np.float32(to)) for to in (0, 1000)]
    values = np.stack([sign * each for each in (middles, *beside) for sign in (1, -1)], axis=1)
    found = codes(quantise(in_blocks(values, form.largest)))[:, 0, 1:7]
    assert np.array_equal(found.numpy(), form.rounded(values))
    lower = np.arange(len(middles))
    assert found[:, 0].tolist() == (lower + lower % 2).tolist(), "ties go to the even code"


OF_MXFP8 = [  # largest number; its element and the scale by the rule floor, and by fit
    (448.0, (448, 1), (448, 1)),
    (464.0, (448, 1), (448, 1)),  # the tie between 448 and 480
    (464.1, (448, 1), (240, 2)),
    (511.0, (448, 1), (256, 2)),
    (512.0, (256, 2), (256, 2)),
    (255.0, (448, 0.5), (256, 1)),
    (2.0**127, (256, 2.0**119), (256, 2.0**119)),
    (FLOAT32_MAX, (448, 2.0**119), (448, 2.0**119)),  # one more and it would dequantise to infinity
    (2.0**-118, (256, 2.0**-126), (256, 2.0**-126)),
    (2.0**-120, (128, 2.0**-127), (128, 2.0**-127)),  # no smaller scale
    (2.0**-136, (2.0**-9, 2.0**-127), (2.0**-9, 2.0**-127)),
    (2.0**-137, (0, 2.0**-127), (0, 2.0**-127)),  # half of the smallest number goes to the even 0
    (2.0**-149, (0, 2.0**-127), (0, 2.0**-127)),
    (0.0, (0, 2.0**-127), (0, 2.0**-127)),
]
OF_MXFP4 = [
    (6.0, (6, 1)),
    (7.99, (6, 1)),  # saturates
    (8.0, (4, 2)),
    (5.0, (4, 1)),  # the tie between 4 and 6
    (3.9, (6, 0.5)),  # 7.8 saturates
    (65504.0, (6, 2.0**13)),
    (FLOAT32_MAX, (6, 2.0**125)),
    (2.0**-125, (4, 2.0**-127)),
    (2.0**-126, (2, 2.0**-127)),  # no smaller scale
    (2.0**-129, (0, 2.0**-127)),
    (2.0**-149, (0, 2.0**-127)),
    (0.0, (0, 2.0**-127)),
]
AMAXES = [("mxfp8 floor", largest, floor) for largest, floor, _ in OF_MXFP8]
AMAXES += [("mxfp8 fit", largest, fit) for largest, _, fit in OF_MXFP8]
AMAXES += [("mxfp4", *row) for row in OF_MXFP4]


@pytest.mark.parametrize(("name", "largest", "wanted"), AMAXES)
def test_scale_of_an_amax(name: str, largest: float, wanted: tuple[float, float]) -> None:
    packed, (number, scale) = QUANTISERS[name](torch.tensor([0.0] * 31 + [-largest])), wanted
    assert packed.scales.item() == 127 + math.log2(scale)
    assert packed.dequantize()[31].item() == -number * scale
    assert codes(packed)[31] == elements_of(packed).rounded(-float(number)), "the sign of zero is kept"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp8 floor", "mxfp8 fit", "mxfp4"])
def test_random_tensors_are_quantised_as_the_library_rounds(name: str, dtype: torch.dtype) -> None:
    weight = random_values((3, 20, 96), seed=11, dtype=dtype)
    packed = QUANTISERS[name](weight)
    form, blocks = elements_of(packed), weight.double().numpy().reshape(-1, 32)
    amax = np.abs(blocks).max(1)
    exponents = np.maximum(np.where(amax > 0, np.frexp(amax)[1] - 1 - form.exponent, -127), -127)
    if name == "mxfp8 fit":
        exponents += (amax / 2.0**exponents > 464) & (exponents < 119)
    assert packed.scales.shape == (3, 20, 3)
    assert (packed.scales.flatten().numpy() == exponents + 127).all()
    wanted = form.rounded(blocks / 2.0 ** exponents[:, None])
    assert np.array_equal(codes(packed).numpy(), wanted.reshape(3, 20, 96))
    exact = wanted.view(form.kind).astype(np.float64) * 2.0 ** exponents[:, None]
    assert np.array_equal(packed.dequantize().double().numpy(), exact.reshape(3, 20, 96)), "exact in float32"


def expected_fp8(values: np.ndarray, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Element codes and scales by loops over blocks: inverse and product in float32, bits cleared as an integer."""
    rows, columns = values.shape
    elements = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-rows // block_rows), -(-columns // 128)), np.float32)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * block_rows : (i + 1) * block_rows, j * 128 : (j + 1) * 128]
        quotient = np.maximum(np.abs(values[part]).max() / np.float32(448), np.float32(2.0**-126))
        scales[i, j] = (quotient.view(np.uint32) // 16 * 16).view(np.float32)
        elements[part] = E4M3_NUMBERS.rounded(values[part] * (np.float32(1) / scales[i, j]))
    return elements, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 129), (5, 300), (0, 128)])
@pytest.mark.parametrize("block_rows", [128, 1])
def test_fp8_blocks_and_rows_against_loops(shape: tuple[int, int], block_rows: int, dtype: torch.dtype) -> None:
    values = random_values(shape, seed=sum(shape), dtype=dtype)
    packed = (quantize_fp8 if block_rows == 128 else quantize_rows)(values)
    elements, scales = expected_fp8(values.float().numpy(), block_rows)
    assert np.array_equal(codes(packed).numpy(), elements)
    assert np.array_equal(packed.scales.numpy().view(np.uint32), scales.view(np.uint32))
    spread = scales.repeat(block_rows, 0).repeat(128, 1)[: shape[0], : shape[1]].astype(np.float64)
    exact = elements.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * spread
    is_exact = (np.abs(exact) >= 2.0**-126) | (spread >= 2.0**-121)
    assert np.array_equal(packed.dequantize().double().numpy()[is_exact], exact[is_exact]), "in float32"


@pytest.mark.parametrize("largest", [FLOAT32_MAX, 2.0**127, 448.0, 2.0**-117, 2.0**-126, 2.0**-149, 0.0])
def test_fp8_scale_of_extreme_blocks(largest: float) -> None:
    packed = quantize_fp8(torch.tensor([[largest, -0.0]]))
    wanted = max(2.0**-126, largest / 448)
    assert abs(packed.scales.item() / wanted - 1) < 2.0**-19
    error = abs(packed.dequantize()[0, 0].item() - largest)
    assert error <= max(largest * 2.0**-19, 2.0**-136)
    assert codes(packed)[0, 1] == 128


@of_all_quantisers
def test_strided_and_trainable_inputs_and_leading_dimensions(quantise: Callable[..., Any]) -> None:
    values = random_values((64, 3, 2, 160), seed=2)
    strided = values.permute(1, 2, 0, 3)[..., ::5]  # (3, 2, 64, 32), no stride of one
    packed = quantise(torch.nn.Parameter(strided))
    whole = quantise(strided.contiguous())
    assert not packed.elements.requires_grad
    assert not packed.scales.requires_grad
    assert torch.equal(codes(packed), codes(whole))
    assert torch.equal(packed.scales, whole.scales)
    turned = strided.mT.contiguous().mT  # columns are contiguous
    assert torch.equal(quantise(turned).dequantize(), whole.dequantize())
    for i, j in np.ndindex(3, 2):
        alone = quantise(strided[i, j])
        assert torch.equal(codes(packed)[i, j], codes(alone))
        assert torch.equal(packed.scales[i, j], alone.scales)
    assert quantise(torch.zeros(2, 0, 64)).dequantize().shape == (2, 0, 64)


def test_dequantised_half_types_are_rounded_once() -> None:
    values = random_values((40, 64), seed=3, dtype=torch.float16)
    for packed in (quantize_mxfp8(values), quantize_mxfp4(values), quantize_fp8(values), quantize_rows(values)):
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(packed.dequantize(dtype), packed.dequantize().to(dtype))
            assert packed.dequantize(dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["floor", "fit"])
def test_the_largest_numbers_stay_finite_in_their_own_type(rule: str, dtype: torch.dtype) -> None:
    """65504 is nearest to 256 * 2^8 = 65536, which is infinite in float16."""
    values = torch.finfo(dtype).max * torch.linspace(-1, 1, 320, dtype=torch.float64).view(10, 32).to(dtype)
    for packed in (quantize_mxfp8(values, rule=rule), quantize_fp8(values), quantize_rows(values)):
        off = (packed.dequantize(dtype).double() - values.double()).abs()
        assert (off <= 0.125 * values.double().abs().amax()).all()
    if dtype == torch.float16:
        assert quantize_mxfp8(values, rule="fit").dequantize(dtype)[-1, -1] == 61440


def test_layout_of_published_models() -> None:
    """gpt-oss stores (experts, rows, blocks, 16) bytes; transformers reads the low half of a byte first."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(6)
    packed = quantize_mxfp4(torch.randn(3, 8, 96, generator=generator))
    blocks = packed.elements.unflatten(-1, (-1, 16))
    theirs = mxfp4.convert_moe_packed_tensors(blocks, packed.scales, dtype=torch.float32)
    assert torch.equal(theirs.transpose(1, 2), packed.dequantize())


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
        (lambda: quantize_mx(torch.zeros(32), "fp8"), "stored='fp8' must be one of mxfp8, mxfp4"),
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
