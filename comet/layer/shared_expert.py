"""The shared expert: a dense gated MLP that every token goes through, next to its routed experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comet.config import require
from comet.kernels.runtime.activation import SWIGLU, Activation


def joins_step(tokens: Tensor, decode_tokens: int) -> bool:
    """Whether a step of these tokens ``(..., D)`` includes the shared expert; else its own module runs."""
    return tokens.shape[:-1].numel() <= decode_tokens and not torch.is_grad_enabled()


class SharedExpert(nn.Module):
    """``tokens -> w2 activation(gate, up)`` with gate and up from one matrix; needs no communication.

    Args:
        shared_ffn_size: F_shared, the width of gate and of up.
        dtype: Dtype of ``w1 (2 * F_shared, D)``, gate rows first, then up rows, and ``w2 (D, F_shared)``.
    """

    def __init__(
        self,
        hidden_size: int,
        shared_ffn_size: int,
        *,
        activation: Activation = SWIGLU,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        require(hidden_size > 0, f"hidden_size={hidden_size} must be positive")
        require(shared_ffn_size > 0, f"shared_ffn_size={shared_ffn_size} must be positive (0: build no shared expert)")
        self.w1 = nn.Parameter(torch.empty(2 * shared_ffn_size, hidden_size, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(hidden_size, shared_ffn_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both matrices uniformly from ``+-1/sqrt(columns)``."""
        for weight in (self.w1, self.w2):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(T, D)`` for tokens ``(T, D)``; parameters are cast to their dtype, and under autocast to its own."""
        hidden_size = self.w2.shape[0]
        require(
            tokens.dim() == 2 and tokens.shape[1] == hidden_size,
            f"tokens of shape {tuple(tokens.shape)} must be (T, D) with D = hidden_size={hidden_size}",
        )
        w1, w2 = self.w1.to(tokens.dtype), self.w2.to(tokens.dtype)
        gate, up = nn.functional.linear(tokens, w1).chunk(2, dim=-1)
        return nn.functional.linear(self.activation.forward(gate, up), w2).to(tokens.dtype)
