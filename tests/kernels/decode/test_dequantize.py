"""Slots of a cache that a kernel (interpreted) dequantises: the bits of torch."""

from __future__ import annotations

import pytest
import torch
from decode_cases import DecodeCase, make_inputs
from dequantize_cases import SIZES, check_dequantize
from ranks import run_ranks

from comet.experts.streaming import floating_slots


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


@pytest.mark.parametrize("kind", SIZES)
def test_the_kernel_has_the_bits_of_torch(kind: str) -> None:
    run_ranks(interpreted, 1, kind, interpret=True)
