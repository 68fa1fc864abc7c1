"""What waits for what between the stream that computes and the one that copies, over streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from comet.config import SpeculationConfig
from comet.decode.runners import LocalRunner
from comet.experts import CachedExperts, ExpertCache
from comet.experts import prefetch as module
from comet.experts.prefetch import Prefetch, expect_drafts, prefetch_between

LAYERS, E, K, R = 4, 6, 3, 2


@dataclass
class Event:
    """A point of a stream: all that is known to be over there."""

    over: frozenset[str] = frozenset()


@dataclass
class Stream:
    """Work in order; ``over``: what has ended before whatever is given to the stream next begins."""

    over: set[str] = field(default_factory=set)
    began_behind: dict[str, frozenset[str]] = field(default_factory=dict)

    def work(self, name: str) -> None:
        self.began_behind[name] = frozenset(self.over)
        self.over.add(name)

    def record_event(self) -> Event:
        return Event(frozenset(self.over))

    def wait_event(self, event: Event) -> None:
        self.over |= event.over

    def wait_stream(self, other: Stream) -> None:
        self.over |= other.over


class Pass:
    """A pass of all layers, each a step and what is launched beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafts: SpeculationConfig | None) -> None:
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        caches = [
            ExpertCache(torch.rand(E, 32, 16), torch.rand(E, 16, 16), K, torch.device("cpu")) for _ in range(LAYERS)
        ]
        self.numbers = {id(cache.tables): number for number, cache in enumerate(caches)}
        paths = [CachedExperts(cache, LocalRunner(K, 4), K) for cache in caches]
        prefetch_between(paths, [lambda tokens: torch.zeros(len(tokens), K, dtype=torch.int32)] * LAYERS)
        if drafts is not None:
            expect_drafts(paths, drafts)
        self.caches = caches
        self.prefetches: list[Prefetch] = [path.prefetch for path in paths]
        for cache, each in zip(caches, self.prefetches, strict=True):
            cache.host = replace(cache.host, fetched=Event())
            each._stream = self.side
        monkeypatch.setattr(module, "plan", lambda ids, slots, host: self.note(f"guess of {ids.shape[1]}", host))
        monkeypatch.setattr(module, "plan_draft", lambda ids, steps, slots, host: self.note("list", host))
        monkeypatch.setattr(module, "travel", self.travel)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def note(self, what: str, host: object) -> None:
        self.current.work(f"{what} {self.numbers[id(host.tables)]}")

    def travel(self, slots: object, host: object, until: torch.Tensor | None = None) -> None:
        number = self.numbers[id(host.tables)]
        if until is not None:
            assert until.data_ptr() == self.caches[number + 1].tables.header.data_ptr()
        self.note("travel" if until is None else "travel of the list", host)

    def run(self, num_experts: int) -> None:
        tokens = torch.zeros(1, 4)
        for number, each in enumerate(self.prefetches):
            each.before_step(tokens, num_experts)
            self.main.work(f"fetch {number}")
            self.caches[number].host.fetched.over = frozenset(self.main.over)
            self.main.work(f"step {number}")
            each.after_step(tokens, num_experts)
        self.main.work("head")


def check_order(done: Pass, guess: str) -> None:
    behind = done.main.began_behind | done.side.began_behind
    assert behind["head"] >= set(done.side.over), "a step's graph ends with the other stream"
    for number in range(1, LAYERS):
        plan, travel = f"{guess} {number}", f"travel {number}"
        assert f"step {number - 1}" not in behind[plan], "the layer before is being computed"
        assert f"fetch {number - 1}" in behind[travel], "misses go first"
        assert f"step {number - 1}" not in behind[travel]
        assert plan in behind[f"fetch {number}"], "no plan changes tables beside their step"
        assert travel not in behind[f"fetch {number}"], "no step waits for a guess"


def test_steps_wait_for_plans_and_for_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Pass(monkeypatch, None)
    done.run(K)
    check_order(done, f"guess of {K}")


def test_a_draft_lists_behind_its_step_and_no_layer_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Pass(monkeypatch, SpeculationConfig(draft_experts=(R,)))
    done.run(R)
    check_order(done, f"guess of {R}")
    behind = done.main.began_behind | done.side.began_behind
    for number in range(LAYERS):
        assert f"step {number}" in behind[f"list {number}"]
    for number in range(LAYERS - 1):
        assert not behind[f"fetch {number + 1}"] & {f"list {number}", f"travel of the list {number}"}
    assert f"travel of the list {LAYERS - 1}" not in behind, "nothing ends it before the graph does"


def test_drafts_of_cached_experts_are_not_guessed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Pass(monkeypatch, SpeculationConfig(draft_experts=(R,), draft_cached_only=True))
    done.run(R)
    assert not any("guess" in name for name in done.side.over)
    assert {f"travel {number}" for number in range(1, LAYERS)} <= done.side.over, "what is planned goes on"
