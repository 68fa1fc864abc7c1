"""What vLLM's configurations say of a layer's weights: their type, scales and biases, their order, the activation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.kernels.runtime.activation import Activation, ActivationName
from comet.layout import Biases
from comet.quantization.formats import FP8, FP8_BLOCK, MX_BLOCK, MXFP8, Weight

# By the value of vLLM's ``MoEActivation``; rows of w1 are gate and up in turn for ``swigluoai``.
ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
    "swigluoai": "clamped_swiglu",
    "swigluoai_uninterleave": "clamped_swiglu",
}
# What bends SwiGLU, by the field of the quant_config and of the moe_config, which holds where the former says nothing.
CLAMPS = {"gemm1_clamp_limit": "swiglu_limit", "gemm1_alpha": "swiglu_alpha", "gemm1_beta": "swiglu_beta"}
# Their values where neither says anything, as vLLM's kernels have them.
DEFAULTS: dict[str, tuple[float | None, float, float]] = {
    "swigluoai": (7.0, 1.702, 1.0),
    "swigluoai_uninterleave": (None, 1.0, 0.0),
}
SOURCES = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
Weights = tuple[Weight, Weight, Biases | None]


class WeightCache:
    """vLLM's weights with the scales and biases of its quant_config.

    Made once, because looking at scales waits for the device, and laying out w1 anew copies it; and again when vLLM
    puts another tensor in place of one of them, as it does when it reloads them, or writes to one that is copied.
    """

    def __init__(self, quant_config: Any, *, interleaved: bool = False) -> None:
        self.quant_config, self.interleaved = quant_config, interleaved
        self._sources: tuple[Tensor | None, ...] = ()
        self._versions: list[int] = []
        self._made: Weights | None = None

    def __call__(self, w1: Tensor, w2: Tensor) -> Weights:
        """w1, gate rows first, and w2, as they are or in the type that their scales say; and their biases."""
        of_config = [getattr(self.quant_config, name, None) for name in SOURCES]
        sources = (w1, w2, *of_config)
        copied = [each for each in sources[::2] if self.interleaved and each is not None]
        versions = [0 if each.is_inference() else each._version for each in copied]
        if self._made is None or versions != self._versions or any(map(operator.is_not, sources, self._sources)):
            self._made, self._sources, self._versions = self._make(w1, w2, *of_config), sources, versions
        return self._made

    def _make(self, w1: Tensor, w2: Tensor, *of_config: Tensor | None) -> Weights:
        w1_scale, w2_scale, b1, b2 = of_config
        if self.interleaved:
            w1, (w1_scale, b1) = gate_first(w1), (each if each is None else gate_first(each) for each in (w1_scale, b1))
        biases = None if b1 is None or b2 is None else Biases(b1, b2)
        if weight_type_of(self.quant_config) is Tensor:
            return w1, w2, biases
        return quantized(w1, w1_scale), quantized(w2, w2_scale), biases


def gate_first(rows: Tensor) -> Tensor:
    """``(e, 2F, ...)``: gate rows, then up rows, of those that are gate and up in turn."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1)


def activation_of(moe_config: Any, quant_config: Any) -> tuple[Activation, bool]:
    """What a layer of vLLM does to gate and up, and whether these rows of w1 are in turn."""
    value = getattr(moe_config.activation, "value", moe_config.activation)
    require(value in ACTIVATIONS, f"activation={value} of the moe_config must be one of {', '.join(ACTIVATIONS)}")
    name, defaults = ACTIVATIONS[value], DEFAULTS.get(value, (None, None, None))
    given = {}
    for (field, other), default in zip(CLAMPS.items(), defaults, strict=True):
        found = (getattr(quant_config, field, None), getattr(moe_config, other, None), default)
        given[field] = next((number for number in found if number is not None), None)
    if name != "clamped_swiglu":
        for field, number in given.items():
            require(number is None, f"{field}={number} must be None for activation={value}: it would be left out")
        return Activation(name), False
    limit, alpha, beta = given.values()
    require(limit is not None, f"gemm1_clamp_limit={limit} must be given for activation={value}")
    require(beta == 1, f"gemm1_beta={beta} must be 1.0 for activation={value}: it is added to up")
    return Activation(name, alpha=alpha, limit=limit), value == "swigluoai"


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
