"""What the scales of quantised decode weights must be."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.config import require
from comet.quantization.formats import E8M0_NAN, FP8_BLOCK, MX_BLOCK
from comet.utils.match import Sizes

CODES = torch.uint8  # dtype of weights in MXFP4: two e2m1 codes each
START_BYTES = 16  # kernels read codes in pieces of so many bytes


def check_scales(sizes: Sizes, w1: Tensor, w2: Tensor, w1_scales: Tensor | None, w2_scales: Tensor | None) -> None:
    """Raise ``ValueError`` naming field, value and rule unless scales are there where they must be, and good.

    Waits for the device, because a scale that is no number is an error.

    Args:
        sizes: S, D and F of the weights.
        w1: ``(S, 2F, D)``; in MXFP4 ``(S, 2F, D / 2)`` uint8.
        w2: ``(S, D, F)`` or ``(S, D, F / 2)``, dtype of ``w1``.
        w1_scales: MXFP8 and MXFP4 ``(S, 2F, D / 32)`` uint8, block FP8 ``(S, ceil(2F / 128), ceil(D / 128))`` float32,
            or ``None``.
        w2_scales: MXFP8 and MXFP4 ``(S, D, F / 32)``, block FP8 ``(S, ceil(D / 128), ceil(F / 128))``, or ``None``.
    """
    if w1_scales is None and w2_scales is None:
        if w1.dtype in (torch.float8_e4m3fn, CODES):
            raise ValueError(f"w1 and w2 of dtype {w1.dtype} must come with w1_scales and w2_scales")
        return
    if w1_scales is None or w2_scales is None:
        raise ValueError("w1_scales and w2_scales must both be given, or neither")
    dtype, device = w1_scales.dtype, w1.device
    _check_types(w1, w2, dtype)
    if dtype == torch.uint8:
        for name, letter in (("w1", "D"), ("w2", "F")):
            size = sizes.values[letter]
            require(
                size % MX_BLOCK == 0,
                f"{letter}={size}, the contraction of {name}, must be a multiple of {MX_BLOCK} for {mx_name(w1)}",
            )
        specs = f"S 2F D/{MX_BLOCK}", f"S D F/{MX_BLOCK}"
    else:
        specs = f"S 2F/{FP8_BLOCK} D/{FP8_BLOCK}", f"S D/{FP8_BLOCK} F/{FP8_BLOCK}"
    for name, scales, spec in zip(("w1_scales", "w2_scales"), (w1_scales, w2_scales), specs, strict=True):
        sizes.match(name, scales, spec, dtype=dtype, device=device, contiguous=True)
        _check_values(name, scales)


def mx_name(w1: Tensor) -> str:
    """What weights with e8m0 scales are called."""
    return "MXFP4" if w1.dtype == CODES else "MXFP8"


def _check_types(w1: Tensor, w2: Tensor, scales: torch.dtype) -> None:
    """Weights and scales of dtypes that go together, and codes that start where kernels can read them."""
    require(
        w1.dtype in (torch.float8_e4m3fn, CODES),
        f"w1 and w2 of dtype {w1.dtype} must be {torch.float8_e4m3fn} with w1_scales, or {CODES} in MXFP4",
    )
    if w1.dtype == CODES:
        require(scales == torch.uint8, f"w1_scales of dtype {scales} must be torch.uint8 for w1 in MXFP4 ({CODES})")
        for name, codes in (("w1", w1), ("w2", w2)):
            off = codes.data_ptr() % START_BYTES
            require(
                off == 0,
                f"{name} starts {off} bytes past a multiple of {START_BYTES}, must start at one for MXFP4: clone it",
            )
    require(
        scales in (torch.uint8, torch.float32),
        f"w1_scales of dtype {scales} must be torch.uint8 (MXFP8; view e8m0 as uint8) or torch.float32 (block FP8)",
    )


def _check_values(name: str, scales: Tensor) -> None:
    if scales.dtype == torch.uint8:
        is_bad, rule = scales == E8M0_NAN, "at most 254; 255 is the NaN of e8m0"
    else:
        is_bad, rule = ~scales.isfinite() | (scales < 0), "finite and not negative"
    if is_bad.any():
        where = is_bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{where}={scales[tuple(where)].item()} must be {rule}")
