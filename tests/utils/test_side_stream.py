"""Side streams: in what order streams wait for each other; a layer's numbers are those of the sequential form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from stream_cases import CONFIG, assert_same, make_pair, make_tokens, train_step

from comet.layer.routed_experts import SymmetricPath
from comet.moe import MoE
from comet.router.losses import RouterStats
from comet.utils.streams import SideStream

CPU = torch.device("cpu")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.device = CPU

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"the work of {self.name}"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[SideStream, list[str], dict[str, torch.Tensor]]:
    """A side stream, what happens, and the tensors to report by name when the allocator is told of them."""
    log: list[str] = []
    names: dict[str, torch.Tensor] = {}
    caller, side = FakeStream("caller", log), FakeStream("side", log)

    @contextmanager
    def enter(stream: FakeStream) -> Iterator[None]:
        log.append(f"enter {stream.name}")
        yield
        log.append(f"leave {stream.name}")

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        (name,) = (name for name, known in names.items() if known is tensor)
        log.append(f"{name} is used by {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return SideStream(side), log, names  # type: ignore[arg-type]


def test_work_waits_for_the_caller_and_the_caller_for_the_work(fakes) -> None:
    side, log, names = fakes
    stats = RouterStats(*(torch.ones(size) for size in (1, 2, 3)))  # a tuple, so that the allocator is told of each
    names.update({"input": torch.ones(1), **stats._asdict()})

    def work(value: torch.Tensor) -> RouterStats:
        assert value is names["input"]
        log.append("work")
        return stats

    join = side.start(work, names["input"])
    log.append("beside")
    assert join() is stats
    assert log == [
        "side waits for caller",
        "enter side",
        "work",
        "leave side",
        "input is used by side",
        *(f"{name} is used by caller" for name in RouterStats._fields),
        "beside",
        "caller waits for the work of side",
    ]


def test_without_gradients_the_order_of_the_streams_is_enough(fakes) -> None:
    side, log, names = fakes
    names["input"] = torch.ones(1)
    with torch.no_grad():
        side.start(torch.neg, names["input"])()
    assert log == ["side waits for caller", "enter side", "leave side", "caller waits for the work of side"]


def test_without_a_stream_work_is_done_at_once() -> None:
    done: list[int] = []
    side = SideStream.create(CPU)
    assert side.stream is None
    join = side.start(lambda value: done.append(int(value)), torch.tensor(7))
    assert done == [7]
    join()
    assert done == [7]


def sequential(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, RouterStats]:
    """The layer, written down without anything beside it."""
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
    assert_same(found, train_step(layers.in_line, tokens, late=False), "without streams")
    monkeypatch.setattr(MoE, "forward", sequential)
    assert_same(found, train_step(layers.streams, tokens, late=False), "sequential")


class Late(SideStream):
    """Does the work when it is asked for, as a GPU may."""

    def start(self, work: Callable, *inputs: torch.Tensor) -> Callable:
        return lambda: work(*inputs)


def test_nothing_in_the_layer_waits_for_what_runs_beside_it() -> None:
    layers = make_pair("cpu", torch.float32)
    tokens = make_tokens(layers.streams, 1)
    expected = train_step(layers.in_line, tokens, late=False)
    layers.streams.group = replace(layers.streams.group, side_stream=Late(None))
    found = train_step(layers.streams, tokens, late=False)
    for name in ("output", "loss", "load"):
        assert torch.equal(found[name], expected[name]), name
    torch.testing.assert_close(found, expected)  # gradients are added up in another order


def test_plan_goes_ahead_only_where_something_large_runs_beside_it() -> None:
    layers = make_pair("cpu", torch.float32, "twin")
    path, group = layers.streams.experts, layers.streams.group
    assert isinstance(path, SymmetricPath)
    assert path.backend.plan_stream is group.plan_stream
    alone = MoE(replace(CONFIG, shared_ffn_size=0), group, path="twin").experts
    assert isinstance(alone, SymmetricPath)
    assert alone.backend.plan_stream.stream is None
    assert alone.backend.plan_stream is not group.plan_stream
