"""The layer replayed from graphs, for inference; on a CPU recorded operations stand in for CUDA graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from generate_cases import Captures
from graphed_cases import draw, make_layer
from torch import Tensor

from comet import GraphedMoE, MoE


@pytest.fixture
def layer() -> MoE:
    return make_layer()


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_every_call_is_the_layer_whatever_the_numbers_of_tokens(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    kept = []
    with torch.no_grad():
        for seed, num_tokens in enumerate((5, 7, 5, 5, 7, 7, 0, 5, 0, 0, 64, 5)):
            x = draw(num_tokens, seed)
            found, wanted = graphed(x), layer(x)
            assert_same(found, wanted)
            kept.append((found, wanted))
    assert (captures.count, graphed.graph_fallback_reason) == (3, "")  # 64 came once
    assert captures.replays == 4 + 2 + 2 - 1 + 1
    for found, wanted in kept:  # no later call has overwritten them
        assert_same(found, wanted)


def test_leading_dimensions_are_kept_and_parameters_may_change_in_place(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    x = draw(12, 1).view(3, 4, -1)
    with torch.no_grad():
        for _ in range(3):
            assert graphed(x)[0].shape == x.shape
            for parameter in layer.parameters():
                parameter.mul_(1.5)
            assert_same(graphed(x), layer(x))


def test_more_numbers_of_tokens_than_graphs(layer: MoE, captures: Captures, caplog: pytest.LogCaptureFixture) -> None:
    graphed = GraphedMoE(layer, max_graphs=2)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for seed, num_tokens in enumerate((1, 2, 3, 1, 2, 3, 4, 3, 1)):
            x = draw(num_tokens, seed)
            assert_same(graphed(x), layer(x))
    assert captures.count == 2
    assert [record.message for record in caplog.records] == ["no graph for 3 tokens: max_graphs=2 others came first"]


def test_a_layer_that_asks_the_device_runs_as_it_stands(
    layer: MoE, captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    experts = layer.experts

    def asks(tokens: Tensor, *rest: Tensor) -> Tensor:
        return experts(tokens, *rest) * (1 if int(tokens.shape[0] + rest[0].max()) else 0)

    layer.experts = asks  # type: ignore[assignment]
    graphed = GraphedMoE(layer)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for seed in range(4):
            x = draw(6, seed)
            assert_same(graphed(x), layer(x))
    assert "cannot be captured" in graphed.graph_fallback_reason
    assert "not permitted" in graphed.graph_fallback_reason
    assert len(caplog.records) == 1


def test_without_a_gpu_it_is_the_layer(layer: MoE) -> None:
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        for seed in range(3):
            x = draw(4, seed)
            assert_same(graphed(x), layer(x))
    assert "cpu" in graphed.graph_fallback_reason


def test_other_tokens_are_refused(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        for _ in range(2):
            graphed(draw(3, 0))
        with pytest.raises(ValueError, match=r"hidden_size=16 of the input must be the layer's 32"):
            graphed(draw(3, 0).view(6, 16))
        with pytest.raises(ValueError, match=r"dtype=torch.float64 of the input"):
            graphed(draw(3, 0).double())
    with pytest.raises(ValueError, match=r"max_graphs=0 must be at least 1"):
        GraphedMoE(layer, max_graphs=0)


def test_nothing_is_replayed_after_the_group_was_closed(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        for seed in range(3):
            graphed(draw(5, seed))
        layer.group.close()
        with pytest.raises(RuntimeError, match=r"was used after close\(\)"):
            graphed(draw(5, 3))
    assert captures.replays == 2
