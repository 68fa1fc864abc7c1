"""gpt-oss in transformers: a clamped SwiGLU, biases on both projections, and weights that are laid out otherwise.

Its experts hold ``gate_up_proj (E, D, 2F)``, whose columns are gate and up in turn, and ``down_proj (E, F, D)``: Comet
multiplies by ``(E, 2F, D)``, gate rows first, and ``(E, D, F)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet.kernels.runtime.activation import Activation
from comet.layout import Biases

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
    """Experts as Comet computes them.

    Args:
        w1: ``(E, 2F, D)``, gate rows first.
        w2: ``(E, D, F)``.
        biases: ``(E, 2F)`` and ``(E, D)``.
    """

    w1: Tensor
    w2: Tensor
    biases: Biases


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


def refuse_folder(config: Any, folder: Path) -> None:
    """Raise ``NotImplementedError`` where a folder holds gpt-oss, which is not read shard by shard."""
    if config.model_type == FAMILY:
        raise NotImplementedError(
            f"model_type={FAMILY!r} of {folder} is not read shard by shard: make the model by transformers' "
            "from_pretrained, then call comet.integrations.hf.convert(model, group)"
        )


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
