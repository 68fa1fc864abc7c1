"""The whole routed-experts layer over NVLink, forward and backward, against the single-process oracle."""

import random
import time
from dataclasses import replace

import pytest
import torch
from gpus import ON_GPUS, captured
from kinds import Kind, grad_hidden_in, layer0_in, layer1_in
from layer_cases import GPT_OSS, LayerCase, rank_inputs
from layer_ranks import build_layer, run_case
from ranks import in_ranks, run_ranks
from stream_cases import assert_same, make_pair, make_tokens, train_step

from comet.layer.routed_experts import SymmetricPath

BF16 = dict(dtype=torch.bfloat16)
FP8 = dict(dtype=torch.bfloat16, fp8=True)
CASES = [
    LayerCase("ep2", 2, 1, (700, 700), 8, 2, 512, 512, **BF16, calls=4),
    LayerCase("ep2 unequal", 2, 1, (900, 5), 8, 4, 256, 128, **BF16),
    LayerCase("ep2 none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128, **BF16),
    LayerCase("ep2 one expert", 2, 1, (300, 200), 8, 2, 256, 128, routing="one", **BF16),
    LayerCase("ep2 masked", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked", **BF16),
    LayerCase("tp2", 1, 2, (310, 290), 8, 2, 512, 512, **BF16),
    LayerCase("tp2 of 24 columns", 1, 2, (310, 290), 8, 2, 256, 48, **BF16),
    LayerCase("ep4", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, **BF16, calls=4),
    LayerCase("tp4", 1, 4, (100, 120, 90, 80), 8, 2, 256, 512, **BF16, calls=3),
    LayerCase("ep2 x tp2", 2, 2, (140, 220, 50, 90), 8, 2, 256, 512, **BF16, calls=3),
    LayerCase("ep2 in FP8", 2, 1, (700, 700), 8, 2, 512, 512, **FP8, calls=4),
    LayerCase("ep2 unequal in FP8", 2, 1, (900, 5), 8, 4, 256, 128, **FP8),
    LayerCase("ep2 none on rank 1 in FP8", 2, 1, (300, 0), 8, 4, 256, 128, **FP8),
    LayerCase("ep2 masked in FP8", 2, 1, (300, 450), 64, 8, 384, 128, routing="masked", **FP8),
    LayerCase("tp2 in FP8", 1, 2, (310, 290), 8, 2, 512, 512, **FP8),
    LayerCase("ep4 in FP8", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, **FP8, calls=4),
    LayerCase("ep2 x tp2 in FP8", 2, 2, (140, 220, 50, 90), 8, 2, 256, 512, **FP8, calls=3),
]
of_all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.multi_gpu(n=2)
@of_all_cases
def test_kernels(case: LayerCase) -> None:
    run_ranks(run_case, case.world_size, case, "fused", "cuda", backend=ON_GPUS, timeout=240)


def with_layers(rank: int, world_size: int, case: LayerCase, kind: Kind) -> list[torch.Tensor]:
    with layer0_in(kind) as layer0, layer1_in(kind) as layer1, grad_hidden_in(kind) as grad_hidden:
        outputs = run_case(rank, world_size, replace(case, delay_s=0.05), "fused", "cuda")
    spies = (layer0, layer1) if case.fp8 else (layer0, layer1, grad_hidden)
    assert all((spy.call_count > 0) == (kind == "cuda") for spy in spies)
    return outputs


@pytest.mark.multi_gpu(n=2)
@of_all_cases
@in_ranks("case", backend=ON_GPUS, timeout=400)
def test_layers_in_cuda_equal_their_twins(rank: int, world_size: int, case: LayerCase) -> None:
    mine, twin = (with_layers(rank, world_size, case, kind) for kind in ("cuda", "triton"))
    assert all(torch.equal(*pair) for pair in zip(mine, twin, strict=True)), f"rank {rank}"


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_biases_of_which_a_shards_first_rank_alone_adds_b2(ep: int, tp: int) -> None:
    tokens = (60, 44, 71, 33)[: ep * tp]
    case = LayerCase("gpt-oss", ep, tp, tokens, ffn_size=48, activation=GPT_OSS, expert_bias=True, **BF16)
    run_ranks(with_layers, case.world_size, case, "cuda", backend=ON_GPUS)


@pytest.mark.multi_gpu(n=2, own=True)  # NCCL
def test_plain_path() -> None:
    run_ranks(run_case, 2, CASES[0], "plain", "cuda", backend=ON_GPUS, timeout=240)


@pytest.mark.multi_gpu(n=2)
def test_many_epochs_with_delayed_ranks_are_bitwise_reproducible() -> None:
    case = replace(CASES[0], calls=40)
    first, second = (
        run_ranks(run_case, 2, replace(case, delay_s=delay_s), "fused", "cuda", backend=ON_GPUS, timeout=400)
        for delay_s in (0.05, 0.0)
    )
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first[rank], second[rank], strict=True))


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("num_tokens", [(700, 700), (1100, 130)])
@in_ranks(2, backend=ON_GPUS, timeout=240)
def test_a_graph_is_replayed_with_other_routing(rank: int, world_size: int, num_tokens: tuple[int, int]) -> None:
    """Each call is compared with the layer without a graph."""
    case = replace(CASES[0], num_tokens=num_tokens)
    moe, sleeper = build_layer(case, rank, "fused", "cuda"), random.Random(rank)
    without = SymmetricPath(case.config, moe.group, case.overlap, use_kernels=True)
    w1, w2 = moe.expert_weights()
    given = rank_inputs(case, rank).to("cuda").routed
    with torch.no_grad():
        graph, y = captured(lambda: moe.experts(given, w1.flatten(1, 2), w2))
        for call in range(1, 9):
            for tensor, new in zip(given, rank_inputs(case, rank, call).routed, strict=True):
                tensor.copy_(new)
            time.sleep(sleeper.random() * 0.02)
            graph.replay()
            found = y.clone()
            assert torch.equal(found, without(given, w1.flatten(1, 2), w2)), f"rank {rank}, call {call}"
    moe.group.workspace.check()
    moe.group.close()


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS, timeout=240)
def test_shared_expert_beside_the_routed_ones(rank: int, world_size: int) -> None:
    """The layer with its shared expert on a side stream equals the layer in line."""
    layers = make_pair("cuda", torch.bfloat16, "fused", ep=world_size)
    for seed in range(3):
        tokens = make_tokens(layers.streams, 10 * seed + rank)
        expected = train_step(layers.in_line, tokens)
        for late in (True, False):
            step = train_step(layers.streams, tokens, late=late)
            assert_same(step, expected, f"rank {rank}, seed {seed}, late={late}")
    layers.streams.group.workspace.check()
    layers.streams.group.close()
