"""Warp decode on a GPU: shipped and other blocks against the twin, CUDA graphs with changing routing, no allocation."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase, check_decode, check_graph, make_inputs, random_case
from gpus import take_free_memory

from comet.decode import DecodeScratch, DecodeWeights, warp_decode
from comet.kernels.decode.blocks import BlockShape, select

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QWEN3 = dict(K=8, E=32, D=2048, F=768)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 17, 33, 64])
def test_selected_blocks(num_tokens: int, dtype: torch.dtype) -> None:
    check_decode(DecodeCase(name="qwen3", T=num_tokens, **QWEN3), dtype, "cuda", runs=5)
    check_decode(DecodeCase(name="two experts", T=num_tokens, K=2, E=4, D=1024, F=3584, held=3), dtype, "cuda", runs=5)
    check_decode(
        DecodeCase(name="large experts", T=num_tokens, K=2, E=4, D=4096, F=2048, held=3), dtype, "cuda", runs=5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("routing", ["one", "masked", "none", "repeated", "unknown", "always"])
def test_routings(num_tokens: int, routing: str, dtype: torch.dtype) -> None:
    case = DecodeCase(name=routing, T=num_tokens, K=4, E=16, D=336, F=208, routing=routing, held=11, seed=num_tokens)
    check_decode(case, dtype, "cuda")


@pytest.mark.parametrize("seed", range(24))
def test_random_cases(seed: int) -> None:
    check_decode(random_case(seed, most_tokens=64, largest=640), DTYPES[seed % 3], "cuda")


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [
        (1, FOLD),
        (1, VECTOR),
        (2, VECTOR),
        (2, FOLD),
        (1, replace(FOLD, ahead=24)),
        (1, replace(VECTOR, ahead=2)),
        (2, replace(VECTOR, ahead=4)),
        (1, replace(FOLD, gate_up=BlockShape(rows=1, depth=256, num_warps=1), down=BlockShape(rows=8, depth=1024))),
        (1, MATRIX),
        (9, MATRIX),
        (9, replace(MATRIX, tile=8)),
        (64, replace(MATRIX, tile=8)),
        (64, replace(MATRIX, tile=16)),
        (64, replace(MATRIX, gate_up=BlockShape(rows=128, depth=64), down=BlockShape(rows=128, depth=128))),
    ],
)
def test_other_blocks(num_tokens: int, config, dependent: bool) -> None:
    case = DecodeCase(name="blocks", T=num_tokens, **QWEN3, config=replace(config, dependent=dependent))
    check_decode(case, torch.bfloat16, "cuda", runs=20)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_offsets_past_two_billion_elements(num_tokens: int) -> None:
    """Experts in the last slots of a large cache give the bits they give in a small one."""
    inputs = make_inputs(DecodeCase(name="large", T=num_tokens, K=2, E=2, D=8192, F=4096), torch.bfloat16, "cuda")
    small, num_slots = inputs.weights, 40
    w1 = torch.empty(num_slots, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty(num_slots, 8192, 4096, dtype=torch.bfloat16, device="cuda")
    shift = num_slots - small.w1.shape[0]
    w1[shift:], w2[shift:] = small.w1, small.w2
    large = DecodeWeights(w1=w1, w2=w2, slots=small.slots + shift)
    step = (inputs.tokens, inputs.ids, inputs.routing_weights)
    assert torch.equal(warp_decode(*step, large), warp_decode(*step, small))


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_graph_with_changing_routing(num_tokens: int, dependent: bool) -> None:
    case = DecodeCase(name="graph", T=num_tokens, K=4, E=16, D=1024, F=768)
    check_graph(case, replays=200, dependent=dependent)


def test_nothing_but_the_output_is_allocated() -> None:
    inputs = make_inputs(DecodeCase(name="memory", T=8, **QWEN3), torch.bfloat16, "cuda")
    scratch = DecodeScratch.create(inputs.weights, 8, torch.bfloat16)
    arguments = (inputs.tokens.contiguous(), inputs.ids, inputs.routing_weights, inputs.weights)
    warp_decode(*arguments, scratch=scratch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    warp_decode(*arguments, scratch=scratch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1


def test_cosine_similarity_to_float64() -> None:
    for num_tokens in (1, 8, 64):
        case = DecodeCase(name="cosine", T=num_tokens, **QWEN3)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        output = warp_decode(inputs.tokens, inputs.ids, inputs.routing_weights, inputs.weights)
        exact = inputs.double().twin()
        assert torch.cosine_similarity(output.double(), exact, dim=1).min() > 0.999996, num_tokens


def test_a_batch_changes_only_the_order_of_additions() -> None:
    """The same token alone (vector) and among 8 (matrix) differs by less than the rounding of either."""
    inputs = make_inputs(DecodeCase(name="alone", T=8, **QWEN3), torch.float32, "cuda")
    together = warp_decode(inputs.tokens, inputs.ids, inputs.routing_weights, inputs.weights)
    alone = warp_decode(inputs.tokens[3:4], inputs.ids[3:4], inputs.routing_weights[3:4], inputs.weights)
    assert select(torch.float32, 1, 8, 2048, 768) != select(torch.float32, 8, 8, 2048, 768)
    assert (together[3] - alone[0]).abs().max() < 1e-4 * together.abs().max()


def test_a_graph_runs_on_when_its_caller_has_let_go_of_the_scratch() -> None:
    inputs = make_inputs(DecodeCase(name="let go", T=8, **QWEN3), torch.bfloat16, "cuda")
    step = (inputs.tokens.contiguous(), inputs.ids, inputs.routing_weights, inputs.weights)
    scratch = DecodeScratch.create(inputs.weights, 8, torch.bfloat16, max_tokens=8)
    warp_decode(*step, scratch=scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = warp_decode(*step, scratch=scratch)
    del scratch
    gc.collect()
    taken = take_free_memory()
    for _ in range(3):
        step[0].normal_()
        graph.replay()
        assert torch.equal(output, warp_decode(*step))
    assert all(bool((memory == 1).all()) for memory in taken), "others' memory was written to"
