"""Slots of a cache that a kernel (interpreted) dequantises: the bits of torch."""

from __future__ import annotations

import pytest
import torch
from dequantize_cases import SIZES, check_dequantize
from ranks import run_ranks


def interpreted(rank: int, world_size: int, kind: str) -> None:
    for dtype in (torch.float32, torch.float16):
        for rows, columns in SIZES[kind]:
            check_dequantize(kind, rows, columns, dtype, "cpu")


@pytest.mark.parametrize("kind", SIZES)
def test_the_kernel_has_the_bits_of_torch(kind: str) -> None:
    run_ranks(interpreted, 1, kind, interpret=True)
