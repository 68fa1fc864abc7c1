"""The layer replayed from CUDA graphs, for several numbers of tokens in turn, against the layer as it stands."""

from __future__ import annotations

import pytest
import torch
from stream_cases import NUM_TOKENS, assert_same, make_pair, make_tokens, named

from comet import GraphedMoE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_call_is_the_layer_whatever_the_numbers_of_tokens(dtype: torch.dtype) -> None:
    layers = make_pair("cuda", dtype, "fused")
    graphed, kept = GraphedMoE(layers.streams), []
    with torch.no_grad():
        for seed, num_tokens in enumerate((NUM_TOKENS, 9, NUM_TOKENS, 9, 9, 0, NUM_TOKENS, 0, 0, 9)):
            x = make_tokens(layers.streams, seed)[:num_tokens]
            kept.append((graphed(x), layers.in_line(x)))
    torch.cuda.synchronize()
    assert graphed.graph_fallback_reason == ""
    for call, (found, wanted) in enumerate(kept):
        assert_same(named(found), named(wanted), f"call {call}")
    layers.streams.group.workspace.check()


def test_the_plain_path_is_the_layer_too() -> None:
    layers = make_pair("cuda", torch.bfloat16, "plain")
    graphed = GraphedMoE(layers.streams)
    with torch.no_grad():
        for seed in range(4):
            x = make_tokens(layers.streams, seed)
            assert_same(named(graphed(x)), named(layers.in_line(x)), f"call {seed}")
