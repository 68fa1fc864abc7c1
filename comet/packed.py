"""Rows of tokens in block FP8 as they travel: D bytes of e4m3, then D / 128 float32 scales, in one row of the pool.

A packed row takes about half the memory of a row in bfloat16, so a dispatch of packed rows moves half the bytes; the
pool's rows are seen as narrower ones of the same type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comet.config import require
from comet.layout import round_up
from comet.quantize import FP8, FP8_BLOCK

ROW_ALIGNMENT = 64  # bytes; what copies 16 bytes at a time needs a multiple of 16 words


def packed_columns(hidden_size: int, dtype: torch.dtype) -> int:
    """Columns of ``dtype`` that a packed row takes; D=7168, bfloat16: 7168 + 224 bytes, padded to 7424: 3712."""
    num_bytes = hidden_size + hidden_size // FP8_BLOCK * torch.float32.itemsize
    return round_up(num_bytes, ROW_ALIGNMENT) // dtype.itemsize


def pack(rows: FP8, dtype: torch.dtype) -> Tensor:
    """``(T, D)`` with a scale per row and 128 columns as ``(T, packed_columns(D, dtype))``."""
    num_rows, hidden_size = rows.elements.shape
    columns = packed_columns(hidden_size, dtype)
    packed = torch.zeros(num_rows, columns * dtype.itemsize, dtype=torch.uint8, device=rows.elements.device)
    end = hidden_size + rows.scales.shape[1] * torch.float32.itemsize
    packed[:, :hidden_size] = rows.elements.view(torch.uint8)
    packed[:, hidden_size:end] = rows.scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return packed.view(dtype)


def unpack(packed: Tensor, hidden_size: int) -> FP8:
    """The rows ``(N, D)`` in ``(N, packed_columns)``, which must be contiguous."""
    as_bytes = packed.view(torch.uint8)
    end = hidden_size + hidden_size // FP8_BLOCK * torch.float32.itemsize
    return FP8(
        elements=as_bytes[:, :hidden_size].view(torch.float8_e4m3fn),
        scales=as_bytes[:, hidden_size:end].contiguous().view(torch.float32),
        block_rows=1,
        trusted=True,
    )


def check_fp8_weights(w1: FP8, w2: FP8) -> None:
    """Raise ``ValueError`` unless D and F/TP are multiples of 128, so that a scale belongs to one rank and one of both.

    Args:
        w1: ``(e, 2F/TP, D)``.
        w2: ``(e, D, F/TP)``.
    """
    for name, size in (("hidden_size", w2.elements.shape[1]), ("ffn_size / tp", w2.elements.shape[2])):
        require(size % FP8_BLOCK == 0, f"{name}={size} must be a multiple of {FP8_BLOCK} for experts in block FP8")
    for name, weight in (("w1", w1), ("w2", w2)):
        require(weight.block_rows == FP8_BLOCK, f"block_rows={weight.block_rows} of {name} must be {FP8_BLOCK}")
