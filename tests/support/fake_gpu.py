"""A GPU for tests of what is timed: its clock is a number, and it needs no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comet.measure import timing


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
