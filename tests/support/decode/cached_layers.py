"""Layers of experts from caches and from GPU memory, over routing and guesses that a test sets."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.config import SpeculationConfig
from comet.decode.runners import LocalRunner
from comet.decode.weights import DecodeWeights
from comet.experts import CachedExperts, ExpertCache
from comet.experts.prefetch import expect_drafts, prefetch_between

E, K, D, F, LAYERS = 48, 4, 512, 208, 3


class CachedLayers:
    """Layers of E experts, ``(LAYERS, T, K)`` ids of which a step takes as many tokens and columns as it is given.

    Args:
        num_slots: Of each layer.
        num_tokens: T, the most of a step.
        made: Of the weights.
        policy: Of the caches.
        drafts: How drafts are made, if they are.
    """

    def __init__(
        self,
        num_slots: int,
        num_tokens: int,
        made: torch.Generator,
        policy: str = "lru",
        drafts: SpeculationConfig | None = None,
    ) -> None:
        device = torch.device("cuda")
        weights = [
            (torch.randn(E, 2 * F, D, generator=made).bfloat16(), torch.randn(E, D, F, generator=made).bfloat16())
            for _ in range(LAYERS)
        ]
        every = torch.arange(E, dtype=torch.int32, device=device)
        self.resident = [DecodeWeights(w1=w1.cuda(), w2=w2.cuda(), slots=every) for w1, w2 in weights]
        self.runner = LocalRunner(K, num_tokens)
        self.caches = [ExpertCache(w1, w2, num_slots, device, policy=policy) for w1, w2 in weights]
        self.paths = [CachedExperts(cache, self.runner, K) for cache in self.caches]
        self.ids = torch.zeros(LAYERS, num_tokens, K, dtype=torch.int32, device=device)
        self.guesses = self.ids.clone()
        self.square = torch.randn(2048, 2048, generator=made).cuda()
        prefetch_between(self.paths, [lambda x, n=layer: self.guesses[n, : len(x)].clone() for layer in range(LAYERS)])
        if drafts is not None:
            expect_drafts(self.paths, drafts)

    def draw(self, made: torch.Generator, right: float = 0.67) -> None:
        """New ids for all layers; so large a share of the guesses is right."""
        shape = self.ids.shape
        ids = torch.rand(*shape[:2], E, generator=made).argsort(-1)[..., :K].int()
        wrong = torch.randint(E, shape, generator=made, dtype=torch.int32)
        self.ids.copy_(ids)
        self.guesses.copy_(ids.where(torch.rand(shape, generator=made) < right, wrong))

    def cached(self, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        """Every layer's sum over the experts of ``(T, K)`` weights."""
        outputs = []
        for layer, path in enumerate(self.paths):
            if layer:
                torch.mm(self.square, self.square)  # what a layer does before its experts
            outputs.append(path(tokens, self._of(layer, weights), weights, *self.caches[layer].weights.parts))
        return outputs

    def expected(self, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        return [
            self.runner.decode(tokens, self._of(layer, weights), weights, self.resident[layer])
            for layer in range(LAYERS)
        ]

    def _of(self, layer: int, weights: Tensor) -> Tensor:
        return self.ids[layer, : weights.shape[0], : weights.shape[1]].contiguous()

    def check_slots(self) -> None:
        for cache, resident in zip(self.caches, self.resident, strict=True):
            for slot, expert in enumerate(cache.tables.owners.tolist()):
                if expert >= 0 and cache.tables.slots[expert] == slot:
                    assert torch.equal(cache.weights.w1[slot], resident.w1[expert])
                    assert torch.equal(cache.weights.w2[slot], resident.w2[expert])
