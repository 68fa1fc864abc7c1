"""Experts that travel beside the layer before, launched and replayed: outputs are those of resident ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comet.decode.runners import LocalRunner
from comet.decode.weights import DecodeWeights
from comet.experts import CachedExperts, ExpertCache
from comet.experts.cache import report_of
from comet.experts.prefetch import prefetch_between

pytestmark = pytest.mark.gpu
E, K, D, F, LAYERS = 48, 4, 512, 208, 3
CUDA = torch.device("cuda")


class Layers:
    """Layers from caches and from resident experts, over ids and guesses that a test sets."""

    def __init__(self, num_slots: int, num_tokens: int, made: torch.Generator, policy: str = "lru") -> None:
        weights = [
            (torch.randn(E, 2 * F, D, generator=made).bfloat16(), torch.randn(E, D, F, generator=made).bfloat16())
            for _ in range(LAYERS)
        ]
        every = torch.arange(E, dtype=torch.int32, device=CUDA)
        self.resident = [DecodeWeights(w1=w1.cuda(), w2=w2.cuda(), slots=every) for w1, w2 in weights]
        self.runner = LocalRunner(K, num_tokens)
        self.caches = [ExpertCache(w1, w2, num_slots, CUDA, policy=policy) for w1, w2 in weights]
        self.paths = [CachedExperts(cache, self.runner, K) for cache in self.caches]
        self.ids = torch.zeros(LAYERS, num_tokens, K, dtype=torch.int32, device=CUDA)
        self.guesses = self.ids.clone()
        prefetch_between(self.paths, [lambda _, layer=layer: self.guesses[layer].clone() for layer in range(LAYERS)])

    def draw(self, made: torch.Generator) -> None:
        """New ids for all layers; two of three guesses are right."""
        shape = self.ids.shape
        ids = torch.rand(*shape[:2], E, generator=made).argsort(-1)[..., :K].int()
        wrong = torch.randint(E, shape, generator=made, dtype=torch.int32)
        self.ids.copy_(ids)
        self.guesses.copy_(ids.where(torch.rand(shape, generator=made) < 0.67, wrong))

    def cached(self, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        outputs = []
        for layer, path in enumerate(self.paths):
            if layer:
                torch.mm(self.square, self.square)  # what a layer does before its experts
            outputs.append(path(tokens, self.ids[layer], weights, *self.caches[layer].weights.parts))
        return outputs

    square = torch.zeros(1024, 1024)

    def expected(self, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        return [self.runner.decode(tokens, self.ids[layer], weights, self.resident[layer]) for layer in range(LAYERS)]


@pytest.mark.parametrize("policy", ["lru", "score"])
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 20), (5, 12), (1, E)])
@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
def test_steps_equal_resident_experts_bit_for_bit(num_tokens: int, num_slots: int, replayed: bool, policy: str) -> None:
    print("seed", num_slots)
    made = torch.Generator().manual_seed(num_slots)
    layers = Layers(num_slots, num_tokens, made, policy)
    layers.square = torch.randn(2048, 2048, generator=made).cuda()
    tokens = torch.randn(num_tokens, D, generator=made).bfloat16().cuda()
    weights = torch.rand(num_tokens, K, generator=made).cuda()
    graph = torch.cuda.CUDAGraph()
    if replayed:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                layers.cached(tokens, weights)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            outputs = layers.cached(tokens, weights)
    for step in range(200):
        layers.draw(made)
        tokens.copy_(torch.randn(num_tokens, D, generator=made).bfloat16())
        if replayed:
            graph.replay()
        else:
            outputs = layers.cached(tokens, weights)
        expected = layers.expected(tokens, weights)
        for layer in range(LAYERS):
            assert torch.equal(outputs[layer], expected[layer]), f"step {step}, layer {layer}"
    for cache, resident in zip(layers.caches, layers.resident, strict=True):
        for slot, expert in enumerate(cache.tables.owners.tolist()):
            if expert >= 0:
                assert torch.equal(cache.weights.w1[slot], resident.w1[expert])
                assert torch.equal(cache.weights.w2[slot], resident.w2[expert])
    report = report_of(layers.caches)
    print(report)
    if num_slots < E:
        assert report.prefetched > report.prefetched_needed > 0
        assert report.prefetch_precision is not None
