"""Modular layers on one GPU: every combination against the reference, and those that never wait in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_cases import LayerCase, full_weights, rank_inputs
from modular_cases import attacks, combinations, make_group, run_combinations

from comet.modular import (
    FusedExperts,
    FusedPrepareFinalize,
    GroupedBatched,
    GroupedContiguous,
    ModularMoE,
    SingleRank,
    SymmetricBatched,
    SymmetricContiguous,
    WarpDecodeExperts,
)

pytestmark = pytest.mark.gpu
NEVER_WAIT = [
    (FusedPrepareFinalize, FusedExperts),
    (SymmetricContiguous, GroupedContiguous),
    (SymmetricContiguous, WarpDecodeExperts),
    (SymmetricBatched, GroupedBatched),
    (SingleRank, GroupedContiguous),
    (SingleRank, WarpDecodeExperts),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_combination(dtype: torch.dtype) -> None:
    cases = [replace(case, dtype=dtype, hidden_size=128, ffn_size=64) for case in attacks(1, seed=31)]
    assert len(run_combinations(0, 1, cases, {}, "cuda")) == len(combinations())


@pytest.mark.parametrize("pair", NEVER_WAIT, ids=lambda pair: " + ".join(part.__name__ for part in pair))
def test_replays_from_a_cuda_graph_with_other_routing(pair: tuple[type, type]) -> None:
    case = LayerCase("graph", 1, 1, (48,), 8, 2, 128, 64, dtype=torch.bfloat16, seed=32)
    group = make_group(case, "cuda")
    layer = ModularMoE(*(kind(case.config, group) for kind in pair))
    w1, w2 = (weight.cuda() for weight in full_weights(case))

    def arguments(call: int) -> list[torch.Tensor]:
        inputs = rank_inputs(case, 0, call)
        return [part.cuda() for part in (inputs.tokens, inputs.top_k_ids, inputs.top_k_weights)]

    captured, graph = arguments(0), torch.cuda.CUDAGraph()
    layer(*captured, w1.flatten(1, 2), w2)  # compiles the kernels, and takes the scratch memory
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = layer(*captured, w1.flatten(1, 2), w2)
    for call in range(1, 4):
        changed = arguments(call)
        for target, source in zip(captured, changed, strict=True):
            target.copy_(source)
        graph.replay()
        found = output.clone()
        assert torch.equal(found, layer(*changed, w1.flatten(1, 2), w2)), f"call {call}"
    group.workspace.check()
