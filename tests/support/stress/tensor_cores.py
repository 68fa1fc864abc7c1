"""A GPU's products of e4m3 numbers, less exact than float32, on any device: as Hopper's tensor cores are taken to add.

What they keep of a sum is not documented. Here they add 32 products at a time to what they have, all cut off after 13
binary digits of the largest; that gives the error, within a third, that the limits of cases on H200 implied.
"""

from __future__ import annotations

import functools

import torch
from fp8_cases import measured_rows, twice_largest_error
from torch import Tensor

from comet.quantization.formats import FP8, FP8_BLOCK

KEPT_DIGITS = 13
ADDED_AT_ONCE = 32
ROWS_AT_ONCE = 32


def cut_off_sums(a: Tensor, b: Tensor) -> Tensor:
    """``a (M, K) @ b (N, K).T`` of e4m3 numbers, K at most 128.

    Example: 8192 * 1 + 1 * 1 + 1 * 1 is 8194, but 8192 * 1 + 1 * 0.5 + 1 * 0.5 stays 8192: a digit of 2^-1 is cut off.
    """
    return torch.cat([_few_rows(rows, b.double()) for rows in a.double().split(ROWS_AT_ONCE)])


def _few_rows(a: Tensor, b: Tensor) -> Tensor:
    sums = a.new_zeros(len(a), len(b))
    for rows, columns in zip(a.split(ADDED_AT_ONCE, dim=1), b.split(ADDED_AT_ONCE, dim=1), strict=True):
        terms = torch.cat([rows[:, None] * columns, sums[:, :, None]], dim=2)
        largest = terms.abs().amax(2, keepdim=True)
        digit = torch.exp2(largest.frexp().exponent - 1.0 - KEPT_DIGITS)
        sums = ((terms / digit).trunc() * digit).sum(2)
    return sums


def multiply(rows: FP8, weight: FP8, expert: int) -> Tensor:
    """``comet.layer.twin.layer.multiply`` by tensor cores: steps of 128 there, and from step to step in float32."""
    total = rows.scales.new_zeros(len(rows.elements), weight.elements.shape[1])
    steps = zip(
        rows.elements.float().split(FP8_BLOCK, dim=1),
        weight.elements[expert].float().split(FP8_BLOCK, dim=1),
        rows.scales.unbind(1),
        weight.scales[expert].unbind(1),
        strict=True,
    )
    for a, b, row_scales, scales in steps:
        total += cut_off_sums(a, b).float() * row_scales[:, None] * scales.repeat_interleave(FP8_BLOCK)
    return total


@functools.cache
def cut_off_products() -> float:
    a, b = measured_rows("cpu")
    return twice_largest_error(cut_off_sums(a, b), a, b)
