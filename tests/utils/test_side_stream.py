"""Side streams: in what order streams wait for each other; a layer's numbers are those of the sequential form."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock, call

import pytest
import torch
from stream_cases import CONFIG, assert_same, make_pair, make_tokens, train_step

from comet import moe
from comet.moe import MoE
from comet.router.losses import RouterStats
from comet.utils.streams import SideStream, StreamOrder

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A record of calls to the streams ``caller`` and ``side``, and of ``Tensor.record_stream``."""
    asked = MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(asked.enter(stream)))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: asked.uses(stream, tensor.numel()))
    return asked


def test_work_waits_for_the_caller_and_the_caller_for_the_work(streams: MagicMock) -> None:
    stats = RouterStats(*(torch.ones(size) for size in (2, 3, 4)))  # a tuple: each tensor is recorded on the stream
    streams.work.return_value = stats
    given = torch.ones(1)
    join = SideStream(streams.side).start(streams.work, given)
    streams.beside()
    assert join() is stats
    assert streams.mock_calls == [
        call.side.wait_stream(streams.caller),
        call.enter(streams.side),
        call.work(given),
        call.side.record_event(),
        call.uses(streams.side, 1),
        *(call.uses(streams.caller, size) for size in (2, 3, 4)),
        call.beside(),
        call.caller.wait_event(streams.side.record_event.return_value),
    ]


def test_without_gradients_the_order_of_the_streams_is_enough(streams: MagicMock) -> None:
    with torch.no_grad():
        SideStream(streams.side).start(torch.neg, torch.ones(1))()
    streams.uses.assert_not_called()


def test_without_a_stream_work_is_done_at_once() -> None:
    done: list[int] = []
    side = SideStream.create(CPU)
    assert side.stream is None
    join = side.start(lambda value: done.append(int(value)), torch.tensor(7))
    assert done == [7]
    join()
    assert done == [7]


def sequential(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, RouterStats]:
    """Run the parts of the layer one after the other."""
    tokens = x.reshape(-1, CONFIG.hidden_size)
    routing = layer.router(tokens)
    assert layer.shared is not None
    shared = layer.shared(tokens)
    stats = layer.router.measure(routing.logits, routing.scores, routing.top_k_ids)
    routed = layer.routed_experts(tokens, routing.top_k_ids, routing.top_k_weights)
    return (routed + shared).view_as(x), stats


@pytest.mark.parametrize("path", ["twin", "plain"])
def test_layer_equals_the_sequential_form_bit_for_bit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_pair("cpu", torch.float32, path)
    tokens = make_tokens(layers.streams, 0)
    found = train_step(layers.streams, tokens, late=True)
    assert_same(found, train_step(layers.in_line, tokens), "without streams")
    monkeypatch.setattr(MoE, "forward", sequential)
    assert_same(found, train_step(layers.streams, tokens), "sequential")


class Late(SideStream):
    """Does the work when it is asked for, as a GPU may."""

    def start(self, work: Callable, *inputs: torch.Tensor) -> Callable:
        return lambda: work(*inputs)


def test_nothing_in_the_layer_waits_for_what_runs_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_pair("cpu", torch.float32)
    tokens = make_tokens(layers.streams, 1)
    expected = train_step(layers.in_line, tokens)
    layers.streams.group = replace(layers.streams.group, side_stream=Late(None))
    monkeypatch.setattr(moe, "BESIDE_TOKENS", 0)
    found = train_step(layers.streams, tokens)
    for name in ("output", "loss", "load"):
        assert torch.equal(found[name], expected[name]), name
    torch.testing.assert_close(found, expected)  # gradients are added up in another order


def test_the_layer_joins_streams_before_anything_runs_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the side stream writes may still be read by an earlier call on another stream."""
    layers = make_pair("cpu", torch.float32)
    order: list[str] = []
    monkeypatch.setattr(moe, "BESIDE_TOKENS", 0)
    monkeypatch.setattr(StreamOrder, "join", lambda _: order.append("join"))
    monkeypatch.setattr(SideStream, "start", lambda _, work, *inputs: order.append("start") or partial(work, *inputs))
    layers.streams(make_tokens(layers.streams, 0))
    assert order[:2] == ["join", "start"]
