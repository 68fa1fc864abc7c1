"""Timelines: what every block of the fused kernels did and when, on all ranks, as a trace and a picture.

    from comet.trace import record

    with record(group) as timeline:
        moe(x)
    if group.rank == 0:
        timeline.write(Path("outputs/timeline"))

Only launches inside the ``with`` record, and only those of the ``fused`` path. The first recorded call of a shape
compiles its kernels once more, while other ranks wait: call the layer inside a ``record`` once before the one that
counts. Clocks of the ranks are compared before and after (``comet.trace.events.compare_clocks``); between GPUs of one
host the error is about the time a signal takes from one to the other, and is reported. Over nodes the hosts' barriers
compare the clocks, and two lanes show what a rank sends over the network, and its waits for other nodes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from comet.comm.base import require_memory
from comet.comm.handshake import gather
from comet.config import require
from comet.kernels.runtime.recorder import DEFAULT_CAPACITY, KIND_SEND, MAX_CAPACITY, Recorder, align, stamp
from comet.layer.group import ExpertGroup
from comet.trace.events import CONVERSION, NETWORK, WAITS, WORKS, Clock, Event, Launch, Span, compare_clocks, find_spans
from comet.trace.plot import draw_timeline

HOST_ROUNDS = 16
ROLES = {0: "joins the GEMM", 1: "joins reduce and send"}
# Reserved colour names of chrome://tracing; Perfetto picks its own colour for each name.
COLOURS = {
    "dispatch": "rail_load",
    "layer 0 GEMM": "thread_state_runnable",
    "layer 1 GEMM": "rail_response",
    "reduce and send": "good",
    "final sum": "rail_animation",
    "send to nodes": "rail_load",
    "wait for nodes": "terrible",
} | dict.fromkeys(WAITS, "terrible")


def chrome_trace(events: Sequence[Event], spans: Sequence[Span], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The file as an object for ``json.dump``: names first, then by time, in microseconds from the first begin."""
    origin = min((event.begin for event in events), default=0)

    def entry(event: Event, name: str, kind: str, time_ns: int, **more: Any) -> dict[str, Any]:
        place = {"pid": event.rank, "tid": event.block, "ts": (time_ns - origin) / 1e3}
        return {"name": name, "cat": kind, **place, "args": {"sm": event.sm, "epoch": event.epoch}} | more

    entries = [entry(event, ROLES[event.layer], CONVERSION, event.end, ph="i", s="t")
               for event in events if event.work == CONVERSION]  # fmt: skip
    for span in spans:
        length = {"ph": "X", "cname": COLOURS[span.name], "dur": (span.end - span.begin) / 1e3}
        found = entry(span.event, span.name, "wait" if span.name in WAITS else "work", span.begin, **length)
        entries.append(found | {"args": {**span.event.arguments, **found["args"]}})
    names = [name for rank in sorted({event.rank for event in events})
             for name in _names("process", rank, 0, f"rank {rank}", rank)]  # fmt: skip
    for rank, block in sorted({(event.rank, event.block) for event in events}):
        names += _names("thread", rank, block, NETWORK.get(block, f"block {block:3d}"), block)
    return {
        "traceEvents": [*names, *sorted(entries, key=lambda entry: entry["ts"])],
        "displayTimeUnit": "ns",
        "otherData": dict(summary),
    }


def _names(kind: str, rank: int, block: int, name: str, order: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": rank, "tid": block}
    texts = {f"{kind}_name": {"name": name}, f"{kind}_sort_index": {"sort_index": order}}
    return [{"name": text, **place, "args": given} for text, given in texts.items()]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The recording of one rank."""

    rows: Tensor  # (n, 10) int64 on the CPU: block, then the fields of each event (comet.kernels.runtime.recorder)
    lost: int  # events that found the buffer full
    stamps: Tensor  # (barriers, 2) int64 arrival and departure at the barriers that compare the clocks


@dataclass
class Timeline:
    """The recording of all ranks of a group, complete when the ``with`` of ``record`` ends, on every rank."""

    records: list[RankRecord] = field(default_factory=list)

    @cached_property
    def clocks(self) -> list[Clock]:
        return compare_clocks([record.stamps for record in self.records])

    @cached_property
    def events(self) -> list[Event]:
        """All events on rank 0's clock, by rank, block and order of recording."""
        found = []
        for rank, (record, clock) in enumerate(zip(self.records, self.clocks, strict=True)):
            for block, kind, epoch, sm, first, second, third, *times in record.rows.tolist():
                begin, ready, end = (time - clock.offset_ns for time in times)
                found.append(Event(rank, block, sm, epoch, kind, (first, second, third), begin, ready, end))
        return found

    @cached_property
    def spans(self) -> list[Span]:
        return find_spans(self.events)

    @cached_property
    def launches(self) -> list[Launch]:
        """The launches of all ranks, by rank and begin."""
        groups: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
        for event in self.events:
            if event.block in NETWORK:
                continue
            groups[event.rank, event.epoch, event.layer].append(event)
        found = []
        for key, group in groups.items():
            blocks = 1 + max(event.block for event in group)
            begin, end = min(event.begin for event in group), max(event.end for event in group)
            found.append(Launch(*key, blocks=blocks, begin=begin, end=end))
        return sorted(found, key=lambda launch: (launch.rank, launch.begin))

    def summary(self) -> dict[str, Any]:
        """The recording in numbers, ready for JSON.

        Returns:
            ``ranks``, ``launches`` (of one rank), ``events``, ``lost_events``, ``span_ms`` (first begin to last end),
            ``clock_error_us`` (largest of all ranks), ``clock_step_ns`` (smallest difference between two times),
            ``wait_share`` (of all block time) and ``per_rank``: ``rank``, ``block_ms`` (blocks x time, summed over the
            launches), ``work_ms``, ``wait_ms`` (by name), ``wait_share``, ``idle_share``, ``lost_events``, and over
            nodes ``network_ms`` (by name), of no block.
        """
        ranks = [self._rank_summary(rank) for rank in range(len(self.records))]
        block_ms = sum(rank["block_ms"] for rank in ranks)
        wait_ms = sum(sum(rank["wait_ms"].values()) for rank in ranks)
        begins, ends = [launch.begin for launch in self.launches], [launch.end for launch in self.launches]
        steps = torch.cat([record.rows[:, 7:].flatten().sort().values.diff() for record in self.records])
        return {
            "ranks": len(ranks),
            "launches": sum(launch.rank == 0 for launch in self.launches),
            "events": len(self.events),
            "lost_events": sum(record.lost for record in self.records),
            "span_ms": (max(ends) - min(begins)) / 1e6 if ends else 0.0,
            "clock_error_us": max(clock.error_ns for clock in self.clocks) / 1e3,
            "clock_step_ns": int(steps[steps > 0].min()) if (steps > 0).any() else 0,
            "wait_share": wait_ms / block_ms if block_ms else 0.0,
            "per_rank": ranks,
        }

    def write(self, folder: Path) -> dict[str, Any]:
        """Write ``timeline.json`` (for ui.perfetto.dev or chrome://tracing), ``timeline.png`` and ``summary.json``."""
        require(bool(self.events), "events=0 must be at least 1: only the 'fused' path records, inside the with block")
        folder.mkdir(parents=True, exist_ok=True)
        summary = self.summary()
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        (folder / "timeline.json").write_text(json.dumps(chrome_trace(self.events, self.spans, summary)) + "\n")
        draw_timeline(self.spans, self.launches, summary, folder / "timeline.png")
        return summary

    def _rank_summary(self, rank: int) -> dict[str, Any]:
        block_ns = sum((one.end - one.begin) * one.blocks for one in self.launches if one.rank == rank)
        times: Counter[str] = Counter()
        for span in self.spans:
            if span.event.rank == rank:
                times[span.name] += span.end - span.begin
        network = {name: times.pop(name) / 1e6 for name in NETWORK.values() if name in times}
        waits = sum(times[name] for name in WAITS)
        return {
            "rank": rank,
            "block_ms": block_ns / 1e6,
            "work_ms": {name: times[name] / 1e6 for name in WORKS if times[name]},
            "wait_ms": {name: times[name] / 1e6 for name in WAITS if times[name]},
            "wait_share": waits / block_ns if block_ns else 0.0,
            "idle_share": 1 - sum(times.values()) / block_ns if block_ns else 0.0,
            "lost_events": self.records[rank].lost,
        } | ({"network_ms": network} if network else {})


@contextmanager
def record(group: ExpertGroup, *, capacity: int = DEFAULT_CAPACITY) -> Iterator[Timeline]:
    """Record the launches of all MoE layers of a group (collective: every rank of the group enters and leaves).

    A CUDA graph cannot be captured inside (``ValueError``), and one captured before does not record.

    Args:
        capacity: Events each block can keep, 48 bytes each; what comes after is counted as lost.

    Yields:
        The timeline, still empty; complete on every rank when the block ends. When it ends by an exception the
        timeline stays empty, and no rank waits for another.

    Raises:
        ValueError: If ``capacity`` is not between 1 and a million, or there is no kernel to record: on a CPU they run
            under Triton's interpreter only.
        UnavailableError: If the group, or its node, has no symmetric memory.
    """
    require(1 <= capacity <= MAX_CAPACITY, f"capacity={capacity} must be at least 1 and at most {MAX_CAPACITY}")
    pool = group.workspace if group.nodes is None else group.nodes.inner.workspace
    require_memory(pool.comm, "recording", "trace the collectives of path 'plain' with torch.profiler")
    require(
        group.device.type != "cpu" or triton.knobs.runtime.interpret,
        f"device={group.device} must be used with TRITON_INTERPRET=1: only kernels record",
    )
    recorder = Recorder.allocate(group.device, capacity)
    timeline = Timeline()
    before = compare(group)
    group.workspace.recorder = pool.recorder = recorder
    try:
        yield timeline
    finally:
        group.workspace.recorder = pool.recorder = None
    after = compare(group)
    group.workspace.check()
    stamps = torch.cat([before, after])
    timeline.records.extend(gather(group.process_group, _read(recorder, stamps)))


def compare(group: ExpertGroup) -> Tensor:
    """Barriers that note their times (collective), over nodes of the hosts; ``(barriers, 2)`` int64 of this clock."""
    pool = group.workspace
    if group.nodes is None:
        flags = pool.barrier_flags
        return align(flags.pointers, pool.epoch, pool.fault, flags.rank, pool.timeout_ns).cpu()
    rounds = []
    for _ in range(HOST_ROUNDS):
        arrival = stamp(group.device).cpu()
        gather(group.process_group, None)
        rounds.append(torch.cat([arrival, stamp(group.device).cpu()]))
    return torch.stack(rounds)


def _read(recorder: Recorder, stamps: Tensor) -> RankRecord:
    events = recorder.events.cpu()
    counts = events[:, 0, 0].long()
    kept = counts.clamp(max=recorder.capacity)
    is_kept = torch.arange(recorder.capacity) < kept[:, None]
    blocks = torch.arange(len(events))[:, None].expand_as(is_kept)[is_kept]
    words = events[:, 1:][is_kept]
    rows = torch.cat([blocks[:, None], words[:, :6], words[:, 6:].contiguous().view(torch.int64)], dim=1)
    marks = [[KIND_SEND - 1 - kind, kind, 0, 0, *numbers, 0, int(begin), int(begin), int(end)]
             for kind, *numbers, begin, end in recorder.marks]  # fmt: skip
    rows = torch.cat([rows, torch.tensor(marks, dtype=torch.int64).view(-1, 10)])
    return RankRecord(rows, int((counts - kept).sum()), stamps)
