"""The timing loop: its order, its samples, and how long it warms up, on a GPU whose clock is a number."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from comet.comm.handshake import largest
from comet.tuner import timing
from comet.tuner.timing import (
    WARM_S,
    Timing,
    capture,
    summarize,
    time_interleaved,
)


@dataclass
class FakeGPU:
    """Runs a call when its end is read: ``seconds`` pass then, or what ``slow`` has for the place of the call.

    ``calls`` are name and input set of each; the milliseconds that are read of one are its place.
    """

    seconds: float
    slow: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(timing, "start_call", self.start_call)
        patch.setattr(torch.cuda, "_sleep", lambda _: None)
        patch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def start_call(
        self, variant: Callable[[int], Any], index: int, barrier: Callable[[], None], _: Any
    ) -> Callable[[], float]:
        barrier()
        variant(index)
        mine = len(self.calls) - 1

        def read_ms() -> float:
            self.now += self.slow.get(mine, self.seconds)
            return float(mine)

        return read_ms

    def variants(self, names: Sequence[str]) -> dict[str, Callable[[int], None]]:
        return {name: lambda index, name=name: self.calls.append((name, index)) for name in names}


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def warm_rounds(gpu: FakeGPU) -> int:
    time_interleaved(gpu.variants("ab"), rounds=2, rotate=2, device=GPU)
    assert len(gpu.calls) % 2 == 0
    return len(gpu.calls) // 2 - 2


def test_quantiles_example() -> None:
    found = summarize(torch.tensor([10.0, 1.0, 4.0, 2.0, 3.0]))
    assert (found.median_ms, found.p10_ms, found.p90_ms, found.mean_ms) == pytest.approx((3, 1.4, 7.6, 4))
    assert Timing(0.16, 0.08, 0.24, 0.4).of_one(8) == Timing(0.02, 0.01, 0.03, 0.05)


def test_variants_are_interleaved_rotated_and_warmed_up() -> None:
    calls: list[tuple[str, int] | str] = []
    variants = {name: lambda index, name=name: calls.append((name, index)) for name in "abc"}
    opening = partial(calls.append, "opening")
    timings = time_interleaved(variants, rounds=3, warmup=1, opening=opening, rotate=2, device=CPU)
    assert calls[::2] == ["opening"] * 12
    rounds = [calls[start : start + 6 : 2] for start in range(1, 24, 6)]
    assert ["".join(name for name, _ in of_round) for of_round in rounds] == ["cab", "abc", "bca", "cab"]
    assert [{index for _, index in of_round} for of_round in rounds] == [{1}, {0}, {1}, {0}]
    assert list(timings) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["rounds", "rotate", "warmup"])
def test_timing_needs_a_round_an_input_and_a_warm_up(name: str) -> None:
    numbers = {"rounds": 1, "rotate": 1, "warmup": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        time_interleaved({}, device=CPU, **numbers)


@pytest.mark.parametrize(("leads", "done"), [(True, ["opening", "wait"]), (False, ["opening"])])
def test_a_gpu_waits_for_its_host_before_the_barrier(
    leads: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeGPU(1.0).install(monkeypatch)
    found: list[str] = []
    monkeypatch.setattr(timing, "rank_barrier", lambda *_: partial(found.append, "barrier"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append("wait"))
    variants = {"a": lambda _: found.append("call")}
    time_interleaved(variants, rounds=1, warmup=1, opening=partial(found.append, "opening"), device=GPU, leads=leads)
    assert found == [*done, "barrier", "call"] * 2


# ---- how long it warms up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "warm"), [(2**-10, 256), (0.0036, 70), (0.1, 3), (0.2, 3), (30.0, 3), (0, 10_000)])
def test_a_gpu_is_warmed_up_for_half_a_second(seconds: float, warm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(seconds)
    gpu.install(monkeypatch)
    assert warm_rounds(gpu) == warm
    assert warm * 2 * seconds >= WARM_S or seconds == 0


def test_neither_compilation_nor_a_hiccup_shortens_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(2**-7, slow={0: 9.0, 5: 0.25})
    gpu.install(monkeypatch)
    assert warm_rounds(gpu) == 32


def test_rounds_of_the_warm_up_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(0.01)
    gpu.install(monkeypatch)
    timings = time_interleaved(gpu.variants("abc"), rounds=3, rotate=2, device=GPU)
    assert len(gpu.calls) == 17 * 3 + 9
    assert gpu.calls[-9:] == [(name, index) for index, names in ((0, "abc"), (1, "bca"), (0, "cab")) for name in names]
    places = {"a": [51, 56, 58], "b": [52, 54, 59], "c": [53, 55, 57]}
    assert timings == {name: summarize(torch.tensor(each).double()) for name, each in places.items()}


def test_nothing_to_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGPU(0.0).install(monkeypatch)
    assert time_interleaved({}, rounds=2, device=GPU) == {}


def test_a_cpu_needs_no_more_rounds() -> None:
    calls: list[int] = []
    time_interleaved({"a": calls.append}, rounds=2, device=CPU)
    assert len(calls) == 3 + 2


def rounds_on_rank(rank: int, world_size: int, seconds: list[float]) -> tuple[int, float, Timing]:
    """Uncounted rounds, how long they and two counted ones took by this rank's clock, and what was counted."""
    gpu = FakeGPU(seconds[rank])
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        patch.setattr(timing, "largest", lambda values, *_: largest(values, CPU, dist.group.WORLD))
        found = warm_rounds(gpu), gpu.now
        patch.setattr(timing, "run_round", lambda *_, **__: torch.tensor([7.0 + rank]))
        return *found, time_interleaved({"a": abs}, rounds=3, device=CPU)["a"]


def test_ranks_of_unequal_speed_make_equally_many_rounds() -> None:
    """The slowest rank's half second decides; different numbers of rounds would leave a rank waiting."""
    (fast, fast_s, _), (slow, slow_s, _) = run_ranks(rounds_on_rank, 2, [2**-10, 2**-8])
    assert fast == slow == 64
    assert slow_s == 4 * fast_s == WARM_S + 2 * 2**-7
    found = run_ranks(rounds_on_rank, 2, [0.25, 2**-10])
    assert [(rounds, counted.median_ms) for rounds, _, counted in found] == [(3, 8), (3, 8)]


def test_a_captured_variant_keeps_the_memory_that_its_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, **__: MagicMock())
    scratch = torch.zeros(3)
    held = weakref.ref(scratch)
    replay = capture(partial(torch.add, scratch), rotate=2)
    del scratch
    gc.collect()
    assert held() is not None
    replay(1)
    del replay
    gc.collect()
    assert held() is None
