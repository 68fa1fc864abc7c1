"""Picture of a ``TileSchedule``: which compute block does what, and what the comm role can do beside it.

It shows the order, not a measurement: every work item takes one step, items go round-robin over the compute blocks, and
moving a part takes as many steps as computing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comet.analysis import TileAxis
from comet.config import require
from comet.errors import UnavailableError
from comet.schedule import TileSchedule


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the picture.

    Args:
        lane: Compute block, or -1 for the comm lane.
        start: First step.
        steps: Length in steps.
        part: Phase or panel, whichever the schedule is cut into.
    """

    lane: int
    start: int
    steps: int
    part: int


COMM_LANE = -1


def compute_spans(schedule: TileSchedule, tile_starts: Sequence[int], num_blocks: int) -> list[Span]:
    """One span per work item, in order of execution.

    Args:
        schedule: The schedule.
        tile_starts: First tile of each phase and last the number of tiles, as in ``Plan.tile_starts``.
        num_blocks: Compute blocks the items go round-robin over.

    Returns:
        Spans of one step; cut along rows, ``part`` is the phase of the tile, else the column panel.

    Raises:
        ValueError: If ``tile_starts`` does not ascend from 0 over the schedule's phases, or ``num_blocks`` < 1.

    Example:
        2 columns, 2 panels, 3 tiles, 2 blocks: blocks 0 1 0 1 0 1 do panels 0 0 0 1 1 1 in steps 0 0 1 1 2 2.
    """
    starts = list(tile_starts)
    require(num_blocks >= 1, f"num_blocks={num_blocks} must be at least 1")
    require(
        len(starts) == schedule.num_phases + 1 and starts[0] == 0 and starts == sorted(starts),
        f"tile_starts={starts} must ascend from 0 and have num_phases + 1 = {schedule.num_phases + 1} entries",
    )
    spans = []
    for item, (tile, _, panel) in enumerate(schedule.items(starts[-1])):
        phase = sum(tile >= start for start in starts[1:-1])
        part = phase if schedule.tile_axis is TileAxis.ROWS else panel
        spans.append(Span(item % num_blocks, item // num_blocks, 1, part))
    return spans


def comm_spans(schedule: TileSchedule, compute: Sequence[Span]) -> list[Span]:
    """Spans of the comm lane: remote phases arrive one after the other; a panel leaves once its last item is done.

    Phase 0 is local and does not travel.
    """
    spans: list[Span] = []
    by_rows = schedule.tile_axis is TileAxis.ROWS
    free = 0
    for part in range(1 if by_rows else 0, schedule.num_phases if by_rows else schedule.num_panels):
        mine = [span.start for span in compute if span.part == part]
        if not mine:
            continue
        start = free if by_rows else max(free, max(mine) + 1)
        spans.append(Span(COMM_LANE, start, max(mine) - min(mine) + 1, part))
        free = start + spans[-1].steps
    return spans


def draw_schedule(schedule: TileSchedule, tile_starts: Sequence[int], path: Path, *, num_blocks: int = 8) -> None:
    """Write a PNG with one lane per compute block and one for communication, coloured by phase or panel.

    Args:
        schedule: The schedule.
        tile_starts: As for ``compute_spans``.
        path: File to write.
        num_blocks: Compute blocks to draw.

    Raises:
        ValueError: As ``compute_spans``.
        UnavailableError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError("draw_schedule needs matplotlib: pip install matplotlib") from error
    compute = compute_spans(schedule, tile_starts, num_blocks)
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
    figure = Figure(figsize=(10, 1 + 0.3 * num_blocks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for span in [*compute, *comm_spans(schedule, compute)]:
        colour = colours[span.part % len(colours)]
        axes.broken_barh([(span.start, span.steps)], (span.lane - 0.4, 0.8), facecolors=colour, edgecolor="white")
    noun = "phase" if schedule.tile_axis is TileAxis.ROWS else "panel"
    for part in sorted({span.part for span in compute}):
        axes.scatter([], [], marker="s", color=colours[part % len(colours)], label=f"{noun} {part}")
    axes.set(xlabel="step", title=f"cut along {schedule.axis}: order of work, not a measurement")
    axes.set_yticks(range(COMM_LANE, num_blocks), ["comm", *(f"block {block}" for block in range(num_blocks))])
    axes.invert_yaxis()
    if compute:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, format="png", dpi=100)
