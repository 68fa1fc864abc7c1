"""Layers of experts from caches and from GPU memory, over routing and guesses that a test sets."""

from typing import Any

import torch
from cache_cases import cache_of, check_slots, resident_weights
from decode_cases import DecodeCase
from torch import Tensor

from comet.decode.runners import LocalRunner
from comet.experts.cached import CachedExperts, prefetch_between
from comet.layout import RoutedTokens

E, K, D, F, LAYERS = 48, 4, 512, 208, 3
CUDA = torch.device("cuda")


def case_of(num_tokens: int, **changes: Any) -> DecodeCase:
    """E experts of which each token has K."""
    return DecodeCase(**dict(name="cached", T=num_tokens, K=K, E=E, D=D, F=F) | changes)


def draw_step(made: torch.Generator, num_tokens: int, num_experts: int = E, *, masked: bool = True) -> RoutedTokens:
    """Tokens, ids and weights of a step on the GPU; ``masked``: some ids are -1."""
    ids = torch.rand(num_tokens, num_experts + masked, generator=made).argsort(1)[:, :K].int() - int(masked)
    tokens, weights = torch.randn(num_tokens, D, generator=made).bfloat16(), torch.rand(ids.shape, generator=made)
    return RoutedTokens(tokens.cuda(), ids.cuda(), weights.cuda())


def refill(given: RoutedTokens, new: RoutedTokens) -> None:
    """Other numbers in the tensors that a graph reads."""
    for tensor, value in zip(given, new, strict=True):
        tensor.copy_(value)


class CachedLayers:
    """Layers of E experts, ``(LAYERS, T, K)`` ids of which a step takes as many tokens and columns as it is given."""

    def __init__(self, num_slots: int, num_tokens: int, made: torch.Generator) -> None:
        cases, place = [case_of(num_tokens, seed=layer) for layer in range(LAYERS)], (None, CUDA, torch.bfloat16)
        self.resident = [resident_weights(case, *place) for case in cases]
        self.runner = LocalRunner(K, num_tokens)
        self.caches = [cache_of(case, num_slots, *place) for case in cases]
        self.paths = [CachedExperts(cache, self.runner, K) for cache in self.caches]
        self.ids = torch.zeros(LAYERS, num_tokens, K, dtype=torch.int32, device=CUDA)
        self.guesses = self.ids.clone()
        self.square = torch.randn(2048, 2048, generator=made).cuda()
        prefetch_between(self.paths, [lambda x, n=layer: self.guesses[n, : len(x)].clone() for layer in range(LAYERS)])

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
                torch.mm(self.square, self.square)  # A layer has work like this before its experts.
            routed = RoutedTokens(tokens, self._of(layer, weights), weights)
            outputs.append(path(routed, *self.caches[layer].weights.parts))
        return outputs

    def expected(self, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        return [
            self.runner.decode(tokens, self._of(layer, weights), weights, self.resident[layer])
            for layer in range(LAYERS)
        ]

    def _of(self, layer: int, weights: Tensor) -> Tensor:
        return self.ids[layer, : weights.shape[0], : weights.shape[1]].contiguous()

    def check_slots(self) -> None:
        for cache in self.caches:
            check_slots(cache)
