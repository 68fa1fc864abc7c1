"""In what order streams wait for each other where a group's memory is used: of streams that only say so."""

import pytest
import torch

from comet.utils import streams as module
from comet.utils.streams import StreamOrder


class Stream:
    def __init__(self, name: str, handle: int) -> None:
        self.name, self.cuda_stream, self.captures = name, handle, False
        self.waited: list[str] = []

    def wait_stream(self, other: "Stream") -> None:
        if other is not self:
            assert self.captures == other.captures, "a capture waits for streams of its own alone"
            self.waited.append(other.name)


class Streams:
    """One after the other the current stream of an order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = {name: Stream(name, handle) for handle, name in enumerate("ABCS")}
        self.current = self.made["A"]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: self.current.cuda_stream, raising=False
        )
        monkeypatch.setattr(module, "_captures", lambda stream: stream.captures)
        self.order = StreamOrder(torch.device("cuda", 0))

    def join(self, name: str, *, captures: bool = False) -> list[str]:
        """Return the names of the streams that the stream ``name`` waits for."""
        self.current = self.made[name]
        self.current.captures, self.current.waited = captures, []
        self.order.join()
        return self.current.waited

    def end_capture(self) -> None:
        for stream in self.made.values():
            stream.captures = False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_each_stream_waits_for_the_one_before(streams: Streams) -> None:
    assert [streams.join(name) for name in "AABBA"] == [[], [], ["A"], [], ["B"]]


def test_a_replay_behind_its_capture_is_waited_for(streams: Streams) -> None:
    """A joins, captures on S and replays on A itself; the order of streams never hears of the replay."""
    streams.join("A")
    assert streams.join("S", captures=True) == []
    streams.end_capture()
    assert streams.join("B") == ["A"]
    assert streams.join("S") == ["B"], "a stream that captured before is one like others"


def test_branches_of_a_capture_wait_for_each_other(streams: Streams) -> None:
    streams.join("B")
    assert streams.join("S", captures=True) == []
    assert streams.join("C", captures=True) == ["S"]
    assert streams.join("S", captures=True) == ["C"]
    streams.end_capture()
    assert streams.join("A") == ["B"]


def test_a_capture_on_the_last_stream_has_branches_that_wait_for_it(streams: Streams) -> None:
    streams.join("S")
    streams.join("S", captures=True)
    assert streams.join("C", captures=True) == ["S"]
