"""Products that round as they are documented to, whatever ``torch.autocast`` surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")  # transformers' names


def autocast_dtype(tokens: Tensor) -> torch.dtype:
    """Return the dtype in which ``torch.autocast`` multiplies tokens, or their own dtype if it is off."""
    kind = tokens.device.type
    casts = torch.is_autocast_enabled(kind) and tokens.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else tokens.dtype


def in_dtype(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast tokens to the layer's dtype if autocast multiplies in this dtype, else return them unchanged."""
    return tokens.to(dtype) if tokens.dtype != dtype and autocast_dtype(tokens) == dtype else tokens


def alike(tokens: Tensor, *weights: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
    """Return tokens and experts' weights unchanged if they have one dtype, else cast to autocast's dtype.

    Without autocast another type raises ``ValueError``. Weights come in the order of their names in transformers.
    """
    pairs = zip(NAMES, weights, strict=True)
    others = [name for name, weight in pairs if weight is not None and weight.dtype != tokens.dtype]
    if not others:
        return tokens, weights
    if not torch.is_autocast_enabled(tokens.device.type):
        rule = f"must be of the tokens' dtype {tokens.dtype}, or the model run under torch.autocast"
        raise ValueError(f"{', '.join(others)} {rule}")
    dtype = autocast_dtype(tokens)
    return tokens.to(dtype), tuple(None if weight is None else weight.to(dtype) for weight in weights)


def product(rows: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = linear) -> Tensor:
    """Multiply rows ``(R, I)`` with a weight ``(O, I)`` of the same dtype to ``(R, O)``, by ``multiply``.

    Gradients are in the result's dtype; torch's own would take the dtype of an autocast around ``backward``.
    """
    result: Tensor = _Product.apply(rows, weight, multiply)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        with without_autocast(rows.device):
            return multiply(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        with without_autocast(grad.device):
            grad_rows = (grad @ weight.to(grad.dtype)).to(rows.dtype) if wants_rows else None
            grad_weight = (grad.T @ rows.to(grad.dtype)).to(weight.dtype) if wants_weight else None
        return grad_rows, grad_weight, None
