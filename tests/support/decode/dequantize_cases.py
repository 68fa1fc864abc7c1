"""Slots of quantised weights of any bits, and a check of the kernel that dequantises them, on a CPU and on a GPU."""

from __future__ import annotations

import torch

from comet.kernels.decode.dequantize import dequantize_slots
from comet.quantization.formats import E8M0_NAN, FP8, FP8_BLOCK, MX_BLOCK, MXFP4, MXFP8

NUM_SLOTS = 5
LISTED = (4, 0, 2, 0)  # in no order, one twice
E4M3_NAN = 0x7F
# Rows and columns: less than a block of 4096 weights, several blocks and a part of one, scales that end inside.
SIZES = {
    "mxfp8": ((3, 32), (130, 96), (64, 128)),
    "mxfp4": ((3, 32), (130, 96), (64, 128)),
    "fp8": ((3, 16), (272, 144), (128, 128), (16, 1040)),
}


def stored_slots(kind: str, num_slots: int, rows: int, columns: int, seed: int) -> MXFP8 | MXFP4 | FP8:
    """Elements of all codes, and scales from 2^-127 to 2^127, or, of block FP8, that round with every element."""
    made = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        size = num_slots, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        scales = torch.rand(size, generator=made) * 2.0 ** torch.randint(-20, 9, size, generator=made)
        return FP8(elements=_e4m3((num_slots, rows, columns), made), scales=scales)
    scales = torch.randint(E8M0_NAN, (num_slots, rows, columns // MX_BLOCK), generator=made, dtype=torch.uint8)
    if kind == "mxfp8":
        return MXFP8(elements=_e4m3((num_slots, rows, columns), made), scales=scales)
    codes = torch.randint(256, (num_slots, rows, columns // 2), generator=made, dtype=torch.uint8)
    return MXFP4(elements=codes, scales=scales)


def _e4m3(size: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
    """All but NaN."""
    codes = torch.randint(256, size, generator=made, dtype=torch.uint8)
    return codes.masked_fill_(codes & E4M3_NAN == E4M3_NAN, 0).view(torch.float8_e4m3fn)


def check_dequantize(kind: str, rows: int, columns: int, dtype: torch.dtype, device: str | torch.device) -> None:
    """The kernel's bits are those of ``dequantize``, whose own are checked in ``quantization/test_quantize*.py``."""
    stored = stored_slots(kind, NUM_SLOTS, rows, columns, seed=rows)
    # One number into its memory: what a layer sends is one list of all its groups.
    slots = torch.tensor([0, *LISTED], dtype=torch.int32, device=device)[1:]
    found = dequantize_slots(stored.elements.to(device), stored.scales.to(device), slots, dtype)
    wanted = stored.dequantize(dtype)[list(LISTED)]
    bits = torch.int32 if dtype == torch.float32 else torch.int16  # for the sign of zeros counts, too
    assert found.shape == wanted.shape
    assert torch.equal(found.cpu().view(bits), wanted.view(bits)), f"{kind}, {rows} x {columns}, {dtype}"
