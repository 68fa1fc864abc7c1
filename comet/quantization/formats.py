"""Weights and activations of eight and four bits: elements that share a scale, in the layouts the kernels stream.

* **MXFP8** (OCP Microscaling): e4m3 elements, and one power of two per 32 of them along the contraction, stored as
  e8m0: the byte c means 2^(c - 127), and 255 is its NaN.
* **MXFP4** (OCP Microscaling): the same scales for e2m1 elements, two in a byte.
* **FP8**: e4m3 elements, and one float32 scale per 128 x 128 block of a weight, or per 128 elements of a token
  (``block_rows`` 128 or 1); blocks at the edges may be smaller.

An e4m3 number has 1 sign, 4 exponent and 3 fraction bits, at most 448 and in steps of 2^-9 below 2^-6; an e2m1 number
is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. Neither has an infinity. Rounding is to the nearest, ties to even,
and what would round past the largest becomes it. Scales are chosen such that element times scale is exact in float32
(but for numbers under 2^-126 next to a scale under 2^-121, whose last bits float32 does not have), and that quantising
a dequantised float32 tensor gives the same bits.

These functions are plain torch, run where their input lives and wait for the device, because bad numbers are errors;
with trusted input they neither look at it nor wait.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from comet.config import MOE_DTYPES, require
from comet.utils.choices import MXType
from comet.utils.choices import StoredType as StoredType  # Users of formats import the names of types here.
from comet.utils.match import Sizes

ScaleRule = Literal["floor", "fit"]

CODES = torch.uint8  # dtype of weights in MXFP4: two e2m1 codes each
MX_BLOCK = 32
FP8_BLOCK = 128
E4M3_MAX = 448.0
E4M3_MAX_EXPONENT = 8
E4M3_SATURATES_ABOVE = 464.0  # half way between 448 and the 480 that e4m3 has no code for; the tie goes to 448
FLOAT16_MX_MAX = 61440.0  # 240 * 2^8; what e4m3 has next is 256 * 2^8 = 65536, which float16 does not have
E2M1_MAX_EXPONENT = 2
PAIRS = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # bytes of a number -> a type that holds two
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by their codes
E8M0_BIAS = 127
E8M0_NAN = 255
FLOAT32_FRACTION_BITS = 23
FLOAT64_FRACTION_BITS = 52
FLOAT64_BIAS = 1023
SMALLEST_FP8_SCALE = 2.0**-126  # the smallest normal float32; an element times it is a multiple of 2^-135


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MXFP8:
    """A tensor in MXFP8; its contraction is the last dimension."""

    elements: Tensor  # (..., K) float8_e4m3fn, K a multiple of 32
    scales: Tensor  # (..., K / 32) uint8, e8m0 codes; view float8_e8m0fnu scales as uint8
    trusted: InitVar[bool] = False  # take the scales' values unseen, without waiting for the device

    def __post_init__(self, trusted: bool) -> None:
        _check_mx(self.elements, self.scales, torch.float8_e4m3fn, 1, trusted=trusted)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(..., K)``: element times scale; exact in float32, rounded once in another ``dtype``; never waits.

        Scales above 2^119, which the quantiser never makes, may give infinity.
        """
        return _times_e8m0(self.elements.to(dtype, memory_format=torch.contiguous_format), self.scales)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MXFP4:
    """A tensor in MXFP4; its contraction is the last dimension.

    Element 2i is the low half of byte i and element 2i + 1 the high one, as in torch.float4_e2m1fn_x2 and in published
    models (gpt-oss). Example: the elements 0.5, -6 are the codes 1, 15 and the byte 0xF1.
    """

    elements: Tensor  # (..., K / 2) uint8, two e2m1 codes each, K a multiple of 32; view float4_e2m1fn_x2 as uint8
    scales: Tensor  # as of MXFP8
    trusted: InitVar[bool] = False  # as of MXFP8

    def __post_init__(self, trusted: bool) -> None:
        _check_mx(self.elements, self.scales, CODES, 2, trusted=trusted)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(..., K)`` as of ``MXFP8``; scales above 2^125, which the quantiser never makes, may give infinity."""
        codes = self.elements.to(torch.int32, memory_format=torch.contiguous_format)
        pairs = _numbers_of_bytes(self.elements.device, dtype)[codes]
        return _times_e8m0(pairs.view(dtype), self.scales)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FP8:
    """A tensor in e4m3 with float32 block scales; its contraction is the last dimension."""

    elements: Tensor  # (..., N, K) float8_e4m3fn
    scales: Tensor  # (..., ceil(N / block_rows), ceil(K / 128)) float32; element times scale is the value
    block_rows: int = FP8_BLOCK  # rows that share a scale: 128 for weights, 1 for tokens
    # take the scales' values unseen, without waiting for the device: of rows that arrived, some of which may hold
    # anything
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        require(self.block_rows in (1, FP8_BLOCK), f"block_rows={self.block_rows} must be 1 or {FP8_BLOCK}")
        _check_matrix("elements", self.elements)
        sizes, rows = Sizes(), "N" if self.block_rows == 1 else f"N/{self.block_rows}"
        sizes.match("elements", self.elements, "... N K", dtype=torch.float8_e4m3fn)
        scales, device = f"... {rows} K/{FP8_BLOCK}", self.elements.device
        sizes.match("scales", self.scales, scales, dtype=torch.float32, device=device)
        if not trusted:
            check_scale_values("scales", self.scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(..., N, K)``: element times scale in float32, rounded once more in another ``dtype``; never waits."""
        out = self.elements.to(dtype, memory_format=torch.contiguous_format)
        columns = out.shape[-1]
        scales = _by_row(self.scales, out.shape[-2], self.block_rows).unsqueeze(-1)
        whole = columns // FP8_BLOCK
        out[..., : whole * FP8_BLOCK].unflatten(-1, (whole, FP8_BLOCK)).mul_(scales[..., :whole, :])
        if columns % FP8_BLOCK:
            out[..., whole * FP8_BLOCK :].mul_(scales[..., whole, :])
        return out


Weight = Tensor | FP8 | MXFP8
WEIGHT_TYPES: tuple[type[Weight], ...] = (Tensor, FP8, MXFP8)


@torch.no_grad()
def quantize_mxfp8(weight: Tensor, *, rule: ScaleRule = "floor") -> MXFP8:
    """Quantise along the last dimension to MXFP8.

    Args:
        weight: ``(..., K)`` float32, float16 or bfloat16, finite; K a multiple of 32, the contraction.
        rule: How a block's scale 2^x follows from its largest magnitude, amax. ``floor`` is the OCP specification's
            x = floor(log2(amax)) - 8; amax / 2^x may reach 512, and what is past 448 saturates. ``fit`` adds one to x
            where amax would saturate; its mean square error is the smaller one on normal, uniform and heavy-tailed
            weights. Both keep x within -127 .. 119; a block of zeros takes x = -127. Under ``fit`` a float16 number
            past 61440 saturates there: float16 does not have the next one.

    Example: a block of -5, 1, 0.3 and 29 zeros has amax 5, so x = 2 - 8 = -6 and the scale's code is 121. Times 64 the
    block is -320, 64, 19.2, 0 ..., which round to -320, 64, 20, 0 ...; dequantised -5, 1, 0.3125, 0 ...
    """
    require(rule in get_args(ScaleRule), f"rule={rule!r} must be one of {get_args(ScaleRule)}")
    blocks, amax = _mx_blocks(weight)
    if weight.dtype == torch.float16:
        blocks, amax = blocks.clamp(-FLOAT16_MX_MAX, FLOAT16_MX_MAX), amax.clamp(max=FLOAT16_MX_MAX)
    scales = _e8m0_scales(amax, E4M3_MAX_EXPONENT, E4M3_SATURATES_ABOVE if rule == "fit" else None)
    return MXFP8(elements=_to_e4m3(blocks * _inverse_e8m0(scales).unsqueeze(-1)).flatten(-2), scales=scales)


@torch.no_grad()
def quantize_mxfp4(weight: Tensor) -> MXFP4:
    """Quantise along the last dimension to MXFP4, with the OCP specification's scales.

    A block's scale 2^x follows from its largest magnitude, amax: x = floor(log2(amax)) - 2, at least -127; amax / 2^x
    may reach 8, and what is past 6 saturates. A block of zeros takes x = -127.

    Args:
        weight: ``(..., K)`` float32, float16 or bfloat16, finite; K a multiple of 32, the contraction.

    Example: a block of -5, 1, 0.3 and 29 zeros has amax 5, so x = 2 - 2 = 0 and the scale's code is 127. -5 is between
    -4 and -6 and goes to -4, whose code is even, 0.3 to 0.5; the codes are 14, 2, 1, 0 ..., the bytes 0x2E, 0x01, 0 ...
    """
    blocks, amax = _mx_blocks(weight)
    scales = _e8m0_scales(amax, E2M1_MAX_EXPONENT)
    codes = _to_e2m1(blocks * _inverse_e8m0(scales).unsqueeze(-1))
    return MXFP4(elements=(codes[..., ::2] | codes[..., 1::2] << 4).flatten(-2), scales=scales)


def check_mx_type(name: str, kind: object) -> None:
    require(kind in get_args(MXType), f"{name}={kind!r} must be one of {', '.join(get_args(MXType))}")


def quantize_mx(weight: Tensor, stored: MXType) -> MXFP8 | MXFP4:
    check_mx_type("stored", stored)
    return quantize_mxfp4(weight) if stored == "mxfp4" else quantize_mxfp8(weight, rule="fit")


def quantize_fp8(weight: Tensor) -> FP8:
    """Quantise a weight to e4m3 with one float32 scale per block of 128 x 128.

    A scale is amax / 448, at least 2^-126, without its last 4 of 24 bits: those are room for an element's 4, so that
    dequantising is exact in float32. An element is the number times the scale's inverse, both rounded to float32: a
    division of every element takes a GPU three times as long.

    Args:
        weight: ``(..., N, K)`` float32, float16 or bfloat16, finite.

    Example: the weight ``[[7, -1, 0.3]]`` has the scale 7 / 448 = 2^-6; the elements are 448, -64 and 20 (from 19.2),
    dequantised 7, -1, 0.3125.
    """
    return _quantize_blocks("weight", weight, FP8_BLOCK, trusted=False)


def quantize_rows(tokens: Tensor, *, trusted: bool = False) -> FP8:
    """Quantise activations to e4m3 with one float32 scale per token and 128 of its elements; see ``quantize_fp8``.

    Args:
        tokens: ``(..., T, D)`` float32, float16 or bfloat16, finite; T may be 0.
        trusted: Do not look for NaN and infinity, and so never wait; they make NaN of the 128 elements they are among.

    Example: the tokens ``[[7, -1], [14, 0.3]]`` have the scales 2^-6 and 2^-5; the elements are 448, -64 and 448, 10
    (from 9.6), dequantised 7, -1 and 14, 0.3125.
    """
    return _quantize_blocks("tokens", tokens, 1, trusted=trusted)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(code - 127) in float32 or float64 for uint8 ``codes``; NaN for 255.

    Example: codes 0, 1, 127, 254, 255 are 2^-127, 2^-126, 1, 2^127, NaN.
    """
    if dtype == torch.float64:
        values = (codes.long() + (FLOAT64_BIAS - E8M0_BIAS) << FLOAT64_FRACTION_BITS).view(dtype)
    else:
        bits = codes.int() << FLOAT32_FRACTION_BITS
        bits = torch.where(codes == 0, 1 << (FLOAT32_FRACTION_BITS - 1), bits)  # 2^-127 is a subnormal number
        values = bits.view(dtype)
    return torch.where(codes == E8M0_NAN, float("nan"), values)


def _inverse_e8m0(codes: Tensor) -> Tensor:
    """2^(127 - code) in float32, exact, and a normal number where 2^(code - 127) is not; codes are at most 253."""
    return decode_e8m0((2 * E8M0_BIAS - codes.int()).byte())


def _times_e8m0(out: Tensor, scales: Tensor) -> Tensor:
    """``out (..., K)`` itself, every 32 of it multiplied by their scale."""
    # On a CPU in float64, to which 2^-127 is a normal number: torch.set_flush_denormal would make it 0.
    wide = torch.float64 if out.device.type == "cpu" else torch.float32
    out.unflatten(-1, (-1, MX_BLOCK)).mul_(decode_e8m0(scales, wide).unsqueeze(-1))
    return out


def _mx_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(..., K / 32, 32)`` float32 and the largest magnitude of each block; refuses what no block can hold."""
    _check_input("weight", weight)
    _check_contraction(weight.shape[-1] if weight.dim() else 0)
    blocks = weight.float().unflatten(-1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(-1)
    _check_finite("weight", weight, amax)
    return blocks, amax


def _e8m0_scales(amax: Tensor, max_exponent: int, saturates_above: float | None = None) -> Tensor:
    # The exponent field of a float32 is floor(log2) + 127 where it is not 0, and there the code is 0 in any case.
    codes = (amax.view(torch.int32) >> FLOAT32_FRACTION_BITS) - max_exponent
    codes = codes.clamp(min=0)
    if saturates_above is not None:
        codes = codes + (amax * _inverse_e8m0(codes) > saturates_above).int()
    # One more and the largest element would not be finite in float32: of e4m3 448 * 2^119 is, 256 * 2^120 is not.
    return codes.clamp(max=E8M0_BIAS + 127 - max_exponent).byte()


@torch.no_grad()
def _quantize_blocks(name: str, values: Tensor, block_rows: int, *, trusted: bool) -> FP8:
    _check_input(name, values)
    _check_matrix(name, values)
    rows, columns = values.shape[-2:]
    tiles = values.float()
    padding = (0, -columns % FP8_BLOCK, 0, -rows % block_rows)
    tiles = torch.nn.functional.pad(tiles, padding).unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, block_rows))
    amax = tiles.abs().amax((-3, -1))
    if not trusted:
        _check_finite(name, values, amax)
    # A divisor is a tensor: a GPU would multiply with the rounded inverse of a number.
    scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=SMALLEST_FP8_SCALE)
    scales = (scales.view(torch.int32) & ~0xF).view(torch.float32)
    by_column = scales.reciprocal().unsqueeze(-1).expand(*scales.shape, FP8_BLOCK).flatten(-2)[..., :columns]
    elements = _to_e4m3(values.float() * _by_row(by_column, rows, block_rows))
    return FP8(elements=elements, scales=scales, block_rows=block_rows, trusted=True)


def _by_row(scales: Tensor, rows: int, block_rows: int) -> Tensor:
    """``(..., N, C)`` of ``(..., ceil(N / block_rows), C)``; a view where every row has its own."""
    *outer, columns = scales.shape
    return scales.unsqueeze(-2).expand(*outer, block_rows, columns).flatten(-3, -2)[..., :rows, :]


def _numbers_of_bytes(device: torch.device, dtype: torch.dtype) -> Tensor:
    """``(256,)``: the two e2m1 numbers of each byte, low half first, in a type as wide as both."""
    numbers = torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)], dtype=dtype)
    return numbers.view(PAIRS[dtype.itemsize]).flatten().to(device, non_blocking=True)


def _to_e4m3(values: Tensor) -> Tensor:
    # Clamped first: a cast that meets a number past 464 may also give NaN.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e2m1(values: Tensor) -> Tensor:
    """uint8 codes: how many middles between neighbours lie below; a tie counts where the upper code is even."""
    size = values.abs()
    codes = values.signbit().byte() << 3
    for middle in (0.25, 1.25, 2.5, 5.0):
        codes += size > middle
    for middle in (0.75, 1.75, 3.5):
        codes += size >= middle
    return codes


def check_scale_values(name: str, scales: Tensor) -> None:
    """Raise ``ValueError`` for the first scale, e8m0 (uint8) or float32, that is no number; waits for the device."""
    if scales.dtype == torch.uint8:
        _refuse(scales == E8M0_NAN, scales, name, "be at most 254; 255 is the NaN of e8m0")
    else:
        _refuse(~scales.isfinite() | (scales < 0), scales, name, "be finite and not negative")


def _check_input(name: str, values: Tensor) -> None:
    require(values.dtype in MOE_DTYPES, f"{name}.dtype={values.dtype} must be one of {MOE_DTYPES}")


def _check_contraction(size: int) -> None:
    require(size > 0 and size % MX_BLOCK == 0, f"contraction={size} must be a positive multiple of {MX_BLOCK}")


def _check_mx(elements: Tensor, scales: Tensor, dtype: torch.dtype, per_byte: int, *, trusted: bool) -> None:
    size = per_byte * (elements.shape[-1] if elements.dim() else 0)
    sizes = Sizes(K=(size, "elements"))
    sizes.match("elements", elements, "... K" if per_byte == 1 else f"... K/{per_byte}", dtype=dtype)
    _check_contraction(size)
    if scales.dtype != torch.uint8:
        raise ValueError(f"scales of dtype {scales.dtype} must be torch.uint8 (view e8m0 scales as uint8)")
    sizes.match("scales", scales, f"... K/{MX_BLOCK}", device=elements.device)
    if not trusted:
        check_scale_values("scales", scales)


def _check_matrix(name: str, values: Tensor) -> None:
    shape = tuple(values.shape)
    require(len(shape) >= 2 and shape[-1] > 0, f"{name}.shape={shape} must be (..., rows, columns), columns at least 1")


def _check_finite(name: str, values: Tensor, amax: Tensor) -> None:
    """Look for the number to name only when the largest magnitudes say that there is one."""
    if not amax.isfinite().all():
        _refuse(~values.isfinite(), values, name, "be finite")


def _refuse(is_bad: Tensor, values: Tensor, name: str, rule: str) -> None:
    if is_bad.any():
        where = is_bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{where}={values[tuple(where)].item()} must {rule}")
