"""Experts that travel beside the layer before, launched and replayed: outputs are those of resident ones."""

from __future__ import annotations

import pytest
import torch
from cached_layers import LAYERS, CachedLayers, D, E, K, captured, draw_step

from comet.experts.cache import report_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["lru", "score"])
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 20), (5, 12), (1, E)])
@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
def test_steps_equal_resident_experts_bit_for_bit(num_tokens: int, num_slots: int, replayed: bool, policy: str) -> None:
    print("seed", num_slots)
    made = torch.Generator().manual_seed(num_slots)
    layers = CachedLayers(num_slots, num_tokens, made, policy)
    tokens, _, weights = draw_step(made, num_tokens)
    if replayed:
        graph, outputs = captured(lambda: layers.cached(tokens, weights))
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
    layers.check_slots()
    report = report_of(layers.caches)
    print(report)
    if num_slots < E:
        assert report.prefetched > report.prefetched_needed > 0
        assert report.prefetch_precision is not None
