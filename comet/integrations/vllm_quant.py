"""vLLM's words for quantised weights and activations, in terms of ``comet.quantize``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.quantize import FP8, FP8_BLOCK, MX_BLOCK, MXFP8, Weight


class WeightCache:
    """vLLM's weights with the scales of its quant_config, made once, because looking at scales waits for the device.

    Made again when vLLM puts another tensor in place of a weight or of its scales, as it does when it reloads them.
    """

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config
        self._sources: tuple[Tensor | None, ...] = ()
        self._made: tuple[Weight, Weight] | None = None

    def __call__(self, w1: Tensor, w2: Tensor) -> tuple[Weight, Weight]:
        """The pair as it is, or in the type that its scales say.

        Raises:
            ValueError: If elements and scales do not fit together, or a scale is no number.
        """
        if weight_type_of(self.quant_config) is Tensor:
            return w1, w2
        sources = (w1, w2, self.quant_config.w1_scale, self.quant_config.w2_scale)
        if self._made is None or any(map(operator.is_not, sources, self._sources)):
            self._made, self._sources = (quantized(w1, sources[2]), quantized(w2, sources[3])), sources
        return self._made


def quantized(elements: Tensor, scales: Tensor | None) -> FP8 | MXFP8:
    """Elements with their scales, in the type that the scales' dtype says."""
    if scales is None:
        raise ValueError("w1_scale and w2_scale of the quant_config must both be given, or neither")
    if scales.dtype == torch.uint8:
        return MXFP8(elements=elements, scales=scales)
    return FP8(elements=elements, scales=scales)


def weight_type_of(quant_config: Any) -> type[Weight]:
    """The type of the weights of a layer, by its scales: none, uint8 (MXFP8) or anything else, which has to be FP8."""
    scales = getattr(quant_config, "w1_scale", None)
    if scales is None:
        return Tensor
    return MXFP8 if scales.dtype == torch.uint8 else FP8


def scheme(key: Any) -> tuple[int, ...] | None:
    """Rows and columns that share a scale, of a ``QuantKey`` of vLLM in e4m3; ``(0, 0)`` for what is not known here."""
    if key is None:
        return None
    shape = tuple(getattr(key.scale, "group_shape", (0, 0)))
    scales = torch.uint8 if shape == (1, MX_BLOCK) else torch.float32
    return shape if key.dtype == torch.float8_e4m3fn and getattr(key.scale, "dtype", None) == scales else (0, 0)


def wants_fp8(quant_config: Any, defer_input_quant: bool) -> bool:
    """Whether tokens are to be quantised before they travel; raises ``ValueError`` where it would not be our way."""
    dtype = getattr(quant_config, "quant_dtype", None)
    if dtype is None or defer_input_quant:
        return False
    block = getattr(quant_config, "block_shape", None)
    require(
        dtype == torch.float8_e4m3fn and block is not None and list(block) == [FP8_BLOCK, FP8_BLOCK],
        f"quant_dtype={dtype} with block_shape={block} must be {torch.float8_e4m3fn} with [{FP8_BLOCK}, {FP8_BLOCK}]",
    )
    return True
