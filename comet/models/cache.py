"""Attention over positions read together, and over those a cache remembers.

Shapes never depend on how far a sequence has come, and no step asks the host anything: a decode step writes at each
sequence's own positions and masks what lies behind them, so it can be captured once and replayed.

Letters: B sequences, S positions read together, C positions the cache holds, H heads, G key and value heads, w width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from comet.config import require
from comet.models.config import ModelConfig

CHUNK = 256  # positions whose values are added up in one product


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let every position gather from itself and those before it."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class KeyValueCache:
    """The attention memory of B sequences, filled by ``GPT.prefill`` and extended by ``GPT.extend``.

    Places past a sequence's length are never read, so setting ``lengths`` back takes tokens away.
    """

    def __init__(
        self, config: ModelConfig, *, num_sequences: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        require(num_sequences >= 1, f"num_sequences={num_sequences} must be at least 1")
        require(1 <= length <= config.context, f"length={length} must be between 1 and context={config.context}")
        self.length = length
        places = allocated_places(length)
        shape = (config.num_layers, num_sequences, config.num_kv_heads, places, config.head_width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        self.positions = torch.arange(places, device=device)

    def clear(self) -> None:
        """Forget everything, in place: what is left out of a sum is multiplied by zero, and must be a number."""
        self.keys.zero_()
        self.values.zero_()
        self.lengths.zero_()

    def next_positions(self, count: int = 1) -> Tensor:
        """``(B, count)`` int64: where the next tokens of each sequence go; a full one overwrites its last position.

        Example: lengths ``[4, 6]`` of 8 positions, count 3: ``[[4, 5, 6], [6, 7, 7]]``.
        """
        return (self.lengths[:, None] + self.positions[:count]).clamp(max=self.length - 1)

    def advance(self, count: int = 1) -> None:
        self.rewind(self.lengths + count)

    def rewind(self, lengths: Tensor) -> None:
        """Keep the first ``lengths (B,)`` tokens of each sequence, at most all that there is room for."""
        self.lengths.copy_(lengths.clamp(max=self.length))

    def fill(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally, and remember the first S positions of a layer; see ``attend_causally``."""
        self.keys[layer, :, :, : key.shape[2]] = key
        self.values[layer, :, :, : value.shape[2]] = value
        return attend_causally(query, key, value)

    def extend(self, layer: int, newest: Tensor, unseen: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Remember S more positions of each sequence and let each gather from all up to itself.

        Args:
            newest: ``(B, S)`` int64, from ``next_positions``.
            unseen: From ``unseen_from`` these positions; all layers share it.
            key: ``(B, G, S, w)``, G divides H; ``value`` alike, ``query (B, H, S, w)``.
        """
        keys, values = self.keys[layer], self.values[layer]
        place = newest[:, None, :, None].expand_as(key)
        keys.scatter_(2, place, key)
        values.scatter_(2, place, value)
        return attend_to_cache(query, keys, values, unseen)

    def unseen_from(self, newest: Tensor) -> Tensor:
        """``(B, 1, S, C)`` bool: the places that lie behind positions of each sequence, ``newest (B, S)``."""
        return self.positions > newest[:, None, :, None]


def allocated_places(length: int) -> int:
    """Positions a cache of ``length`` positions takes memory for: whole chunks; 300 take 512, 200 take 200."""
    return length if length <= CHUNK else -(-length // CHUNK) * CHUNK


def attend_to_cache(query: Tensor, keys: Tensor, values: Tensor, unseen: Tensor) -> Tensor:
    """Let some positions of each sequence gather from all that its cache holds: ``(B, H, S, w)``, like ``query``.

    Heads that share keys are the rows of one product, so keys and values are read once, and the sum over positions is
    cut into chunks: a product that is 8 rows high keeps a GPU busy only where many of them run at once. Products of 16
    bits are added up in float32.

    Args:
        keys: ``(B, G, C, w)``, G divides H; C is at most ``CHUNK`` or a multiple of it; ``values`` alike.
        unseen: ``(B, 1, S, C)`` bool, what to leave out: not all of a position.
    """
    batch, num_heads, positions, width = query.shape
    groups, places = keys.shape[1:3]
    rows, chunk = num_heads // groups * positions, min(places, CHUNK)
    with torch.autocast(query.device.type, enabled=False):
        scores = _product(query.reshape(batch * groups, rows, width), keys.flatten(0, 1).mT) * width**-0.5
        scores = scores.view(batch, num_heads, positions, places).masked_fill(unseen, float("-inf"))
        shares = scores.softmax(dim=-1).to(values.dtype)
        parts = shares.view(batch * groups, rows, -1, chunk).transpose(1, 2).reshape(-1, rows, chunk)
        mixed = _product(parts, values.reshape(-1, chunk, width))
        total = mixed.view(batch * groups, -1, rows, width).sum(dim=1)
    return total.view(batch, num_heads, positions, width).to(query.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``(N, i, j)`` times ``(N, j, k)`` in float32."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
