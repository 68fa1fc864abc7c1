"""FP8 rows and their scales side by side, so that rows of the pool can carry them.

A packed row begins with D elements of one byte, then has ceil(D / 128) float32 scales, then nothing of use up to a
multiple of 16 columns of the pool's dtype, so that every row starts where the kernels' wide accesses can. As D is a
multiple of 16, a packed row is never longer than a row of the pool.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comet.config import DIM_MULTIPLE
from comet.layout import round_up
from comet.quantize import FP8, FP8_BLOCK

SCALE_BYTES = 4


def packed_columns(hidden_size: int, dtype: torch.dtype) -> int:
    """Columns of a packed row, in elements of the pool's dtype.

    Example: D=2048 in bfloat16: 2048 + 16 * 4 = 2112 bytes, 1056 columns instead of 2048. D=16: 20 bytes, 16 columns.
    """
    num_bytes = hidden_size + SCALE_BYTES * math.ceil(hidden_size / FP8_BLOCK)
    return round_up(math.ceil(num_bytes / dtype.itemsize), DIM_MULTIPLE)


def pack_rows(rows: FP8, dtype: torch.dtype) -> Tensor:
    """``(..., T, columns)`` of ``dtype`` for FP8 rows ``(..., T, D)``; what the numbers look like means nothing."""
    *outer, hidden_size = rows.elements.shape
    packed = torch.empty(*outer, packed_columns(hidden_size, dtype), dtype=dtype, device=rows.elements.device)
    elements, scales = _parts(packed, hidden_size)
    elements.copy_(rows.elements)
    scales.copy_(rows.scales)
    return packed


def unpack_rows(packed: Tensor, hidden_size: int) -> FP8:
    """Undo ``pack_rows`` without a copy: views of packed rows, of which some may hold anything."""
    elements, scales = _parts(packed, hidden_size)
    return FP8(elements=elements, scales=scales, block_rows=1, trusted=True)


def _parts(packed: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    first = hidden_size // SCALE_BYTES
    elements = packed.view(torch.float8_e4m3fn)[..., :hidden_size]
    return elements, packed.view(torch.float32)[..., first : first + math.ceil(hidden_size / FP8_BLOCK)]
