"""The timeline in the Trace Event format that ui.perfetto.dev and chrome://tracing open.

One process per rank, one thread per block. Work and waits are complete events (``X``) named by what they are, so that a
viewer gives each name one colour; what exactly was done is in their arguments. A block's change of role is an instant
(``i``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comet.trace_events import CONVERSION, WAITS, Event, Span

ROLES = {0: "joins the GEMM", 1: "joins reduce and send"}
# Reserved colour names of chrome://tracing; Perfetto picks its own colour for each name.
COLOURS = {
    "dispatch": "rail_load",
    "layer 0 GEMM": "thread_state_runnable",
    "layer 1 GEMM": "rail_response",
    "reduce and send": "good",
    "final sum": "rail_animation",
} | dict.fromkeys(WAITS, "terrible")


def chrome_trace(events: Sequence[Event], spans: Sequence[Span], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The whole file as an object for ``json.dump``.

    Args:
        events: All events; conversions become instants.
        spans: What each block did when.
        summary: Kept under ``otherData``.

    Returns:
        ``traceEvents`` (names first, then by time; ``ts`` and ``dur`` in microseconds from the first begin),
        ``displayTimeUnit`` and ``otherData``.
    """
    origin = min((event.begin for event in events), default=0)
    conversions = [event for event in events if event.work == CONVERSION]
    entries = [_complete(span, origin) for span in spans] + [_instant(event, origin) for event in conversions]
    return {
        "traceEvents": [*_names(events), *sorted(entries, key=lambda entry: entry["ts"])],
        "displayTimeUnit": "ns",
        "otherData": dict(summary),
    }


def _names(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Names of ranks and blocks, in the order in which a viewer shall list them."""
    names = []
    for rank in sorted({event.rank for event in events}):
        names.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for rank, block in sorted({(event.rank, event.block) for event in events}):
        place = {"pid": rank, "tid": block}
        names.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"block {block:3d}"}})
        names.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": block}})
    return names


def _complete(span: Span, origin: int) -> dict[str, Any]:
    event = span.event
    return {
        "ph": "X",
        "name": span.name,
        "cat": "wait" if span.name in WAITS else "work",
        "cname": COLOURS[span.name],
        "pid": event.rank,
        "tid": event.block,
        "ts": (span.begin - origin) / 1e3,
        "dur": (span.end - span.begin) / 1e3,
        "args": {**event.arguments, "sm": event.sm, "epoch": event.epoch},
    }


def _instant(event: Event, origin: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "name": ROLES[event.layer],
        "cat": CONVERSION,
        "s": "t",
        "pid": event.rank,
        "tid": event.block,
        "ts": (event.end - origin) / 1e3,
        "args": {"sm": event.sm, "epoch": event.epoch},
    }
