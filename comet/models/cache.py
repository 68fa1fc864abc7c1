"""Attention over positions read together, and over those a cache remembers.

Shapes never depend on how far a sequence has come, and no step asks the host anything: a decode step writes at each
sequence's own position and masks what lies behind it, so it can be captured once and replayed.

Letters: B sequences, S positions read together, C positions the cache holds, H heads, G key and value heads, w width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from comet.config import require
from comet.models.config import ModelConfig


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let every position gather from itself and those before it.

    Args:
        query: ``(B, H, S, w)``.
        key: ``(B, G, S, w)``, G divides H.
        value: ``(B, G, S, w)``.

    Returns:
        ``(B, H, S, w)``.
    """
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class KeyValueCache:
    """The attention memory of B sequences, filled by ``GPT.prefill`` and extended by ``GPT.decode``.

    Args:
        config: Of the model.
        num_sequences: B.
        length: C, positions per sequence, at most the model's context.
        dtype: Of the model's products.
        device: Of the model.

    Raises:
        ValueError: If there are no sequences, or C is not between 1 and the context.
    """

    def __init__(
        self, config: ModelConfig, *, num_sequences: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        require(num_sequences >= 1, f"num_sequences={num_sequences} must be at least 1")
        require(1 <= length <= config.context, f"length={length} must be between 1 and context={config.context}")
        shape = (config.num_layers, num_sequences, config.num_kv_heads, length, config.head_width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        self.positions = torch.arange(length, device=device)

    def next_positions(self) -> Tensor:
        """``(B,)`` int64: where the next token of each sequence goes; a full sequence overwrites its last position."""
        return self.lengths.clamp(max=len(self.positions) - 1)

    def advance(self) -> None:
        """Count the token that every layer has now been extended by."""
        self.lengths.copy_(self.next_positions() + 1)

    def fill(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally, and remember the first S positions of a layer; see ``attend_causally``."""
        self.keys[layer, :, :, : key.shape[2]] = key
        self.values[layer, :, :, : value.shape[2]] = value
        return attend_causally(query, key, value)

    def extend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Remember one more position of each sequence and let it gather from all of its own.

        Args:
            layer: Which layer attends.
            query: ``(B, H, 1, w)``.
            key: ``(B, G, 1, w)``, G divides H.
            value: ``(B, G, 1, w)``.

        Returns:
            ``(B, H, 1, w)``.
        """
        newest = self.next_positions()[:, None, None, None]
        keys, values = self.keys[layer], self.values[layer]
        keys.scatter_(2, newest.expand_as(key), key)
        values.scatter_(2, newest.expand_as(value), value)
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, keys, values, attn_mask=self.positions <= newest, enable_gqa=grouped)
