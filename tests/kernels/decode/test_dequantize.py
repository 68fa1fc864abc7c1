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


MXFP8, MXFP4, FP8 = (stored_slots(kind, 2, 32, 64, seed=0) for kind in ("mxfp8", "mxfp4", "fp8"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"elements": MXFP4.elements, "scales": FP8.scales},
            r"elements of torch.uint8 with scales of torch.float32 must be MXFP8",
        ),
        ({"elements": MXFP8.elements[..., :48]}, r"columns=48 of elements must be a multiple of 32"),
        (
            {"elements": MXFP8.elements[..., :40], "scales": FP8.scales},
            r"columns=40 of elements must be a multiple of 16",
        ),
        ({"scales": MXFP8.scales[..., :1]}, r"scales of shape \(2, 32, 1\) must be \(2, 32, 2\) for .* \(2, 32, 64\)"),
        ({"elements": torch.cat([MXFP4.elements] * 2, -1)}, r"scales of shape \(2, 32, 2\) must be \(2, 32, 4\) for"),
        ({"elements": MXFP8.elements[..., :32], "scales": MXFP8.scales[..., :1].contiguous()}, "must be contiguous"),
        ({"slots": torch.zeros(1).long()}, r"slots of shape \(1,\) and torch.int64 must be \(n,\) int32"),
        ({"dtype": torch.float64}, r"dtype=torch.float64 must be one of"),
    ],
)
def test_dequantising_names_the_wrong_argument(changes: dict, message: str) -> None:
    given = {"elements": MXFP8.elements, "scales": MXFP8.scales, "slots": torch.zeros(1, dtype=torch.int32)}
    given = given | {"dtype": torch.float32} | changes
    with pytest.raises(ValueError, match=message):
        dequantize_slots(given["elements"], given["scales"], given["slots"], given["dtype"])
