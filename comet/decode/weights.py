"""The experts a rank holds for decoding, and what a decode step accepts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comet.config import DIM_MULTIPLE, MAX_TOP_K, check_token_dtype, require
from comet.decode.scales import check_scales
from comet.quantize import FP8_BLOCK, MX_BLOCK

MAX_DECODE_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWeights:
    """Expert weights in slots, and the table that finds an expert's slot.

    A shared expert n times as wide as a routed one can be n more experts that every token routes to with weight 1:
    ``SharedSlots`` makes them, over ranks as well; one of another width stays outside.

    Example: S = 2 slots hold experts 5 and 1 of E = 8: slots ``[-1, 1, -1, -1, -1, 0, -1, -1]``.

    Args:
        w1: ``(S, 2F, D)``, gate rows first, then up rows, of each slot.
        w2: ``(S, D, F)``, dtype of ``w1``.
        slots: ``(E,)`` int32 in ``[-1, S)``: slot of each global expert; -1: not held here, its routed rows contribute
            nothing on this rank. Read on the device at every step, never by the host.
        w1_scales: ``None`` for float32, float16 and bfloat16. Quantised weights (float8_e4m3fn) have MXFP8 scales
            ``(S, 2F, D / 32)`` uint8, e8m0 codes, or block scales ``(S, ceil(2F / 128), ceil(D / 128))`` float32. Their
            values are looked at here, which waits for their device.
        w2_scales: Likewise, ``(S, D, F / 32)`` or ``(S, ceil(D / 128), ceil(F / 128))``.

    Raises:
        ValueError: If shapes, dtypes, devices or strides do not fit together, or a scale is no number; the message
            names the field.
    """

    w1: Tensor
    w2: Tensor
    slots: Tensor
    w1_scales: Tensor | None = None
    w2_scales: Tensor | None = None

    def __post_init__(self) -> None:
        require(self.w2.dim() == 3, f"w2 of shape {tuple(self.w2.shape)} must be (S, D, F)")
        num_slots, hidden_size, ffn_size = self.w2.shape
        shape = (num_slots, 2 * ffn_size, hidden_size)
        require(tuple(self.w1.shape) == shape, f"w1 of shape {tuple(self.w1.shape)} must be (S, 2F, D) = {shape}")
        for letter, size in (("D", hidden_size), ("F", ffn_size)):
            require(
                size > 0 and size % DIM_MULTIPLE == 0, f"{letter}={size} must be a positive multiple of {DIM_MULTIPLE}"
            )
        require(num_slots >= 1, f"w1 of shape {tuple(self.w1.shape)} must have at least one slot")
        require(
            self.w1.dtype == self.w2.dtype, f"w1 and w2 of dtype {self.w1.dtype} and {self.w2.dtype} must be the same"
        )
        require(
            self.slots.dim() == 1 and self.slots.dtype == torch.int32,
            f"slots of shape {tuple(self.slots.shape)} and dtype {self.slots.dtype} must be (E,) torch.int32",
        )
        for name in ("w1", "w2", "slots"):
            tensor = getattr(self, name)
            require(
                tensor.is_contiguous(),
                f"{name} of shape {tuple(tensor.shape)} must be contiguous, has strides {tensor.stride()}",
            )
            require(
                tensor.device == self.w1.device,
                f"{name} is on {tensor.device}, must be on w1's device {self.w1.device}",
            )
        check_scales(self.w1, self.w2, self.w1_scales, self.w2_scales)

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.w2.shape[1]

    @property
    def ffn_size(self) -> int:
        """F."""
        return self.w2.shape[2]

    @property
    def num_experts(self) -> int:
        """E, all experts that ids may name, held here or not."""
        return self.slots.shape[0]

    @property
    def shared_scale(self) -> int:
        """Neighbours along the contraction that share a scale: 32 (MXFP8), 128 (block FP8), 0 without scales."""
        if self.w1_scales is None:
            return 0
        return MX_BLOCK if self.w1_scales.dtype == torch.uint8 else FP8_BLOCK


def check_inputs(tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, weights: DecodeWeights) -> None:
    """Raise ``ValueError`` naming field, value and rule unless a decode step can take these tensors."""
    require(tokens.dim() == 2, f"tokens of shape {tuple(tokens.shape)} must be (T, D)")
    check_token_dtype(tokens.dtype)
    num_tokens, hidden_size = tokens.shape
    require(
        num_tokens <= MAX_DECODE_TOKENS,
        f"T={num_tokens} tokens must be at most MAX_DECODE_TOKENS={MAX_DECODE_TOKENS}: more take the fused path",
    )
    require(hidden_size == weights.hidden_size, f"D={hidden_size} of tokens must be the D={weights.hidden_size} of w2")
    require(
        top_k_ids.dim() == 2 and top_k_ids.shape[0] == num_tokens,
        f"top_k_ids of shape {tuple(top_k_ids.shape)} must be (T, K) with T={num_tokens}",
    )
    require(1 <= top_k_ids.shape[1] <= MAX_TOP_K, f"K={top_k_ids.shape[1]} must be between 1 and {MAX_TOP_K}")
    require(
        top_k_weights.shape == top_k_ids.shape,
        f"top_k_weights of shape {tuple(top_k_weights.shape)} must be (T, K) = {tuple(top_k_ids.shape)}",
    )
    require(
        top_k_ids.dtype in (torch.int32, torch.int64),
        f"top_k_ids of dtype {top_k_ids.dtype} must be torch.int32 or torch.int64",
    )
    if weights.w1_scales is None:
        require(
            tokens.dtype == weights.w1.dtype,
            f"tokens of dtype {tokens.dtype} must have the weights' {weights.w1.dtype}",
        )
    wide = torch.promote_types(tokens.dtype, torch.float32)
    require(top_k_weights.dtype == wide, f"top_k_weights of dtype {top_k_weights.dtype} must be {wide}")
    for name, tensor in (("tokens", tokens), ("top_k_ids", top_k_ids), ("top_k_weights", top_k_weights)):
        require(
            tensor.device == weights.w1.device,
            f"{name} is on {tensor.device}, must be on the weights' device {weights.w1.device}",
        )
