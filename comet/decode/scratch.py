"""Memory a decode step needs between its two kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comet.config import MAX_TOP_K, require
from comet.decode.weights import MAX_DECODE_TOKENS, DecodeWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeScratch:
    """Buffers of one stream: steps that use them must run one after the other."""

    hidden: Tensor  # (J, F) in the tokens' dtype: what gate/up leaves for down, per routed row; J = most tokens x K
    partials: Tensor  # (J, D) float32: what down computes per routed row
    tickets: Tensor  # (D,) int32 zeros: how many blocks finished a column block; zero again after every step

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden``, ``partials`` and ``tickets``."""
        return self.hidden, self.partials, self.tickets

    @classmethod
    def create(
        cls, weights: DecodeWeights, top_k: int, dtype: torch.dtype, *, max_tokens: int = MAX_DECODE_TOKENS
    ) -> DecodeScratch:
        """Allocate for steps of at most ``max_tokens`` tokens with ``top_k`` experts each, on the weights' device."""
        require(
            0 <= max_tokens <= MAX_DECODE_TOKENS, f"max_tokens={max_tokens} must be between 0 and {MAX_DECODE_TOKENS}"
        )
        require(1 <= top_k <= MAX_TOP_K, f"top_k={top_k} must be between 1 and {MAX_TOP_K}")
        device, rows = weights.w1.device, max_tokens * top_k
        return cls(
            hidden=torch.empty(rows, weights.ffn_size, dtype=dtype, device=device),
            partials=torch.empty(rows, weights.hidden_size, dtype=torch.float32, device=device),
            tickets=torch.zeros(weights.hidden_size, dtype=torch.int32, device=device),
        )

    def check(self, tokens: Tensor, top_k: int, weights: DecodeWeights) -> None:
        """Raise ``ValueError`` unless the buffers are large enough for a step, of its dtype and on its device."""
        rows = tokens.shape[0] * top_k
        require(
            self.hidden.shape[0] >= rows and self.hidden.shape[1] == weights.ffn_size,
            f"scratch for {tuple(self.hidden.shape)} (rows, F) must hold {rows} rows of F={weights.ffn_size}",
        )
        require(
            self.partials.shape[1] == weights.hidden_size,
            f"scratch for D={self.partials.shape[1]} must be for D={weights.hidden_size}",
        )
        require(
            self.hidden.dtype == tokens.dtype and self.hidden.device == tokens.device,
            f"scratch of {self.hidden.dtype} on {self.hidden.device} must be {tokens.dtype} on {tokens.device}",
        )
