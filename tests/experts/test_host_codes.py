"""Products of the host's cores with quantised experts: every code, every scale's place, tails, and rows in parts."""

from __future__ import annotations

import ml_dtypes
import pytest
import torch
from decode_cases import E2M1, QUANTISERS

from comet.experts.host import codes as host_codes
from comet.experts.host.codes import E2M1_BITS, E4M3_BITS, CodeProducts, refuse_nan
from comet.experts.store import HeldExperts
from comet.quantization.formats import quantize_fp8

CODES = torch.arange(256, dtype=torch.uint8)


def test_every_e4m3_code_is_its_number() -> None:
    elements, scales = CODES.view(1, 256).view(torch.float8_e4m3fn), torch.full((1, 8), 127, dtype=torch.uint8)
    found = CodeProducts(1).numbers(elements, scales, 1)[0, 0] * E4M3_BITS[2]
    expected = torch.from_numpy(CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype("float32"))
    is_number = expected.isfinite()
    assert is_number.sum() == 254
    assert torch.equal(found[is_number], expected[is_number])


def test_every_byte_of_mxfp4_is_its_two_numbers() -> None:
    scales = torch.full((1, 16), 127, dtype=torch.uint8)
    found = CodeProducts(1).numbers(CODES.view(1, 256), scales, 2)[0] * E2M1_BITS[2]
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    assert torch.equal(found, torch.stack([numbers[CODES.long() & 15], numbers[CODES.long() >> 4]]))


def test_the_example_of_a_byte() -> None:
    elements, scales = torch.full((1, 16), 0xF1, dtype=torch.uint8), torch.full((1, 1), 128, dtype=torch.uint8)
    found = CodeProducts(1).numbers(elements, scales, 2) * E2M1_BITS[2]
    assert found[0, :, 0].tolist() == [1, -12]


@pytest.mark.parametrize("kind", list(QUANTISERS))
@pytest.mark.parametrize("most", [2**20, 3 * 192], ids=["at once", "three rows at a time"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_exact_numbers(
    kind: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of 300 rows in three blocks of 128 or fewer, and of 192 columns in one and a half."""
    monkeypatch.setattr(host_codes, "NUMBERS_PER_CORE", most)
    drawn = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 192, generator=drawn) * torch.rand(300, 1, generator=drawn).exp2()
    weight[0] = 0
    packed = QUANTISERS[kind](weight)
    tokens = torch.randn(3, 192, generator=drawn).to(dtype)
    products = CodeProducts(1)
    for _ in range(2):  # in the same memory
        found = products(tokens, packed.elements, packed.scales)
        expected = tokens.double() @ packed.dequantize(torch.float64).T
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    w1, w2 = (quantize_fp8(torch.randn(3, *size)) for size in ((32, 16), (16, 16)))
    refuse_nan([HeldExperts(w1.elements, w2.elements, True, w1.scales, w2.scales)])
    w2.elements.view(torch.uint8)[1, 3, 2] = 0xFF
    with pytest.raises(ValueError, match=r"w2 of expert 1 of layer 0 has a NaN.*: set host_cores=off"):
        refuse_nan([HeldExperts(w1.elements, w2.elements, True, w1.scales, w2.scales)])
    monkeypatch.setattr(host_codes, "NUMBERS_PER_CORE", 8)
    with pytest.raises(ValueError, match="contraction=16 must be at most 8"):
        CodeProducts(1)(torch.ones(1, 16), w1.elements[0], w1.scales[0])
