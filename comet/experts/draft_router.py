"""Routing of a draft: the r best experts of a layer instead of its K, or the r best among those that are cached."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from comet.router import Router, Routing


class DraftRouter:
    """Routes a layer's tokens to fewer experts, by the layer's own scores; a ``comet.router.Routes``.

    Routing weights follow the layer's rule: where it renormalises its K weights to sum to one, the r weights do; where
    it does not, they are the scores as they are, and their sum is smaller than that of K.

    Args:
        router: Of the layer.
        draft_experts: r, at least 1 and at most K.
        slots: ``(E,)`` int32, slot of each expert, -1: not cached (``ExpertCache.weights.slots``). Only cached experts
            are chosen then; where a token finds fewer than r of them, the rest of its row is masked. Read on the device
            at every step. ``None``: all experts are chosen from.
    """

    def __init__(self, router: Router, draft_experts: int, slots: Tensor | None = None) -> None:
        self.router = router
        self.config = replace(router.config, top_k=draft_experts)
        self.slots = slots
        self.measure = router.measure

    def __call__(self, tokens: Tensor) -> Routing:
        """``(T, D)`` -> a ``Routing`` with ids ``(T, r)``, of which -1 is masked with weight 0."""
        bias = self.router.selection_bias
        if self.slots is None:
            return self.router.route(tokens, self.config, bias)
        even = self.router.weight.new_zeros(self.config.num_experts) if bias is None else bias
        bias = even.masked_fill(self.slots < 0, float("-inf"))
        routing = self.router.route(tokens, self.config, bias)
        missing = self.slots[routing.top_k_ids.long()] < 0
        return replace(
            routing,
            top_k_ids=routing.top_k_ids.masked_fill(missing, -1),
            top_k_weights=routing.top_k_weights.masked_fill(missing, 0.0),
        )
