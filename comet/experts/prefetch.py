"""The experts that a layer will probably need travel to its cache while the layers before it compute.

A layer's router is asked early: with the tokens of the layer before, which differ from its own by one attention and one
feed-forward layer. What it names and is missing is planned at once, on a stream of its own, and travels from the moment
on where the layer before has its own experts; that a guess never delays a miss is ``comet.kernels.expert_prefetch``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comet.experts.cache import CachedExperts, ExpertCache
from comet.experts.staged import WHY_EAGER, StagedExperts
from comet.kernels.expert_prefetch import plan, plan_torch, travel, travel_torch
from comet.router import Routes

Predict = Callable[[Tensor], Tensor]  # (T, D) tokens of the layer before -> (T, K) int32, the likeliest first


class Prefetch:
    """Brings the probable experts of one layer to its cache.

    Args:
        cache: Of that layer.
        before: Cache of the layer before.
        predict: What its tokens say about this layer.
        stream: Beside the one that computes; ``None`` on a CPU.
    """

    def __init__(
        self, cache: ExpertCache, before: ExpertCache, predict: Predict, stream: torch.cuda.Stream | None
    ) -> None:
        self._cache, self._fetched, self._predict, self._stream = cache, before.host.fetched, predict, stream
        self._tokens: Tensor | None = None  # kept for as long as the other stream reads them
        self._planned: torch.cuda.Event | None = None

    def begin(self, tokens: Tensor) -> None:
        """Plan by the tokens ``(T, D)`` of the layer before; to be called before its experts are computed."""
        host, slots = self._cache.host, self._cache.weights.parts
        self._tokens = tokens
        if self._stream is None:
            plan_torch(self._predict(tokens), host)
            travel_torch(slots, host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(self._stream):
            plan(self._predict(tokens), slots, host)
            self._planned = self._stream.record_event()

    def travel(self) -> None:
        """Let the plan travel; to be called once the experts of the layer before are being computed."""
        if self._stream is None or self._planned is None:
            return
        assert self._fetched is not None, "the layer before has a cache on the same device"
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._fetched)
            travel(self._cache.weights.parts, self._cache.host)

    def wait_for_plan(self) -> None:
        """Let the current stream go on behind the plan; to be called before the layer's step."""
        if self._planned is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._planned)

    def join(self) -> None:
        """Let the current stream go on behind all of it, which the layer's step has ended."""
        if self._planned is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._tokens = self._planned = None


@torch.no_grad()
def probable(router: Routes, tokens: Tensor) -> Tensor:
    """``(T, K)`` int32: where the tokens ``(T, D)`` of the layer before would go if they were this router's."""
    return router(tokens).top_k_ids


def prefetch_between(paths: Sequence[CachedExperts | StagedExperts], predict: Sequence[Predict]) -> None:
    """Let every layer bring the experts of the next one.

    Args:
        paths: Of all layers, in the order in which they run.
        predict: For each of them, the first one's unused.

    Raises:
        NotImplementedError: If the host brings experts, out of files or memory that cannot be pinned.
    """
    cached = [path for path in paths if isinstance(path, CachedExperts)]
    if len(cached) < len(paths):
        raise NotImplementedError(f"expert_prefetch=True must be False where {WHY_EAGER}")
    device = cached[0].cache.weights.w1.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for path in cached:
        path.cache.expect_prefetch()
    for before, path, each in zip(cached, cached[1:], predict[1:], strict=False):
        before.ahead = path.expected = Prefetch(path.cache, before.cache, each, stream)
