"""MXFP4 to the bit, against ml_dtypes' e2m1 and e8m0 and against how transformers reads published models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from comet.quantization.formats import MXFP4, decode_e8m0, quantize_mxfp4

ml_dtypes = pytest.importorskip("ml_dtypes", reason="install comet-moe[dev]")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL_NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def in_block(*values: float) -> Tensor:
    """A block whose largest magnitude is 6, so that its scale is 1."""
    return torch.tensor([6.0, *values] + [0.0] * (31 - len(values)))


def codes(packed: MXFP4) -> Tensor:
    """``(..., K)`` uint8 of the bytes, the low half of each first."""
    return torch.stack((packed.elements & 15, packed.elements >> 4), dim=-1).flatten(-2)


def by_library(values: Tensor) -> np.ndarray:
    """Codes that ml_dtypes rounds to; a number past 6 is given to it as 6."""
    limited = values.float().clamp(-6, 6).numpy()
    return limited.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def test_all_codes_decode_as_the_library_says_and_come_back() -> None:
    everything = torch.arange(32, dtype=torch.uint8) % 16
    packed = MXFP4(elements=everything[::2] | everything[1::2] << 4, scales=torch.tensor([127]).byte())
    for dtype in DTYPES:
        wanted = torch.from_numpy(ALL_NUMBERS).to(dtype).float()
        assert bits(packed.dequantize(dtype).float()) == bits(wanted.repeat(2)), "the sign of zero counts, too"
    back = quantize_mxfp4(packed.dequantize())
    assert torch.equal(back.elements, packed.elements)
    assert torch.equal(back.scales, packed.scales)


def test_all_scales_decode_as_the_library_says() -> None:
    everything = torch.arange(256, dtype=torch.uint8)
    wanted = everything.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert np.array_equal(decode_e8m0(everything, torch.float64).numpy(), wanted, equal_nan=True)
    for scale in range(255):  # and every scale reaches the numbers
        packed = MXFP4(elements=torch.full((16,), 0xA1, dtype=torch.uint8), scales=everything[scale : scale + 1])
        assert packed.dequantize().tolist() == [0.5 * wanted[scale], -wanted[scale]] * 16


def test_every_middle_and_its_neighbours_round_as_the_library_does() -> None:
    for lower in range(7):
        middle = float(ALL_NUMBERS[lower] + ALL_NUMBERS[lower + 1]) / 2
        below, above = (float(np.nextafter(np.float32(middle), np.float32(to))) for to in (0, 10))
        block = in_block(middle, -middle, below, above, -below, -above)
        found = codes(quantize_mxfp4(block))
        even = lower + lower % 2
        assert found[1:7].tolist() == [even, 8 + even, lower, lower + 1, 8 + lower, 9 + lower]
        assert np.array_equal(found.numpy(), by_library(block))


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_tensors_are_quantised_as_the_library_rounds(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    print("seed 5")
    spread = torch.randint(-120 if dtype != torch.float16 else -14, 12, (40, 6, 1), generator=generator)
    values = torch.ldexp(torch.randn(40, 6, 32, generator=generator), spread).to(dtype)
    packed = quantize_mxfp4(values.flatten(-2))
    exponents = np.floor(np.log2(values.double().abs().amax(-1).numpy())) - 2
    assert np.array_equal(packed.scales.numpy(), (np.maximum(exponents, -127) + 127).astype(np.uint8))
    scaled = values.double() / decode_e8m0(packed.scales, torch.float64)[..., None]
    assert np.array_equal(codes(packed).numpy(), by_library(scaled.float()).reshape(40, 192))


@pytest.mark.parametrize(
    ("largest", "number", "scale"),
    [
        (6.0, 6, 1),
        (7.99, 6, 1),  # saturates
        (8.0, 4, 2),
        (5.0, 4, 1),  # the tie between 4 and 6
        (3.9, 6, 0.5),  # 7.8 saturates
        (65504.0, 6, 2.0**13),
        (FLOAT32_MAX, 6, 2.0**125),
        (2.0**-125, 4, 2.0**-127),
        (2.0**-126, 2, 2.0**-127),  # no smaller scale
        (2.0**-129, 0, 2.0**-127),  # half of the smallest number goes to the even 0
        (2.0**-149, 0, 2.0**-127),
        (0.0, 0, 2.0**-127),
    ],
)
def test_scale_of_an_amax(largest: float, number: float, scale: float) -> None:
    packed = quantize_mxfp4(torch.tensor([0.0] * 31 + [-largest]))
    assert packed.scales.item() == 127 + math.log2(scale)
    assert packed.dequantize()[31].item() == -number * scale
    assert codes(packed)[31] >= 8, "the sign of zero is kept"


def test_layout_of_published_models() -> None:
    """gpt-oss stores (experts, rows, blocks, 16) bytes; transformers reads the low half of a byte first."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(6)
    packed = quantize_mxfp4(torch.randn(3, 8, 96, generator=generator))
    blocks = packed.elements.unflatten(-1, (-1, 16))
    theirs = mxfp4.convert_moe_packed_tensors(blocks, packed.scales, dtype=torch.float32)
    assert torch.equal(theirs.transpose(1, 2), packed.dequantize())


def test_worked_examples() -> None:
    packed = quantize_mxfp4(torch.tensor([-5.0, 1.0, 0.3] + [0.0] * 29))
    assert packed.scales.tolist() == [127]
    assert packed.elements.tolist() == [0x2E, 0x01] + [0] * 14
    assert packed.dequantize().tolist() == [-4.0, 1.0, 0.5] + [0.0] * 29
    assert quantize_mxfp4(in_block(0.5, -6.0).roll(-1)).elements[0] == 0xF1
