"""Products that round as they are documented to, whatever ``torch.autocast`` surrounds them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave autocast for products on ``device``; free where there is none."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """``(R, O)``: rows ``(R, I)`` times a weight ``(O, I)``, of one dtype, in it.

    So are its gradients: torch's own would be in the type of an autocast that surrounds the call of ``backward``.
    """
    result: Tensor = _Product.apply(rows, weight)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        with without_autocast(rows.device):
            return rows @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight = ctx.needs_input_grad
        with without_autocast(grad.device):
            return grad @ weight if wants_rows else None, grad.T @ rows if wants_weight else None
