"""Rows of tokens in block FP8 as they travel: D bytes of e4m3, then D / 128 float32 scales, in one row of the pool.

A packed row takes about half the memory of a row in bfloat16, so a dispatch of packed rows moves half the bytes; the
pool's rows are seen as narrower ones of the same type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.layout import round_up
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.utils.match import Sizes

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


def match_fp8_weights(
    sizes: Sizes, w1: Tensor, w2: Tensor, w1_scales: Tensor, w2_scales: Tensor, *, device: torch.device
) -> None:
    """Raise ``ValueError`` unless a layer's weights can be taken as they are: by address, a scale of one rank only.

    Args:
        sizes: e, F/TP and D of the layer; the latter two have to be multiples of 128.
        w1: ``(e, 2F/TP, D)`` float8_e4m3fn.
        w2: ``(e, D, F/TP)`` float8_e4m3fn.
        w1_scales: ``(e, 2F/TP / 128, D / 128)`` float32.
        w2_scales: ``(e, D / 128, F/TP / 128)`` float32.
        device: The layer's.
    """
    for letter in "DF":
        name, size = sizes.origins[letter], sizes.values[letter]
        require(size % FP8_BLOCK == 0, f"{name}={size} must be a multiple of {FP8_BLOCK} for experts in block FP8")
    rules: dict[str, Any] = dict(device=device, contiguous=True)
    for name, elements, scales, spec, spec_of_scales in (
        ("w1", w1, w1_scales, "e 2F D", f"e 2F/{FP8_BLOCK} D/{FP8_BLOCK}"),
        ("w2", w2, w2_scales, "e D F", f"e D/{FP8_BLOCK} F/{FP8_BLOCK}"),
    ):
        sizes.match(f"{name}.elements", elements, spec, dtype=torch.float8_e4m3fn, **rules)
        sizes.match(f"{name}.scales", scales, spec_of_scales, dtype=torch.float32, **rules)
