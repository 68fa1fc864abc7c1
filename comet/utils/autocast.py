"""Products that round as they are documented to, whatever ``torch.autocast`` surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave autocast for products on ``device``; free where there is none."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def product(rows: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = linear) -> Tensor:
    """``(R, O)``: rows ``(R, I)`` times a weight ``(O, I)``, of one dtype in it, by ``multiply``.

    Gradients are products in the dtype of the result: torch's own would be in the type of an autocast that surrounds
    the call of ``backward``.
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
