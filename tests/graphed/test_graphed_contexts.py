"""The layer replayed from graphs under what changes how torch runs it: saved-tensor hooks, checkpoints, autocast."""

from __future__ import annotations

import logging

import pytest
import torch
from generate_cases import Captures
from graphed_cases import gradients, pass_through
from recorded_layers import assert_equal, draw, leaf, make_layer
from torch.utils.checkpoint import checkpoint

from comet import GraphedMoE


def test_calls_under_hooks_of_saved_tensors_are_launched(captures: Captures, caplog: pytest.LogCaptureFixture) -> None:
    graphed = GraphedMoE(make_layer())
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                pass_through(graphed, draw(6, seed))
        assert (captures.count, len(caplog.records)) == (0, 1)
        assert "hooks" in caplog.text
    pass_through(graphed, draw(6, 3))
    pass_through(graphed, draw(6, 4))
    assert (captures.replays, graphed.graph_fallback_reason) == (2, "")


def test_checkpointed_layers(captures: Captures) -> None:
    layer, eager = make_layer(), make_layer()
    graphed = GraphedMoE(layer)
    for call, use_reentrant in enumerate((True, True, True, False, True, False, False, True)):
        for run, each in ((graphed, layer), (eager, eager)):
            each.zero_grad()
            again = checkpoint(lambda x, run=run: run(x)[0], leaf(6, call), use_reentrant=use_reentrant)
            again.square().sum().backward()
        assert_equal(gradients(layer), gradients(eager), f"{use_reentrant}, call {call}")
    assert (captures.count, captures.replays) == (3, 4 + 2 * 4)


def test_autocast_has_graphs_of_its_own(captures: Captures) -> None:
    layer = make_layer()
    graphed, wanted = GraphedMoE(layer), []
    layer.experts = lambda tokens, *rest: tokens * rest[1].sum(1, keepdim=True)  # type: ignore[assignment]
    for seed in range(6):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=seed % 2 == 1):
            output, _ = graphed(draw(6, 0))
        output.float().square().sum().backward()
        wanted.append({"output": output.detach()} | gradients(layer))
    for seed in range(2, 6):
        assert_equal(wanted[seed], wanted[seed % 2], f"call {seed}")
    assert not torch.equal(wanted[0]["shared.w1"], wanted[1]["shared.w1"])
    assert captures.count == 4


def test_casts_that_autocast_keeps_are_in_the_graph(captures: Captures) -> None:
    layer = make_layer()
    layer.experts = lambda tokens, *rest: tokens * rest[1].sum(1, keepdim=True)  # type: ignore[assignment]
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            graphed(draw(6, 0))  # casts the weights
            graphed(draw(6, 1))
        for parameter in layer.parameters():
            parameter.mul_(3)
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = graphed(draw(6, 2)), layer(draw(6, 2))
    assert torch.equal(found[0], wanted[0])
    assert captures.replays == 2
