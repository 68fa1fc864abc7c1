"""A shared expert in the decode steps of a GPU: every layout's parts against the whole, and in a CUDA graph."""

import pytest
import torch
from decode_cases import DecodeCase
from gemm_cases import assert_as_good
from gpus import captured
from shared_cases import SharedStep, check_kernels, layouts
from torch import Tensor

from comet.decode import DecodeScratch, warp_decode, warp_decode_torch

pytestmark = pytest.mark.gpu


def case_of(num_tokens: int, routing: str) -> DecodeCase:
    """Small experts."""
    return DecodeCase(name="shared", T=num_tokens, K=4, E=8, D=512, F=256, routing=routing, seed=num_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 64])
@pytest.mark.parametrize(("ep", "tp", "times", "gated"), [(1, 1, 1, True), (1, 1, 2, False), (2, 2, 1, True)])
def test_parts_of_all_ranks_add_up(
    ep: int, tp: int, times: int, gated: bool, num_tokens: int, dtype: torch.dtype
) -> None:
    check_kernels(SharedStep.make(case_of(num_tokens, "masked"), dtype, "cuda", times=times, gated=gated), ep, tp)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8])
@torch.no_grad()
def test_graph_with_changing_routing_and_a_shared_expert_that_is_written_to(num_tokens: int, gated: bool) -> None:
    case = case_of(num_tokens, "uniform")
    step = SharedStep.make(case, torch.bfloat16, "cuda", times=2, gated=gated)
    (layout,) = layouts(case, 1, 1)
    slots, parts, inputs = step.slots(layout), step.parts(layout), step.inputs
    tokens = inputs.tokens.contiguous()
    scratch = DecodeScratch.create(slots.weights(*parts), case.K + slots.columns, tokens.dtype, max_tokens=num_tokens)

    def run() -> Tensor:
        experts = slots.weights(*parts)
        ids, routing_weights = slots.routing(inputs.ids, inputs.routing_weights, step.gate)
        return warp_decode(tokens, ids, routing_weights, experts, scratch=scratch)

    graph, output = captured(run)
    generator = torch.Generator("cuda").manual_seed(0)
    for replay in range(40):
        ids = torch.rand(num_tokens, case.E, device="cuda", generator=generator).argsort(dim=1)[:, : case.K]
        inputs.ids.copy_(ids)
        tokens.normal_(generator=generator)
        if step.gate is not None:
            step.gate.uniform_(generator=generator)
        if replay % 10 == 9:
            for weight in step.shared.parameters():
                weight.normal_(std=0.05, generator=generator)
            slots.weights(*parts)  # an eager step makes this call; a replay does not
        graph.replay()
        replayed = output.clone()
        assert torch.equal(replayed, run()), f"replay {replay}: other bits than without a graph"
    inputs.tokens.copy_(tokens)
    ids, routing_weights = slots.routing(inputs.ids, inputs.routing_weights, step.gate)
    twin = warp_decode_torch(tokens, ids, routing_weights, slots.weights(*parts))
    assert_as_good("the last replay", replayed, twin, step.exact())
