"""The cache of one layer's experts, and decode steps that read from it.

The GPU keeps the cache itself (``comet.kernels.expert_cache``): it looks up which experts a step needs, gives the
missing ones the slots that were used longest ago, and reads them from pinned host memory. A hit costs the host nothing,
and a step stays one CUDA graph. Results are those of experts that are all in GPU memory, bit for bit, where the slots
serve a step at once; a step in parts rounds as its parts do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comet.config import MoEConfig, require, resolve_kernels
from comet.decode.runners import Decoder, rounds
from comet.decode.weights import DecodeWeights
from comet.errors import UnavailableError
from comet.kernels.expert_cache import MAX_SLOTS, CacheTables, fetch, fetch_torch, lookup, lookup_torch


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """What caches did so far.

    Args:
        slots: Experts a layer's cache holds.
        needed: Distinct experts that steps needed, summed over steps and layers.
        fetched: How many of them were not there.
        fetched_bytes: Read from host memory.
    """

    slots: int
    needed: int
    fetched: int
    fetched_bytes: int

    @property
    def hits(self) -> float:
        """Share of the needed experts that were there; 1 before the first step."""
        return 1 - self.fetched / self.needed if self.needed else 1.0


class ExpertCache:
    """Slots for some experts of a layer on this rank's device.

    Args:
        w1: ``(E, 2F, D)`` all experts in host memory, gate rows first, then up rows; pinned here for a GPU.
        w2: ``(E, D, F)``, likewise.
        num_slots: S, at least 1.
        device: Where the slots are.

    Raises:
        ValueError: If the weights are not on the CPU, or there are more slots than a lookup can rank.
        UnavailableError: If the host's memory cannot be pinned.
    """

    def __init__(self, w1: Tensor, w2: Tensor, num_slots: int, device: torch.device) -> None:
        for name, weight in (("w1", w1), ("w2", w2)):
            require(weight.device.type == "cpu", f"device={weight.device} of {name} must be 'cpu': it is the store")
        require(1 <= num_slots <= MAX_SLOTS, f"num_slots={num_slots} must be between 1 and {MAX_SLOTS}")
        self.num_slots = num_slots
        self.w1, self.w2 = (pinned(weight.contiguous(), device) for weight in (w1, w2))
        self.tables = CacheTables.create(w1.shape[0], num_slots, device)
        self.weights = DecodeWeights(
            w1=torch.zeros(num_slots, *w1.shape[1:], dtype=w1.dtype, device=device),
            w2=torch.zeros(num_slots, *w2.shape[1:], dtype=w2.dtype, device=device),
            slots=self.tables.slots,
        )
        use_kernels = resolve_kernels(device, None)
        self._lookup: Callable[[Tensor, CacheTables], None] = lookup if use_kernels else lookup_torch
        self._fetch: Callable[..., None] = fetch if use_kernels else fetch_torch

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return self.w1[0].nbytes + self.w2[0].nbytes

    def bring(self, top_k_ids: Tensor) -> DecodeWeights:
        """Bring the experts of a step into slots; nothing waits for the device.

        Args:
            top_k_ids: ``(T, K)`` with at most S distinct experts.

        Returns:
            The slots, for a decode step that follows on the same stream.
        """
        self._lookup(top_k_ids, self.tables)
        self._fetch(self.w1, self.w2, self.weights.w1, self.weights.w2, self.tables)
        return self.weights


class CachedExperts:
    """Routed experts of a layer, from its cache; an ``ExpertPath``, for inference.

    A step of more tokens than the slots can serve at once is taken in parts.

    Args:
        cache: The layer's.
        decode: Warp decode, which all layers share.
        top_k: K, at most the number of slots.
    """

    def __init__(self, cache: ExpertCache, decode: Decoder, top_k: int) -> None:
        require(top_k <= cache.num_slots, f"num_slots={cache.num_slots} must be at least top_k={top_k}")
        self.cache = cache
        self.decode = decode
        self.tokens_at_once = min(decode.max_tokens, cache.num_slots // top_k)

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """See ``ExpertPath``; the weights of the layer are those of the cache."""
        ids, outputs = top_k_ids.contiguous(), []
        for start, stop in rounds(tokens.shape[0], self.tokens_at_once):
            part = slice(start, stop)
            experts = self.cache.bring(ids[part])
            outputs.append(self.decode(tokens[part], ids[part], top_k_weights[part], experts))
        return torch.cat(outputs) if outputs else tokens.new_empty(tokens.shape)


def slots_of_budget(budget: float, config: MoEConfig, num_layers: int, dtype: torch.dtype) -> int:
    """Experts of each layer that a budget holds.

    Example: 4 layers of 64 experts of D = 128, F = 64, float32 (98,304 bytes each): 0.25 holds 16, 10_000_000 bytes 25.

    Args:
        budget: Share of all experts, above 0 and up to 1; or bytes for all layers, above 1.
        config: Of the layers.
        num_layers: That have experts.
        dtype: Of the weights.

    Raises:
        ValueError: If a layer's top-k experts do not fit.
    """
    require(budget > 0, f"expert_budget={budget} must be above 0: a share of all experts, or bytes above 1")
    expert = 3 * config.hidden_size * config.ffn_size * dtype.itemsize
    slots = int(budget * config.num_experts) if budget <= 1 else int(budget // (max(num_layers, 1) * expert))
    needed, share = num_layers * config.top_k * expert, config.top_k / config.num_experts
    require(
        slots >= config.top_k,
        f"expert_budget={budget} holds {slots} experts of each of {num_layers} layers, and must hold top_k="
        f"{config.top_k}: {needed:,} bytes, or a share of {share:.3f}",
    )
    return min(slots, config.num_experts)


def pinned(weight: Tensor, device: torch.device) -> Tensor:
    """Memory that ``device`` reads: on a CPU the weight itself."""
    if device.type == "cpu" or weight.is_pinned():
        return weight
    try:
        return weight.pin_memory()
    except RuntimeError as error:
        raise UnavailableError(
            f"{weight.nbytes:,} bytes of host memory cannot be pinned, which a GPU needs to read experts from it "
            f"(ulimit -l, or a container's limit): {str(error).splitlines()[0]}"
        ) from error
