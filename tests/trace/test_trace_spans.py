"""Spans that never overlap, clocks from barriers, blocks over time: the worked examples and random cases."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from comet.trace.events import Clock, Event, compare_clocks, find_spans
from comet.trace.plot import blocks_over_time


def work(begin: int, ready: int, end: int, kind: int = 2) -> Event:
    return Event(0, 0, 7, 1, kind, (0, 0, 1), begin, ready, end)


def test_spans_of_the_worked_example() -> None:
    events = [work(0, 0, 50_000), work(30_000, 40_000, 90_000)]
    spans = [(span.name, span.begin, span.end) for span in find_spans(events)]
    assert spans == [
        ("layer 0 GEMM", 0, 30_000),
        ("wait for rows", 30_000, 40_000),
        ("layer 0 GEMM", 40_000, 50_000),
        ("layer 0 GEMM", 50_000, 90_000),
    ]


def test_spans_of_odd_cases() -> None:
    assert find_spans([]) == []
    short = [(s.name, s.begin, s.end) for s in find_spans([work(0, 900, 5_000)])]
    assert short == [("layer 0 GEMM", 0, 5_000)], "one look is no wait"
    assert find_spans([work(10, 10, 10, kind=6)]) == [], "a conversion has no length"
    covered = [work(0, 0, 9_000), work(0, 9_000, 9_500), work(9_500, 12_000, 12_000)]
    assert [s.name for s in find_spans(covered)] == ["wait for rows", "layer 0 GEMM", "wait for rows"]


@pytest.mark.parametrize("seed", range(5))
def test_random_spans_never_overlap_and_keep_all_time(seed: int) -> None:
    """Waits of the next one or two items fall into the present one, as in a pipelined loop."""
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    ends = np.cumsum(draw.integers(5_000, 20_000, 40)).tolist()
    events, reached = [], 0
    for end, before in zip(ends, [0, 0, *ends[:-2]], strict=True):
        begin = max(reached, before + int(draw.integers(0, 3_000)))
        ready = min(begin + int(draw.choice([0, 500, 4_000])), end)
        events.append(work(begin, ready, end))
        reached = ready
    spans = find_spans(events)
    assert all(before.end <= after.begin for before, after in pairwise(spans))
    assert sum(span.end - span.begin for span in spans) == ends[-1] - spans[0].begin
    waits = [event.ready - event.begin for event in events if event.ready - event.begin > 1000]
    assert [span.end - span.begin for span in spans if span.name == "wait for rows"] == waits


def test_clocks_of_the_worked_example() -> None:
    stamps = [torch.tensor([[100, 110]]), torch.tensor([[1103, 1109]])]
    assert compare_clocks(stamps) == [Clock(0, 0), Clock(1001, 8)]
    # A second barrier in which rank 1 came last leaves less.
    stamps = [torch.tensor([[100, 110], [200, 240]]), torch.tensor([[1103, 1109], [1238, 1241]])]
    assert compare_clocks(stamps)[1] == Clock((998 + 1009) // 2, 5)
    # Clocks that drift apart leave nothing: the error is half of what is missing.
    stamps = [torch.tensor([[100, 110], [200, 210]]), torch.tensor([[1100, 1110], [1300, 1310]])]
    assert compare_clocks(stamps)[1] == Clock((1090 + 1010) // 2, 40)


def test_blocks_over_time_of_the_worked_example() -> None:
    assert blocks_over_time([0, 5], [10, 10], np.array([0.0, 5.0, 10.0])).tolist() == [1.0, 2.0]
