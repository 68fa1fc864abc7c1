"""Products with quantised experts on the host's cores: their codes become float32 numbers, some rows at a time.

torch converts eight-bit codes one by one, at 0.3 GB/s a core. But the bits of an e4m3 or e2m1 code, shifted to where
float16 has its own, are the same number times a power of two, subnormal ones included, so a shift, a mask and torch's
conversion of float16, all of whole vectors, do it. The products are those of the codes' exact numbers in float32, as a
decode step's are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from comet.config import require
from comet.decode.weights import CODES
from comet.kernels.experts.tables import ExpertParts
from comet.quantization.formats import FLOAT32_FRACTION_BITS, FP8_BLOCK

NUMBERS_PER_CORE = 2**20  # that are converted at once: 4 MB, which a core's cache holds or nearly does
# Of e4m3 and e2m1: how far up the code's bits go, those of them that stay, and the number's multiple of what they say.
E4M3_BITS, E2M1_BITS = (7, 0xBF80 - 2**16, 2.0**8), (5, 0x8E00 - 2**16, 2.0**14)
E4M3_NAN = 0x7F


class CodeProducts:
    """Multiplies with matrices of codes, in memory that each product uses again."""

    def __init__(self, num_cores: int) -> None:
        self._halves = torch.empty(num_cores * NUMBERS_PER_CORE, dtype=torch.int16)
        self._numbers = torch.empty(num_cores * NUMBERS_PER_CORE)

    def __call__(self, tokens: Tensor, elements: Tensor, scales: Tensor) -> Tensor:
        """``(T, N)`` float32: ``tokens (T, K)`` times a matrix of codes, transposed.

        Args:
            elements: ``(N, K)`` float8_e4m3fn, or ``(N, K / 2)`` uint8 of MXFP4.
            scales: ``(N, K / 32)`` uint8 or ``(ceil(N / 128), ceil(K / 128))`` float32, none of them NaN.
        """
        per_byte, (num_rows, num_bytes) = 2 if elements.dtype == CODES else 1, elements.shape
        multiple = (E2M1_BITS if per_byte == 2 else E4M3_BITS)[2]
        # The low halves of all bytes come first, then the high ones.
        inputs = tokens.float().unflatten(1, (num_bytes, per_byte)).transpose(1, 2).flatten(1)
        output = inputs.new_empty(len(tokens), num_rows)
        most = len(self._numbers) // inputs.shape[1]
        require(most > 0, f"contraction={inputs.shape[1]} must be at most {len(self._numbers)} for the host's cores")
        for first in range(0, num_rows, most):
            rows = slice(first, min(first + most, num_rows))
            numbers = self.numbers(elements[rows], scales_of(scales, rows), per_byte)
            output[:, rows] = linear(inputs, numbers.flatten(1))
        return output.mul_(multiple)

    def numbers(self, elements: Tensor, scales: Tensor, per_byte: int) -> Tensor:
        """``(R, per_byte, C)`` float32, of memory of this: numbers of codes ``(R, C)`` over the multiple of their type.

        Example: the MXFP4 byte 0xF1 is 0.5, its low half, and -6, its high one; with the scale 2 they are 1 and -12.
        """
        shape = len(elements), per_byte, elements.shape[1]
        count = torch.Size(shape).numel()
        halves, numbers = self._halves[:count].view(shape), self._numbers[:count].view(shape)
        codes = elements.view(torch.int8)  # the sign of which goes on into the upper bits
        shift, mask, _ = E2M1_BITS if per_byte == 2 else E4M3_BITS
        halves[:, -1] = codes
        if per_byte == 2:
            halves[:, 0] = codes << 4
        numbers.copy_(halves.bitwise_left_shift_(shift).bitwise_and_(mask).view(torch.float16))
        width = FP8_BLOCK if scales.dtype == torch.float32 else shape[2] // scales.shape[1]
        whole, scales = shape[2] // width, numbers_of(scales)[:, None, :, None]
        numbers[..., : whole * width].unflatten(2, (whole, width)).mul_(scales[:, :, :whole])
        if shape[2] % width:
            numbers[..., whole * width :].mul_(scales[:, :, whole])
        return numbers


def scales_of(scales: Tensor, rows: slice) -> Tensor:
    """Those of some rows of a matrix, one row each; in block FP8 128 rows of the matrix share one."""
    if scales.dtype == torch.float32:
        return scales[torch.arange(rows.start, rows.stop) // FP8_BLOCK]
    return scales[rows]


def numbers_of(scales: Tensor) -> Tensor:
    """Scales as float32; of e8m0 2^-127, next to which every number vanishes, is 0."""
    if scales.dtype == torch.float32:
        return scales
    return (scales.int() << FLOAT32_FRACTION_BITS).view(torch.float32)


def refuse_nan(layers: Sequence[ExpertParts]) -> None:
    """Raise ``ValueError`` if experts in block FP8, which others may have quantised, have a NaN, which is not kept."""
    for number, layer in enumerate(layers):
        if layer.w1_scales is not None and layer.w1_scales.dtype == torch.float32:
            for name, stored in (("w1", layer.w1), ("w2", layer.w2)):
                for expert, codes in enumerate(stored.view(torch.uint8)):
                    require(
                        not bool((codes & E4M3_NAN == E4M3_NAN).any()),
                        f"{name} of expert {expert} of layer {number} has a NaN, and the host's cores compute numbers "
                        "only: set host_cores=off",
                    )
