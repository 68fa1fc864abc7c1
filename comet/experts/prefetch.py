"""The experts that a layer will probably need travel to its cache while other layers compute.

A layer's router is asked early: with the tokens of the layer before, which differ from its own by one attention and one
feed-forward layer. What it names and is missing is planned at once, on a stream of its own, and travels from the moment
on where the layer before has its own experts; that a guess never delays a miss is ``comet.kernels.experts.prefetch``'s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from comet.experts.cache import ExpertCache
from comet.kernels.experts.prefetch import plan, plan_torch, travel, travel_torch

# (T, D) tokens of this layer, or of the one before -> (T, K) int32, the likeliest first
Predict = Callable[[Tensor], Tensor]


class Prefetch:
    """Brings the probable experts of one layer to its cache.

    Args:
        predict: What tokens of the layer before say about this one.
        following: The same for the next layer; ``None``: it is the last one.
    """

    def __init__(
        self,
        cache: ExpertCache,
        predict: Predict,
        following: Prefetch | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._cache, self._predict, self._following, self._stream = cache, predict, following, stream
        cache.travel_stream = stream
        self._tokens: Tensor | None = None  # kept for as long as the other stream reads them
        self._planned: torch.cuda.Event | None = None  # behind the plan for the step to come
        self._issued: torch.cuda.Event | None = None  # behind all that ends once this step has begun

    def before_step(self, tokens: Tensor, num_experts: int) -> None:
        """To be called before the layer computes the experts of its tokens ``(T, D)``, ``num_experts`` of each."""
        if self._planned is not None:
            self._wait_for(self._planned)
        if self._following is not None:
            self._following.guess(tokens, num_experts)

    def after_step(self, tokens: Tensor) -> None:
        """To be called once the layer's experts are being computed, with what ``before_step`` was given."""
        if self._following is not None:
            self._following.travel(self._cache.host.fetched)
        if self._issued is not None:
            self._wait_for(self._issued)
        self._tokens = self._planned = self._issued = None
        if self._stream is not None and self._following is not None:
            self._following.keep(tokens, self._stream.record_event())

    def guess(self, tokens: Tensor, num_experts: int) -> None:
        """Plan the likeliest ``num_experts`` of the tokens ``(T, D)`` of the layer before."""
        if self._stream is None:
            with self._cache.used():
                plan_torch(self._predict(tokens)[:, :num_experts], self._cache.host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(self._stream):
            ids = self._predict(tokens)[:, :num_experts].contiguous()
            plan(ids, self._cache.weights.parts, self._cache.host)
            self._planned = self._stream.record_event()

    def travel(self, fetched: torch.cuda.Event | None) -> None:
        """Let the plan travel, once the layer before has its experts."""
        host, slots = self._cache.host, self._cache.weights.parts
        if self._stream is None:
            with self._cache.used():
                travel_torch(slots, host)
            return
        assert fetched is not None, "the layer before has a cache on the same device"
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fetched)
            travel(slots, host)

    def keep(self, tokens: Tensor, issued: torch.cuda.Event) -> None:
        """Keep what the layer before gave the other stream until this layer's step has begun."""
        self._tokens, self._issued = tokens, issued

    def _wait_for(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._cache.weights.w1.device).wait_event(event)
