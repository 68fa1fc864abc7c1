"""Shared expert and statistics on a stream of their own: the numbers of the sequential form, and in a CUDA graph."""

from itertools import pairwise

import pytest
import torch
from gpus import captured
from stream_cases import assert_same, make_pair, make_tokens, named, train_step

from comet import moe
from comet.graphed.moe import GraphedMoE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", ["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_are_those_of_the_sequential_form(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "BESIDE_TOKENS", 0)
    layers = make_pair("cuda", dtype, path)
    for seed in range(3):
        tokens = make_tokens(layers.streams, seed)
        expected = train_step(layers.in_line, tokens)
        found = [train_step(layers.streams, tokens, late=late) for late in (False, True, False)]
        torch.cuda.synchronize()
        for call, step in enumerate(found):
            assert_same(step, expected, f"{path}, {dtype}, seed {seed}, call {call}")
    layers.streams.group.workspace.check()


def test_calls_without_gradients_do_not_reuse_memory_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "BESIDE_TOKENS", 0)
    layers = make_pair("cuda", torch.bfloat16)
    inputs = [make_tokens(layers.streams, seed) for seed in range(6)]
    found = []
    with torch.no_grad():
        expected = [layers.in_line(x)[0] for x in inputs]
        for index, x in enumerate(inputs):  # the host runs ahead of both streams
            side = layers.streams.group.side_stream.stream
            assert side is not None
            with torch.cuda.stream(side if index % 2 else torch.cuda.current_stream()):
                torch.cuda._sleep(10_000_000)
            found.append(layers.streams(x * 1)[0])
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_same({"output": actual}, {"output": wanted}, f"call {index}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_replays_from_a_cuda_graph_with_other_routing(dtype: torch.dtype) -> None:
    layers = make_pair("cuda", dtype, "fused")
    x, loads = make_tokens(layers.streams, 0), []
    with torch.no_grad():
        graph, (y, stats) = captured(lambda: layers.streams(x))
        for seed in range(1, 5):
            x.copy_(make_tokens(layers.streams, seed))
            graph.replay()
            found = {"output": y.clone(), "loss": stats.loss, "load": stats.expert_load.clone()}
            assert_same(found, named(layers.in_line(x)), f"seed {seed}")
            loads.append(found["load"])
    assert all(not torch.equal(one, other) for one, other in pairwise(loads)), "routing changed"
    layers.streams.group.workspace.check()


@pytest.mark.parametrize("kind", ["in line", "streams", "graphed"])
def test_two_layers_of_one_group_on_two_streams_keep_the_order_of_their_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared expert runs on a side stream or in line; a graph is captured between the calls."""
    monkeypatch.setattr(moe, "BESIDE_TOKENS", 0)
    layers = make_pair("cuda", torch.bfloat16)
    layer = {"in line": layers.in_line, "streams": layers.streams, "graphed": GraphedMoE(layers.in_line)}[kind]
    inputs = [make_tokens(layers.in_line, seed) for seed in range(8)]
    with torch.no_grad():
        expected = [layers.in_line(x)[0].clone() for x in inputs]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(2)], []
        for index, x in enumerate(inputs):
            with torch.cuda.stream(streams[index % 2]):
                if index % 3 == 0:
                    torch.cuda._sleep(20_000_000)  # the other stream would be done long before
                found.append(layer(x)[0])
        layers.in_line.group.workspace.check()
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_same({"output": actual}, {"output": wanted}, f"call {index}")


def test_check_waits_for_all_streams() -> None:
    layers = make_pair("cuda", torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        layers.in_line(make_tokens(layers.in_line, 0))
        done = stream.record_event()
    layers.in_line.group.workspace.check()
    assert done.query(), "the check came back before the other stream was done"
