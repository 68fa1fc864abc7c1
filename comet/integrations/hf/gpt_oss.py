"""gpt-oss in transformers: a clamped SwiGLU, biases on both projections, and weights that are laid out otherwise.

Its experts hold ``gate_up_proj (E, D, 2F)``, whose columns are gate and up in turn, and ``down_proj (E, F, D)``: Comet
multiplies by ``(E, 2F, D)``, gate rows first, and ``(E, D, F)``. Published folders hold them in MXFP4, which is not
transposed: ``gate_up_proj_blocks (E, 2F, D / 32, 16)``, two codes a byte, ``gate_up_proj_scales (E, 2F, D / 32)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet.config import require
from comet.integrations.hf.stored import MXFP4, StoredTensor
from comet.kernels.runtime.activation import Activation
from comet.layout import Biases
from comet.quantization import formats
from comet.quantization.formats import MX_BLOCK

FAMILY = "gpt_oss"
# What transformers' decorator records on its experts, as ``families.EXPERT_FLAGS`` for all others.
FLAGS = {
    "has_gate": True,
    "has_bias": True,
    "has_post_expert_norm": False,
    "is_transposed": True,
    "is_concatenated": False,
}
_KEPT = "_comet_laid_out"
_NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


class LaidOut(NamedTuple):
    """Experts as Comet computes them."""

    w1: Tensor  # (E, 2F, D), gate rows first
    w2: Tensor  # (E, D, F)
    biases: Biases  # (E, 2F) and (E, D)


def stock_class() -> Any:
    """transformers' class; ``None`` in versions that have no gpt-oss."""
    try:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    except ImportError:
        return None
    return GptOssExperts


def is_gpt_oss(experts: nn.Module) -> bool:
    """Whether experts are gpt-oss's, or of a class that is made of it."""
    kind = stock_class()
    return kind is not None and isinstance(experts, kind)


def activation_of(source: Any) -> Activation:
    """Of a configuration of gpt-oss, or of experts."""
    alpha = getattr(source, "swiglu_alpha", None) or getattr(source, "alpha", None)
    limit = getattr(source, "swiglu_limit", None) or getattr(source, "limit", None)
    return Activation("clamped_swiglu", alpha=alpha, limit=limit)


def check_quantisation(config: Any) -> None:
    """Raise ``ValueError`` unless a configuration says that its folder is in MXFP4, or not quantised at all."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    require(
        method in (None, "mxfp4"),
        f"quant_method={method!r} of quantization_config must be 'mxfp4': gpt-oss is read so, or in float32, float16 "
        "and bfloat16; dequantise the checkpoint first",
    )


def read_laid_out(tensors: dict[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """The tensors of a folder with those of experts as other families have them: what is read of them is laid out anew.

    Args:
        tensors: Of a checkpoint, by name.

    Returns:
        For the experts of a layer ``gate_up_proj (E, 2F, D)``, gate rows first, ``down_proj (E, D, F)``, and their
        biases ``(E, 2F)`` and ``(E, D)``.
    """
    found = dict(tensors)
    for name in tensors:
        if ".experts." not in name:
            continue
        stem, interleaved = name.removesuffix("_blocks"), "gate_up_proj" in name
        if name.endswith("_blocks") and f"{stem}_scales" in tensors:
            blocks, scales = found.pop(name), found.pop(f"{stem}_scales")
            found[stem] = _dequantised(blocks, scales, dtype, interleaved=interleaved)
        elif name.endswith(("gate_up_proj", "down_proj")) and len(found[name].shape) == 3:
            num_experts, columns, rows = found[name].shape
            turned = replace(found[name], lazy=Turned(found[name]), shape=(num_experts, rows, columns))
            found[name] = _gate_first(turned) if interleaved else turned
        elif name.endswith("gate_up_proj_bias"):
            found[name] = _gate_first(found[name])
    return found


@dataclass(frozen=True, slots=True)
class Turned:
    """Reads slices of ``(E, N, K)`` from a tensor ``(E, K, N)``."""

    tensor: StoredTensor

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = (*index, slice(None))[:3]
        return self.tensor[experts, columns, rows].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class GateFirst:
    """Reads rows of gate, or of up behind them, from a tensor ``(E, 2F, ...)`` whose rows are gate and up in turn.

    Example (F = 3): rows 4 and 5, the last two of up, are rows 3 and 5 of the tensor.
    """

    tensor: StoredTensor

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        experts, rows, *others = index
        half, first = divmod(rows.start, self.tensor.shape[1] // 2)
        pairs = slice(2 * first, 2 * (first + rows.stop - rows.start))
        return self.tensor[experts, pairs, *others][:, half::2]


@dataclass(frozen=True, slots=True)
class Dequantised:
    """Reads slices of ``(E, N, K)``, which may begin inside a block, as the numbers they stand for."""

    blocks: StoredTensor  # (E, N, K / 32, 16) uint8
    scales: StoredTensor  # (E, N, K / 32) uint8
    dtype: torch.dtype  # of the numbers

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = (*index, slice(None))[:3]
        span = range(MX_BLOCK * self.scales.shape[2])[columns]
        touched = slice(span.start // MX_BLOCK, -(-span.stop // MX_BLOCK))
        elements, scales = (part[experts, rows, touched] for part in (self.blocks, self.scales))
        try:
            packed = formats.MXFP4(elements=elements.flatten(2), scales=scales.contiguous())
        except ValueError as error:
            raise ValueError(f"{self.scales.name}: {error}") from error
        first = span.start - MX_BLOCK * touched.start
        return packed.dequantize(self.dtype)[..., first : first + len(span)]


def _gate_first(tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, lazy=GateFirst(tensor))


def _dequantised(blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype, *, interleaved: bool) -> StoredTensor:
    for tensor, shape in ((blocks, (*scales.shape, MX_BLOCK // 2)), (scales, scales.shape)):
        require(
            tensor.dtype == "U8" and tensor.shape == shape and len(scales.shape) == 3,
            f"{tensor.name} {tensor.dtype} of shape {tensor.shape} must be U8 of {shape}: MXFP4 has blocks "
            "(E, N, K / 32, 16) and scales (E, N, K / 32)",
        )
    shape = (*scales.shape[:2], MX_BLOCK * scales.shape[2])
    if interleaved:
        blocks, scales = _gate_first(blocks), _gate_first(scales)
    return replace(blocks, shape=shape, dtype=MXFP4, lazy=Dequantised(blocks, scales, dtype), read_as=dtype)


def laid_out(experts: Any) -> LaidOut:
    """Copies in Comet's layout, differentiably."""
    gate_up, b1 = experts.gate_up_proj.transpose(1, 2), experts.gate_up_proj_bias
    w1 = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)
    b1 = torch.cat([b1[:, ::2], b1[:, 1::2]], dim=1)
    return LaidOut(w1, experts.down_proj.transpose(1, 2).contiguous(), Biases(b1, experts.down_proj_bias))


def kept_layout(experts: Any) -> LaidOut:
    """``laid_out``; where no gradient is recorded its result is kept, beside the weights, until somebody writes these.

    So a model that calls Comet by its name holds its experts twice; ``convert`` holds them once.
    """
    if torch.is_grad_enabled() and any(getattr(experts, name).requires_grad for name in _NAMES):
        experts.__dict__.pop(_KEPT, None)
        return laid_out(experts)
    stand = [(part.data_ptr(), part.dtype, _version(part)) for part in (getattr(experts, name) for name in _NAMES)]
    kept = experts.__dict__.get(_KEPT)
    if kept is None or kept[0] != stand:
        with torch.no_grad():
            kept = stand, laid_out(experts)
        experts.__dict__[_KEPT] = kept
    found: LaidOut = kept[1]
    return found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
