"""Layers replayed from CUDA graphs, in training steps and for inference, on ranks with different numbers of tokens."""

import pytest
import torch
from gpus import ON_GPUS
from graphed_cases import make_steps
from ranks import in_ranks
from stream_cases import CONFIG, NUM_TOKENS, assert_same, make_tokens, named

# Numbers of tokens of each call, a row for each rank. In some calls one rank has a number for the first or second time
# while the other rank replays a graph.
NUMBERS = (
    (NUM_TOKENS, 40, NUM_TOKENS, 40, 40, 0, NUM_TOKENS, 0, 0, NUM_TOKENS),
    (3, 3, 3, 200, 200, 3, 0, 3, 200, 0),
)


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS, timeout=240)
def test_ranks_with_different_numbers_of_tokens(rank: int, world_size: int) -> None:
    steps = make_steps("cuda", CONFIG, torch.bfloat16, ep=world_size)
    for step in range(0, len(NUMBERS[rank]), 2):
        parts = range(step, step + 2)
        batches = [make_tokens(steps.layer, 10 * call + rank)[: NUMBERS[rank][call]] for call in parts]
        steps.step(batches, f"rank {rank}, step {step // 2}")
    both = [make_tokens(steps.layer, 1000 + call)[:200] for call in range(6)]
    for call, tokens in enumerate(both):
        steps.step([tokens], f"rank {rank}, alike, step {call}")
    steps.eager.load_state_dict(steps.layer.state_dict())
    with torch.no_grad():
        for call, num_tokens in enumerate(NUMBERS[rank]):
            x = make_tokens(steps.layer, 10 * call + rank)[:num_tokens]
            assert_same(named(steps.graphed(x)), named(steps.eager(x)), f"rank {rank}, call {call}")
    assert steps.graphed.graph_fallback_reason == ""
    steps.layer.group.workspace.check()
    steps.layer.group.close()
