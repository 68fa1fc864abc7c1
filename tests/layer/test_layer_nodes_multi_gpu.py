"""Layers over nodes whose tokens travel by kernels: peers that are mapped, and NVSHMEM over an emulated network."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import ON_GPUS, captured
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, choose_runs, run_case
from ranks import run_ranks
from remote_link import build_plugin, preload

from comet.graphed.moe import GraphedMoE
from comet.layer.nodes import NodesPath
from comet.layer.rails.network import DeviceRails
from comet.schedule.network import Runs

MAPPED = dict(dtype=torch.bfloat16, backend="symm_mem")
TWO = LayerCase("two nodes", 2, 1, (700, 650), 8, 2, 512, 512, node_size=1, calls=4, **MAPPED)
CASES = [
    TWO,
    replace(TWO, name="unequal, late", num_tokens=(900, 5), top_k=4, delay_s=0.05),
    replace(TWO, name="no tokens on rank 1", num_tokens=(300, 0), calls=2),
    replace(TWO, name="one expert", routing="one", calls=2),
    replace(TWO, name="masked", num_experts=64, top_k=8, hidden_size=336, ffn_size=208, routing="masked"),
    replace(TWO, name="float16", dtype=torch.float16),
    replace(TWO, name="in FP8", fp8=True, calls=2),
]
CASES_OF_FOUR = [
    LayerCase("two nodes of two", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, node_size=2, calls=4, **MAPPED),
    LayerCase("ep2 x tp2", 2, 2, (140, 220, 50, 90), 8, 2, 256, 512, node_size=2, calls=3, **MAPPED),
    LayerCase("four nodes", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, node_size=1, calls=3, **MAPPED),
]


def run_parts(rank: int, world_size: int, cases: list[LayerCase], library: str = "") -> None:
    """The cases with own tokens and guests in two runs each; over NVSHMEM if a plugin is given."""
    if library:
        preload(Path(library), gbs=20, latency_us=5)
    choose_runs(Runs(1, is_split=True))
    for case in cases:
        run_case(rank, world_size, replace(case, backend="nvshmem") if library else case, "fused", "cuda")


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("cases", [CASES, CASES_OF_FOUR], ids=["two", "four"])
def test_tokens_reach_peers_that_are_mapped(cases: list[LayerCase]) -> None:
    run_ranks(run_parts, cases[0].world_size, cases, backend=ON_GPUS, timeout=400)


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed")
@pytest.mark.multi_gpu(n=2, own=True)
def test_tokens_reach_peers_over_nvshmem(tmp_path: Path) -> None:
    run_ranks(run_parts, 2, CASES, str(build_plugin(tmp_path)), backend=ON_GPUS, timeout=400)


def replayed(rank: int, world_size: int, case: LayerCase) -> None:
    moe, inputs = build_layer(case, rank, "fused", f"cuda:{torch.cuda.current_device()}"), rank_inputs(case, rank, 0)
    path = moe.experts
    assert isinstance(path, NodesPath)
    assert isinstance(path.rails, DeviceRails)
    x, ids, weights = (each.cuda() for each in inputs.routed)
    with torch.no_grad():
        launched = moe.routed_experts(x, ids, weights)
        graph, output = captured(lambda: moe.routed_experts(x, ids, weights))
        for _ in range(3):
            output.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(output, launched)
    moe.group.workspace.check()
    del graph
    moe.group.close()


@pytest.mark.multi_gpu(n=2)
def test_a_call_over_nodes_is_replayed_from_a_graph() -> None:
    run_ranks(replayed, 2, replace(TWO, calls=1), backend=ON_GPUS, timeout=240)


def trains_graphed(rank: int, world_size: int, case: LayerCase) -> None:
    moe = build_layer(case, rank, "fused", f"cuda:{torch.cuda.current_device()}")
    graphed = GraphedMoE(moe)
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(case.num_tokens[rank], case.hidden_size, dtype=case.dtype, device="cuda", requires_grad=True)
        found = []
        for layer in (moe, graphed):
            moe.zero_grad()
            x.grad = None
            output, _ = layer(x)
            output.sum().backward()
            found.append([output.detach().clone(), x.grad.clone(), *(each.grad.clone() for each in moe.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), step
    assert not graphed.graph_fallback_reason
    moe.group.workspace.check()
    del graphed
    moe.group.close()


@pytest.mark.multi_gpu(n=2)
def test_training_over_nodes_is_replayed_from_graphs() -> None:
    run_ranks(trains_graphed, 2, TWO, backend=ON_GPUS, timeout=240)
