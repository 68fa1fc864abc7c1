"""Replays of a layer end when a tensor that they read is replaced, go on when it changes in place, pause for hooks."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generate_cases import Captures
from graphed_cases import CONFIG, REPLACEMENTS, Steps, draw, make_layer, pass_through, record_on_cpu
from stream_cases import assert_same
from torch import nn
from torch.utils.hooks import RemovableHandle

from comet import GraphedMoE, MoE
from comet.layer.expert_path import FunctionPath
from comet.router.router import Router

BIASED = replace(CONFIG, balance="bias")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return record_on_cpu(monkeypatch)


def keep_memory(layer: MoE) -> None:
    """Another parameter over the same memory, which graphs would give no gradient."""
    layer.w1 = nn.Parameter(layer.w1.detach())


@pytest.mark.parametrize("change", [*REPLACEMENTS, keep_memory])
def test_replacing_ends_the_replays(
    captures: Captures, caplog: pytest.LogCaptureFixture, change: Callable[[MoE], None]
) -> None:
    steps = Steps(GraphedMoE(make_layer(config=BIASED)), make_layer(config=BIASED), assert_same)
    for seed in range(2):
        steps.step([draw(6, seed)], f"step {seed}")
    for layer in (steps.layer, steps.eager):
        change(layer)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            steps.step([draw(6, seed)], f"later step {seed}")
    assert captures.replays == 2
    assert "replaced" in steps.graphed.graph_fallback_reason
    assert len(caplog.records) == 1


def test_another_path_ends_the_replays(captures: Captures) -> None:
    layer = make_layer(config=BIASED)
    graphed, x, former = GraphedMoE(layer), draw(6, 3), layer.experts
    with torch.no_grad():
        for _ in range(3):
            graphed(x)
        layer.experts = FunctionPath(lambda *inputs: 2 * former(*inputs))
        assert torch.equal(graphed(x)[0], layer(x)[0])
    assert "replaced" in graphed.graph_fallback_reason
    with pytest.raises(
        ValueError, match=r"^experts=<function .* must be an ExpertPath: give FunctionPath\(function\)$"
    ):
        layer.experts = lambda *inputs: former(*inputs)


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_replacing_ends_replays_without_gradients(captures: Captures, change: Callable[[MoE], None]) -> None:
    """A replay would read the old tensors' memory."""
    layer = make_layer(config=BIASED)
    graphed, x = GraphedMoE(layer), draw(6, 3)
    with torch.no_grad():
        for _ in range(3):
            before, _ = graphed(x)
        change(layer)
        output, _ = graphed(x)
        assert torch.equal(output, layer(x)[0])
    assert not torch.equal(output, before)
    assert captures.replays == 2
    assert "replaced" in graphed.graph_fallback_reason


def test_what_changes_in_place_is_read_by_the_replays(captures: Captures) -> None:
    layer = make_layer(config=BIASED)
    graphed, x = GraphedMoE(layer), draw(6, 0)
    load = torch.arange(8.0)
    changes: list[Callable[[], object]] = [
        lambda: layer.router.selection_bias.copy_(load),
        lambda: layer.router.update_bias(load),
        lambda: layer.load_state_dict({name: each * 2 for name, each in layer.state_dict().items()}),
        lambda: layer.shared.w1.zero_(),
    ]
    with torch.no_grad():
        graphed(x)
        for change in changes:
            change()
            output, stats = graphed(x)
            wanted, wanted_stats = layer(x)
            assert torch.equal(output, wanted)
            assert torch.equal(stats.expert_load, wanted_stats.expert_load)
    assert (captures.replays, graphed.graph_fallback_reason) == (len(changes), "")


def test_a_module_replaced_before_the_first_call_is_not_captured(captures: Captures) -> None:
    """The new module's tensors are not watched."""
    layer = make_layer(config=BIASED)
    graphed = GraphedMoE(layer)
    layer.router = Router(BIASED)
    with torch.no_grad():
        for seed in range(3):
            layer.router.weight = nn.Parameter(-layer.router.weight)
            assert torch.equal(graphed(draw(6, seed))[0], layer(draw(6, seed))[0])
    assert captures.count == 0


@pytest.mark.parametrize(
    "register",
    [
        lambda layer, hook: layer.register_forward_hook(hook),
        lambda layer, hook: layer.router.register_forward_pre_hook(hook),
        lambda layer, hook: layer.shared.register_full_backward_hook(hook),
        lambda layer, hook: layer.shared.register_full_backward_pre_hook(hook),
        lambda layer, hook: nn.modules.module.register_module_forward_hook(hook),
    ],
)
def test_hooks_of_modules_run(
    captures: Captures, caplog: pytest.LogCaptureFixture, register: Callable[[MoE, Callable], RemovableHandle]
) -> None:
    """Hooks are added between replays; replays go on once hooks are removed."""
    layer, counts = make_layer(), []
    graphed, ran = GraphedMoE(layer), []
    for seed in range(2):
        pass_through(graphed, draw(6, seed))
    with register(layer, lambda *_: ran.append(1)), caplog.at_level(logging.WARNING):
        for run in (layer, graphed, graphed):
            ran.clear()
            pass_through(run, draw(6, 2))
            counts.append(len(ran))
        assert counts == [max(counts[0], 1)] * 3
        assert "hooks" in graphed.graph_fallback_reason
        assert len(caplog.records) == 1
    pass_through(graphed, draw(6, 3))
    assert (captures.replays, graphed.graph_fallback_reason) == (4, "")
