"""Layers replayed from CUDA graphs, for inference and in training steps, against the layer as it stands."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphed_cases import REPLACEMENTS, Steps, assert_bits, gradients, make_steps, pass_through
from stream_cases import CONFIG, NUM_TOKENS, assert_same, make_pair, make_tokens, named

from comet import GraphedMoE, MoE

pytestmark = pytest.mark.gpu

ALONE = replace(CONFIG, shared_ffn_size=0)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every replay of a graph."""
    counted: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def count(graph: torch.cuda.CUDAGraph) -> None:
        counted.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return counted


def finish(steps: Steps) -> None:
    torch.cuda.synchronize()
    assert steps.graphed.graph_fallback_reason == ""
    steps.layer.group.workspace.check()


@pytest.mark.parametrize("config", [ALONE, CONFIG], ids=["routed", "shared"])
@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
def test_steps_with_changing_weights_routing_and_numbers_of_tokens(
    config: Any, dtype: torch.dtype, param_dtype: torch.dtype, replays: list[int]
) -> None:
    if config.shared_ffn_size and dtype != param_dtype:
        pytest.skip("a shared expert has the type of the tokens")
    steps = make_steps("cuda", config, dtype, param_dtype=param_dtype)
    for seed, num_tokens in enumerate((NUM_TOKENS, 90, NUM_TOKENS, NUM_TOKENS, 90, 0, 90, NUM_TOKENS, 0, 0)):
        steps.step([make_tokens(steps.layer, seed)[:num_tokens]], f"step {seed}")
    finish(steps)
    assert len(replays) == 2 * (3 + 2 + 2)


def test_nothing_that_was_handed_out_is_overwritten(replays: list[int]) -> None:
    steps = make_steps("cuda", CONFIG, torch.bfloat16)
    kept = []
    for seed in range(6):
        steps.layer.zero_grad()
        found = pass_through(steps.graphed, make_tokens(steps.layer, seed)) | gradients(steps.layer)
        steps.eager.zero_grad()
        kept.append((found, pass_through(steps.eager, make_tokens(steps.layer, seed)) | gradients(steps.eager)))
    finish(steps)
    for call, (found, wanted) in enumerate(kept):
        assert_bits(found, wanted, f"call {call}")
    assert len(replays) == 2 * 5


def test_a_call_before_the_backward_pass_of_the_one_before(replays: list[int]) -> None:
    steps = make_steps("cuda", ALONE, torch.bfloat16)
    for seed in range(5):
        found = []
        for run, layer in ((steps.graphed, steps.layer), (steps.eager, steps.eager)):
            layer.zero_grad()
            x = make_tokens(steps.layer, seed).requires_grad_()
            first, _ = run(x)
            with torch.no_grad():
                between, _ = run(x)
            second, stats = run(first)
            (second.float().square().mean() + first.float().mean() + stats.loss).backward()
            found.append({"between": between, "output": second.detach()} | gradients(layer))
        assert_bits(found[0], found[1], f"step {seed}")
    finish(steps)
    assert len(replays) == (2 + 1) * 4


@pytest.mark.parametrize("change", REPLACEMENTS)
@pytest.mark.parametrize("trains", [False, True])
def test_replacing_ends_the_replays(replays: list[int], change: Callable[[MoE], None], trains: bool) -> None:
    steps = make_steps("cuda", replace(CONFIG, balance="bias"), torch.bfloat16)
    layer, graphed = steps.layer, steps.graphed
    tokens = make_tokens(layer, 0)
    with torch.set_grad_enabled(trains):
        for _ in range(3):
            output, _ = graphed(tokens)
            if trains:
                output.float().sum().backward()
        torch.cuda.synchronize()
        assert len(replays) == (4 if trains else 2)
        before = graphed(tokens)
        counted = len(replays)
        change(layer)
        found, wanted = ({name: each.detach() for name, each in named(run(tokens)).items()} for run in (graphed, layer))
    assert_same(found, wanted, change.__name__)
    assert not torch.equal(found["output"], before[0])
    assert len(replays) == counted
    assert "replaced" in graphed.graph_fallback_reason
    layer.group.workspace.check()


def test_a_selection_bias_that_moves_in_place_is_replayed(replays: list[int]) -> None:
    steps = make_steps("cuda", replace(CONFIG, balance="bias", bias_update_rate=0.5), torch.bfloat16)
    for seed in range(4):
        steps.step([make_tokens(steps.layer, seed)], f"step {seed}")
        steps.layer.router.update_bias(torch.arange(CONFIG.num_experts, device="cuda"))
    finish(steps)
    assert len(replays) == 2 * 3


def test_the_plain_path_says_why_it_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    steps = make_steps("cuda", ALONE, torch.bfloat16, path="plain")
    for seed in range(4):
        steps.step([make_tokens(steps.layer, seed)], f"step {seed}")
    assert "cannot be captured" in steps.graphed.graph_fallback_reason
    assert len([record for record in caplog.records if record.name == "comet.graphed.moe"]) == 1


def test_memory_does_not_grow_with_the_steps() -> None:
    steps = make_steps("cuda", CONFIG, torch.bfloat16)
    used = []
    for seed in range(8):
        steps.step([make_tokens(steps.layer, seed)], f"step {seed}")
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[3]


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
