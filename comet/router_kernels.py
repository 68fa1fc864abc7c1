"""The router's two heavy steps on Triton kernels, with gradients; imported only where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comet.kernels.router import router_logits, top_k_ids

__all__ = ["logits", "top_k_ids"]


def logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Router logits in float32 of bfloat16 tokens, as accurate as products in float32.

    Args:
        tokens: ``(T, D)`` bfloat16.
        weight: ``(E, D)`` float32 or bfloat16.

    Returns:
        ``(T, E)`` float32, with gradient.
    """
    result: Tensor = _Logits.apply(tokens, weight)
    return result


class _Logits(torch.autograd.Function):
    """Backward as ``nn.functional.linear`` in float32 has it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return router_logits(tokens.contiguous(), weight.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        wants_tokens, wants_weight = ctx.needs_input_grad
        grad_tokens = (grad @ weight.float()).to(tokens.dtype) if wants_tokens else None
        grad_weight = (grad.T @ tokens.float()).to(weight.dtype) if wants_weight else None
        return grad_tokens, grad_weight
