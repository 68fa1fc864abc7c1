"""Slots of a cache that a kernel (interpreted) dequantises: the bits of torch, and what is refused."""

from __future__ import annotations

import pytest
import torch
from decode_cases import DecodeCase, make_inputs
from dequantize_cases import SIZES, check_dequantize, stored_slots
from ranks import run_ranks

from comet.experts.streaming import floating_slots
from comet.kernels.decode.dequantize import dequantize_slots

KINDS = tuple(SIZES)


def interpreted(rank: int, world_size: int, kind: str) -> None:
    for dtype in (torch.float32, torch.float16):
        for rows, columns in SIZES[kind]:
            check_dequantize(kind, rows, columns, dtype, "cpu")
    inputs = make_inputs(DecodeCase(name="slots", T=1, K=1, E=4, D=96, F=64, quantised=kind), torch.float32, "cpu")
    held = inputs.weights.slots  # the others hold NaN
    kernel, twin = (floating_slots(inputs.weights, held, torch.float32, use_kernels=each) for each in (True, False))
    for found, wanted, shape in zip(kernel, twin, ((4, 128, 96), (4, 96, 64)), strict=True):
        assert found.shape == shape
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_has_the_bits_of_torch(kind: str) -> None:
    run_ranks(interpreted, 1, kind, interpret=True)


def test_dequantising_names_the_wrong_argument() -> None:
    stored, coded, block = (stored_slots(kind, 2, 32, 64, seed=0) for kind in ("mxfp8", "mxfp4", "fp8"))
    slots = torch.zeros(1, dtype=torch.int32)

    def run(elements=stored.elements, scales=stored.scales, slots=slots, dtype=torch.float32) -> None:
        dequantize_slots(elements, scales, slots, dtype)

    with pytest.raises(ValueError, match=r"elements of torch.uint8 with scales of torch.float32 must be MXFP8"):
        run(coded.elements, block.scales)
    with pytest.raises(ValueError, match=r"columns=48 of elements must be a multiple of 32"):
        run(stored.elements[..., :48])
    with pytest.raises(ValueError, match=r"columns=40 of elements must be a multiple of 16"):
        run(stored.elements[..., :40], block.scales)
    with pytest.raises(
        ValueError, match=r"scales of shape \(2, 32, 1\) must be \(2, 32, 2\) for elements \(2, 32, 64\)"
    ):
        run(scales=stored.scales[..., :1])
    with pytest.raises(
        ValueError, match=r"scales of shape \(2, 32, 2\) must be \(2, 32, 4\) for elements \(2, 32, 64\)"
    ):
        run(torch.cat([coded.elements] * 2, -1))
    with pytest.raises(ValueError, match=r"elements of shape \(2, 32, 32\) must be contiguous, has strides"):
        run(stored.elements[..., :32], stored.scales[..., :1].contiguous())
    with pytest.raises(ValueError, match=r"slots of shape \(1,\) and torch.int64 must be \(n,\) int32"):
        run(slots=slots.long())
    with pytest.raises(ValueError, match=r"dtype=torch.float64 must be one of"):
        run(dtype=torch.float64)
