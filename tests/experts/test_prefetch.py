"""Waits between the stream that computes and the one that copies; the meanings of ``expert_prefetch``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from comet.decode.runners import LocalRunner
from comet.experts import prefetch as module
from comet.experts.cache import ExpertCache
from comet.experts.cached import CachedExperts, prefetch_between
from comet.experts.options import StoreOptions, prefetch_wanted
from comet.experts.prefetch import Prefetch
from comet.experts.store import HeldExperts
from comet.jobs.generate import GenerateConfig

LAYERS, E, K = 4, 6, 3


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
    """A pass of all layers, each a step and the launches on the other stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        caches = [
            ExpertCache(HeldExperts(torch.rand(E, 32, 16), torch.rand(E, 16, 16), True), K, CPU) for _ in range(LAYERS)
        ]
        self.numbers = {id(cache.tables): number for number, cache in enumerate(caches)}
        paths = [CachedExperts(cache, LocalRunner(K, 4), K) for cache in caches]
        prefetch_between(paths, [lambda tokens: torch.zeros(len(tokens), K, dtype=torch.int32)] * LAYERS)
        self.caches = caches
        self.prefetches: list[Prefetch] = [path.prefetch for path in paths]
        for cache, each in zip(caches, self.prefetches, strict=True):
            cache.host = replace(cache.host, fetched=Event())
            each._stream = cache.travel_stream = self.side
        monkeypatch.setattr(module, "plan", lambda ids, slots, host: self.note(f"guess of {ids.shape[1]}", host))
        monkeypatch.setattr(module, "travel", lambda slots, host: self.note("travel", host))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def note(self, what: str, host: object) -> None:
        self.current.work(f"{what} {self.numbers[id(host.tables)]}")

    def run(self, num_experts: int) -> None:
        tokens = torch.zeros(1, 4)
        for number, each in enumerate(self.prefetches):
            each.before_step(tokens, num_experts)
            self.main.work(f"fetch {number}")
            self.caches[number].host.fetched.over = frozenset(self.main.over)
            self.main.work(f"step {number}")
            each.after_step(tokens)
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


@pytest.mark.parametrize("num_experts", [K, 2])
def test_steps_wait_for_plans_and_for_no_guess(num_experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, which have fewer experts per token, are guessed for like any step."""
    done = Pass(monkeypatch)
    done.run(num_experts)
    check_order(done, f"guess of {num_experts}")


def test_whoever_streams_tokens_waits_for_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may run between two layers of a step."""
    done = Pass(monkeypatch)
    first, tokens = done.prefetches[0], torch.zeros(1, 4)
    first.before_step(tokens, K)
    first.after_step(tokens)
    assert "travel 1" not in done.main.over
    done.caches[1].owners()
    assert {f"guess of {K} 1", "travel 1"} <= done.main.over


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FILE: dict[str, Any] = {"expert_store": "file", "host_budget": 0.75}


def test_auto_is_on_where_a_gpu_reads_the_store() -> None:
    for device in (CPU, GPU):
        for readable in (True, False):
            for setting in ("auto", True, "true", False, "false"):
                options = StoreOptions(expert_budget=0.5, expert_prefetch=setting)
                # Prefetch that a user insists on is refused elsewhere, and not left out.
                wanted = device == GPU and readable if setting == "auto" else setting in (True, "true")
                assert options.prefetches(device, useful=readable) == wanted


@pytest.mark.parametrize("setting", ["on", "True", "", None, 1, 0.0, [], ("auto",)])
@pytest.mark.parametrize("made", [GenerateConfig, StoreOptions])
def test_another_value_is_named(setting: Any, made: Any) -> None:
    for budget in (None, 0.5):
        with pytest.raises(ValueError, match=r"^expert_prefetch=.* must be one of auto, true, false") as caught:
            made(expert_budget=budget, expert_prefetch=setting)
        assert f"expert_prefetch={setting!r} " in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "meaning"), [("auto", None), ("true", True), ("false", False), (True, True), (False, False)]
)
def test_the_three_words_and_bools(setting: Any, meaning: bool | None) -> None:
    """Prefetch that is required is refused where it cannot run; other values are never refused."""
    assert prefetch_wanted(setting) is meaning
    assert StoreOptions.of(GenerateConfig(expert_budget=0.5, expert_prefetch=setting)).expert_prefetch == setting
    if meaning:
        with pytest.raises(ValueError, match=f"^expert_prefetch={setting} must come with an expert_budget"):
            StoreOptions(expert_prefetch=setting)
        with pytest.raises(NotImplementedError, match=f"^expert_prefetch={setting} must be auto or false with .*=file"):
            StoreOptions(expert_budget=0.5, expert_prefetch=setting, **FILE)
    else:
        assert not StoreOptions(expert_prefetch=setting).in_store
        assert StoreOptions(expert_budget=0.5, expert_prefetch=setting, **FILE).in_store
