"""gpt-oss in transformers: a clamped SwiGLU, biases on both projections, and weights that are laid out otherwise.

Its experts hold ``gate_up_proj (E, D, 2F)``, whose columns are gate and up in turn, and ``down_proj (E, F, D)``: Comet
multiplies by ``(E, 2F, D)``, gate rows first, and ``(E, D, F)``. Published folders hold them in MXFP4, which is not
transposed: ``gate_up_proj_blocks (E, 2F, D / 32, 16)``, two codes a byte, ``gate_up_proj_scales (E, 2F, D / 32)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet.config import require
from comet.decode.shared import state_of
from comet.integrations.hf.stored import BIASES, FUSED, MXFP4, Index, StoredTensor
from comet.kernels.runtime.activation import Activation
from comet.layout import Biases
from comet.quantization import formats
from comet.quantization.formats import MX_BLOCK

FAMILY = "gpt_oss"
_KEPT = "_comet_laid_out"
_NAMES = FUSED + BIASES


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
    """The tensors of a folder, of which those of experts are read as other families have them, gate rows first."""
    found = dict(tensors)
    for name in tensors:
        if ".experts." not in name:
            continue
        stem = name.removesuffix("_blocks")
        if name.endswith("_blocks") and f"{stem}_scales" in tensors:
            found[stem] = _dequantised(_gate_first(found.pop(name)), _gate_first(found.pop(f"{stem}_scales")), dtype)
        elif name.endswith(FUSED) and len(found[name].shape) == 3:
            found[name] = _gate_first(_turned(found[name]))
        elif name.endswith(BIASES):
            found[name] = _gate_first(found[name])
    return found


def _turned(tensor: StoredTensor) -> StoredTensor:
    """``(E, N, K)`` of a tensor ``(E, K, N)``."""
    num_experts, columns, rows = tensor.shape

    def read(index: Index) -> Tensor:
        experts, rows, columns = index
        return tensor.read((experts, columns, rows)).transpose(1, 2)

    return replace(tensor, shape=(num_experts, rows, columns), read=read)


def _gate_first(tensor: StoredTensor) -> StoredTensor:
    """Rows of gate, or of up behind them, of a tensor ``(E, 2F, ...)`` of both in turn; any other is as it was.

    Example (F = 3): rows 4 and 5, the last two of up, are rows 3 and 5 of the tensor.
    """
    if "gate_up_proj" not in tensor.name:
        return tensor

    def read(index: Index) -> Tensor:
        experts, rows, *others = index
        half, first = divmod(rows.start, tensor.shape[1] // 2)
        pairs = slice(2 * first, 2 * (first + rows.stop - rows.start))
        return tensor.read((experts, pairs, *others))[:, half::2]

    return replace(tensor, read=read)


def _dequantised(blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """``(E, N, K)`` numbers of MXFP4, of which slices may begin inside a block."""
    for tensor, shape in ((blocks, (*scales.shape, MX_BLOCK // 2)), (scales, scales.shape)):
        require(
            tensor.dtype == "U8" and tensor.shape == shape and len(scales.shape) == 3,
            f"{tensor.name} {tensor.dtype} of shape {tensor.shape} must be U8 of {shape}: MXFP4 has blocks "
            "(E, N, K / 32, 16) and scales (E, N, K / 32)",
        )

    def read(index: Index) -> Tensor:
        experts, rows, columns = index
        touched = slice(columns.start // MX_BLOCK, -(-columns.stop // MX_BLOCK))
        elements = blocks.read((experts, rows, touched, slice(0, MX_BLOCK // 2))).flatten(2)
        try:
            packed = formats.MXFP4(elements=elements, scales=scales.read((experts, rows, touched)).contiguous())
        except ValueError as error:
            raise ValueError(f"{scales.name}: {error}") from error
        first = columns.start - MX_BLOCK * touched.start
        return packed.dequantize(dtype)[..., first : first + columns.stop - columns.start]

    shape = (*scales.shape[:2], MX_BLOCK * scales.shape[2])
    return replace(blocks, shape=shape, dtype=MXFP4, read=read, read_as=dtype)


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
    parts = [getattr(experts, name) for name in _NAMES]
    stand, kept = state_of(parts), experts.__dict__.get(_KEPT)
    if kept is None or kept[0] != stand:
        with torch.no_grad():
            # With the parts: those of a parametrization are temporary, and others would come to their addresses.
            kept = experts.__dict__[_KEPT] = stand, laid_out(experts), parts
    found: LaidOut = kept[1]
    return found
