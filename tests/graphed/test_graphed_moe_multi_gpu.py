"""The layer replayed from CUDA graphs on ranks that meet with different numbers of tokens, captured or not."""

from __future__ import annotations

import pytest
import torch
from gpus import ON_GPUS, gpu_of
from ranks import run_ranks
from stream_cases import NUM_TOKENS, assert_same, make_pair, make_tokens, named

from comet import GraphedMoE

# Of each rank in turn: some calls are a rank's first or second of a number, while the other replays its graph.
NUMBERS = ((NUM_TOKENS, 40, NUM_TOKENS, 40, 40, 0, NUM_TOKENS, 0), (3, 3, 3, 200, 200, 3, 0, 3))


def on_gpu(rank: int, world_size: int) -> None:
    torch.cuda.set_device(gpu_of(rank))
    layers = make_pair(gpu_of(rank), torch.bfloat16, "fused", ep=world_size)
    graphed = GraphedMoE(layers.streams)
    with torch.no_grad():
        for call, num_tokens in enumerate(NUMBERS[rank]):
            x = make_tokens(layers.streams, 10 * call + rank)[:num_tokens]
            assert_same(named(graphed(x)), named(layers.in_line(x)), f"rank {rank}, call {call}")
    assert graphed.graph_fallback_reason == ""
    layers.streams.group.workspace.check()
    layers.streams.group.close()


@pytest.mark.multi_gpu(n=2)
def test_ranks_with_different_numbers_of_tokens() -> None:
    run_ranks(on_gpu, 2, backend=ON_GPUS, timeout=240)
