"""Modular layers on one GPU: every combination against the reference, and those that never wait in a CUDA graph."""

from functools import partial

import pytest
import torch
from gpus import captured, take_free_memory
from layer_cases import LayerCase, rank_inputs
from layer_ranks import open_group
from modular_cases import attacks, combinations, larger, rank_weights, run_combinations
from torch import Tensor

from comet.layout import RoutedTokens
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
from comet.quantization.formats import FP8, MXFP8, Weight

pytestmark = pytest.mark.gpu
NEVER_WAIT = [
    (FusedPrepareFinalize, FusedExperts, Tensor),
    (SymmetricContiguous, GroupedContiguous, Tensor),
    (SymmetricContiguous, WarpDecodeExperts, Tensor),
    (SymmetricBatched, GroupedBatched, Tensor),
    (SingleRank, GroupedContiguous, Tensor),
    (SingleRank, WarpDecodeExperts, Tensor),
    (SymmetricBatched, GroupedBatched, MXFP8),
    (SingleRank, GroupedContiguous, FP8),
    (SingleRank, WarpDecodeExperts, FP8),
    (SymmetricContiguous, WarpDecodeExperts, MXFP8),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_combination(dtype: torch.dtype) -> None:
    cases = [larger(case, dtype) for case in attacks(1, seed=31)]
    assert len(run_combinations(0, 1, cases, {}, "cuda")) == len(combinations())


@pytest.mark.parametrize("parts", NEVER_WAIT, ids=lambda parts: " + ".join(part.__name__ for part in parts))
def test_replays_from_a_cuda_graph_with_other_routing(parts: tuple[type, type, type[Weight]]) -> None:
    case = LayerCase("graph", 1, 1, (48,), 8, 2, 128, 64, dtype=torch.bfloat16, seed=32)
    group = open_group(case, "cuda")
    *pair, weight_type = parts
    layer = ModularMoE(*(kind(case.config, group) for kind in pair), weight_type=weight_type)
    w1, w2 = rank_weights(case, 0, weight_type, "cuda")

    def arguments(call: int) -> RoutedTokens:
        return rank_inputs(case, 0, call).to("cuda").routed

    given = arguments(0)
    graph, output = captured(partial(layer, given, w1, w2))
    for call in range(1, 4):
        changed = arguments(call)
        for target, source in zip(given, changed, strict=True):
            target.copy_(source)
        graph.replay()
        found = output.clone()
        assert torch.equal(found, layer(changed, w1, w2)), f"call {call}"
    group.workspace.check()


@pytest.mark.parametrize("parts", [(SingleRank, GroupedContiguous), (SymmetricBatched, GroupedBatched)])
def test_graphs_of_ascending_numbers_of_tokens(parts: tuple[type, type]) -> None:
    """Each capture comes after a larger eager call; what the older ones leave behind is then given to others."""
    cases = [
        LayerCase("ascending", 1, 1, (count,), 8, 2, 128, 64, dtype=torch.bfloat16, seed=35) for count in (8, 48, 300)
    ]
    group = open_group(cases[-1], "cuda")
    layer = ModularMoE(*(kind(cases[0].config, group) for kind in parts))
    w1, w2 = rank_weights(cases[0], 0, Tensor, "cuda")
    graphs = []
    for case in cases:
        given = rank_inputs(case, 0).to("cuda").routed
        graphs.append((given, *captured(partial(layer, given, w1, w2))))
    taken = take_free_memory()
    for given, graph, output in graphs * 2:
        graph.replay()
        assert torch.equal(output, layer(given, w1, w2)), f"{len(output)} tokens"
        assert all(bool((memory == 1).all()) for memory in taken), (
            f"{len(output)} tokens: others' memory was written to"
        )
    group.workspace.check()
