"""Rows of tokens in block FP8 as they travel: D bytes of e4m3, then a float32 scale per 128 of them, in one row.

A packed row takes about half the memory of a row in bfloat16, so a dispatch of packed rows moves half the bytes; the
pool's rows are seen as narrower ones of the same type. D is a multiple of 16, so none is longer than a row of the pool.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comet.layout import round_up
from comet.quantization.formats import FP8, FP8_BLOCK

SCALE_BYTES = torch.float32.itemsize
ROW_ALIGNMENT = 64  # bytes; what copies 16 bytes at a time needs a multiple of 16 words


def packed_columns(hidden_size: int, dtype: torch.dtype) -> int:
    """Columns of ``dtype`` that a packed row takes; D=7168, bfloat16: 7168 + 224 bytes, padded to 7424: 3712."""
    num_bytes = hidden_size + SCALE_BYTES * math.ceil(hidden_size / FP8_BLOCK)
    return min(round_up(num_bytes, ROW_ALIGNMENT) // dtype.itemsize, hidden_size)


def pack(rows: FP8, dtype: torch.dtype) -> Tensor:
    """``(..., T, D)`` with a scale per row and 128 columns as ``(..., T, packed_columns(D, dtype))``."""
    *outer, hidden_size = rows.elements.shape
    packed = torch.zeros(*outer, packed_columns(hidden_size, dtype), dtype=dtype, device=rows.elements.device)
    elements, scales = _parts(packed, hidden_size)
    elements.copy_(rows.elements)
    scales.copy_(rows.scales)
    return packed


def unpack(packed: Tensor, hidden_size: int) -> FP8:
    """Views of the rows ``(..., N, D)`` in ``(..., N, packed_columns)``, of which some may hold anything."""
    elements, scales = _parts(packed, hidden_size)
    return FP8(elements=elements, scales=scales, block_rows=1, trusted=True)


def _parts(packed: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    first = hidden_size // SCALE_BYTES
    elements = packed.view(torch.float8_e4m3fn)[..., :hidden_size]
    return elements, packed.view(torch.float32)[..., first : first + math.ceil(hidden_size / FP8_BLOCK)]
