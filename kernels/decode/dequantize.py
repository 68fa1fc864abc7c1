"""Quantised experts in a floating type: listed slots of a cache, for products of many tokens.

Bound by memory: for every weight a byte is read, of MXFP4 half of one, and a number of the result written; scales take
a byte for 32 weights at most. An expert of Qwen3 in MXFP8, 4.7 million weights, takes 14 MB with its result in
bfloat16: 4.3 us at 3.35 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .routing import load_columns
from .scales import BLOCK, EIGHT, MX, scale_values, widen

ELEMENTS = 4096  # elements of a block: two loads of 16 bytes in every thread, one of MXFP4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# SCALES and PACKED of the kernel, by the dtypes of elements and scales in which weights are stored.
STORED = {
    (torch.float8_e4m3fn, torch.uint8): (MX.value, False),
    (torch.uint8, torch.uint8): (MX.value, True),
    (torch.float8_e4m3fn, torch.float32): (BLOCK.value, False),
}


@triton.constexpr_function
def group_of(shared_scale: int) -> int:
    """Neighbours in a row that one scale serves and a block reads together; rows of block FP8 are multiples of 16."""
    return 32 if shared_scale == MX.value else 16


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def dequantize_kernel(
    elements_ptr, scales_ptr, slots_ptr, out_ptr, rows, columns,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A block takes GROUPS groups of one slot. MXFP4 is read as words of eight codes."""
    GROUP: tl.constexpr = group_of(SCALES)
    WIDTH: tl.constexpr = GROUP // EIGHT if PACKED else GROUP
    row_groups = columns // GROUP
    slot_groups = rows * row_groups
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    in_slot = group < slot_groups
    slot = tl.load(slots_ptr + tl.program_id(1)).to(tl.int64)
    if SCALES == MX:
        scale = slot * slot_groups + group
    else:
        row_scales = tl.cdiv(columns, BLOCK)
        scale = group // row_groups // BLOCK * row_scales + group % row_groups // (BLOCK // GROUP)
        scale += slot * tl.cdiv(rows, BLOCK) * row_scales
    scales = scale_values(load_columns(scales_ptr + scale, in_slot, False, ""), SCALES)
    source = elements_ptr + slot * slot_groups * WIDTH + group * WIDTH + tl.arange(0, WIDTH)[None, :]
    numbers = widen(load_columns(source, in_slot, False, ""), tl.float32) * scales
    target = out_ptr + tl.program_id(1).to(tl.int64) * slot_groups * GROUP
    target += group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(target, numbers.to(out_ptr.dtype.element_ty), mask=in_slot)


def dequantize_slots(elements: Tensor, scales: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of some slots: element times scale in float32, rounded once more in another ``dtype``; never waits.

    The bits are those of ``dequantize`` in ``comet.quantization.formats``, which is its twin.

    Example: the slots 3, 0 and 3 give three matrices, of which the first and the last are the same.

    Args:
        elements: w1 or w2 of a ``DecodeWeights``, ``(S, rows, columns)``, in MXFP4 ``(S, rows, columns / 2)`` uint8.
        scales: The scales of the elements.
        slots: ``(n,)`` int32 in [0, S), on the same device.
        dtype: float32, float16 or bfloat16.

    Returns:
        ``(n, rows, columns)`` of ``dtype``.
    """
    shared_scale, packed = STORED[elements.dtype, scales.dtype]
    rows, columns = elements.shape[1], elements.shape[2] * (2 if packed else 1)
    out = torch.empty(slots.numel(), rows, columns, dtype=dtype, device=elements.device)
    dequantize_kernel[(triton.cdiv(rows * columns, ELEMENTS), slots.numel())](
        elements.view(torch.int32) if packed else elements, scales, slots, out, rows, columns,
        GROUPS=ELEMENTS // group_of(shared_scale), SCALES=shared_scale, PACKED=packed,
    )  # fmt: skip
    return out
