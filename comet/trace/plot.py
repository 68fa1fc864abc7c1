"""The timeline as a picture: for each rank its blocks by activity over time, one lane per block, and the shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comet.errors import UnavailableError
from comet.trace.events import WAITS, WORKS, Launch, Span

# Told apart by colour-blind readers, too; waits are the reds.
COLOURS = {
    "dispatch": "#e69f00",
    "layer 0 GEMM": "#2b6cb0",
    "layer 1 GEMM": "#7fb7e6",
    "reduce and send": "#2a9d5c",
    "final sum": "#b48ad6",
    "wait for rows": "#e02020",
    "wait for panel": "#ff6f61",
    "wait for partial sums": "#8b0000",
}
IDLE = "#eceff1"
LIGHTER = 0.28  # of the way to white
BINS = 800
FEW_BLOCKS = 16  # lanes get numbers and gaps up to here
FEW_SPANS = 400  # spans of a rank get edges up to here
WIDTH_INCHES = 15.0
DOTS_PER_INCH = 130


def draw_timeline(spans: Sequence[Span], launches: Sequence[Launch], summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture as a PNG."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise UnavailableError("draw_timeline needs matplotlib: pip install matplotlib") from error
    ranks = range(summary["ranks"])
    num_blocks = max(launch.blocks for launch in launches)
    lane_inches = min(max(0.22 * num_blocks, 1.1), 2.6)
    height = len(ranks) * (lane_inches + 1.2) + 1.7
    layout = ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.06, hspace=0.02, wspace=0.01)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout=layout)
    grid = figure.add_gridspec(2 * len(ranks), 2, width_ratios=(11, 2.1), height_ratios=(0.9, lane_inches) * len(ranks))
    scale, unit = _unit(summary["span_ms"] * 1e6)
    origin = min(launch.begin for launch in launches)
    first = None
    for rank in ranks:
        mine = [span for span in spans if span.event.rank == rank]
        own = [launch for launch in launches if launch.rank == rank]
        crowd = figure.add_subplot(grid[2 * rank, 0], sharex=first)
        first = first or crowd
        lanes = figure.add_subplot(grid[2 * rank + 1, 0], sharex=first)
        _draw_crowd(crowd, mine, num_blocks, origin, scale)
        _draw_lanes(lanes, mine, own, num_blocks, origin, scale)
        _name_launches(crowd, own, origin, scale)
        _draw_shares(figure.add_subplot(grid[2 * rank : 2 * rank + 2, 1]), summary["per_rank"][rank])
        lanes.set_ylabel(f"rank {rank}\n", fontweight="bold", fontsize=12)
        lanes.yaxis.set_label_coords(-0.035, 0.5)
        lanes.tick_params(labelbottom=rank == ranks[-1])
    assert first is not None, "a timeline has at least one rank"
    first.set_xlim(0, max(launch.end - origin for launch in launches) * scale)
    lanes.set_xlabel(f"time, {unit}")
    _add_title_and_legend(figure, summary)
    figure.savefig(path)


def blocks_over_time(begins: Sequence[int], ends: Sequence[int], edges: NDArray[Any]) -> NDArray[Any]:
    """How many of the spans are open, on average, between consecutive ``edges``.

    Example: spans 0..10 and 5..10 between the edges 0, 5, 10: one, then two.
    """
    starts, stops = np.sort(np.asarray(begins, float)), np.sort(np.asarray(ends, float))

    def passed(times: NDArray[Any]) -> NDArray[Any]:
        """Time since each of ``times``, summed, at every edge."""
        count = np.searchsorted(times, edges)
        return count * edges - np.concatenate([[0.0], np.cumsum(times)])[count]

    covered: NDArray[Any] = np.diff(passed(starts) - passed(stops)) / np.diff(edges)
    return covered


def _unit(span_ns: float) -> tuple[float, str]:
    return (1e-3, "us") if span_ns < 5e6 else (1e-6, "ms")


def _duration(nanoseconds: float) -> str:
    """Three digits at least, and the unit; 1234567 is ``1235 us``."""
    scale, unit = _unit(nanoseconds)
    value = nanoseconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _draw_crowd(axes: Any, spans: Sequence[Span], num_blocks: int, origin: int, scale: float) -> None:
    end = max((span.end for span in spans), default=origin + 1)
    edges = np.linspace(origin, end, BINS + 1)
    curves = {}
    for name in (*WORKS, *WAITS):
        chosen = [span for span in spans if span.name == name]
        if chosen:
            curves[name] = blocks_over_time([span.begin for span in chosen], [span.end for span in chosen], edges)
    middles = (edges[:-1] + edges[1:]) / 2
    axes.set_facecolor(IDLE)
    if curves:
        colours = [COLOURS[name] for name in curves]
        axes.stackplot((middles - origin) * scale, *curves.values(), colors=colours, linewidth=0)
    axes.set_ylim(0, num_blocks)
    axes.set_yticks([0, num_blocks])
    axes.set_ylabel("blocks", fontsize=9)
    axes.yaxis.set_label_coords(-0.025, 0.5)
    axes.tick_params(labelbottom=False, bottom=False, labelsize=8)
    _hide_frame(axes)


def _draw_lanes(
    axes: Any, spans: Sequence[Span], launches: Sequence[Launch], num_blocks: int, origin: int, scale: float
) -> None:
    """One lane per block: odd phases and panels lighter, grey where a block of a launch has nothing to do."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    thickness = 0.84 if num_blocks <= FEW_BLOCKS else 1.0
    for launch in launches:
        begin, width = (launch.begin - origin) * scale, (launch.end - launch.begin) * scale
        axes.broken_barh([(begin, width)], (-0.5, launch.blocks), facecolors=IDLE, linewidth=0)
    edge = {"edgecolors": "white", "linewidths": 0.4} if len(spans) <= FEW_SPANS else {"linewidths": 0}
    for name in (*WORKS, *WAITS):
        chosen = [span for span in spans if span.name == name]
        if not chosen:
            continue
        times = (np.array([[span.begin, span.end] for span in chosen], dtype=float) - origin) * scale
        blocks = np.array([span.event.block for span in chosen], dtype=float)
        corners: Any = np.empty((len(chosen), 4, 2))
        corners[:, :, 0] = times[:, [0, 1, 1, 0]]
        corners[:, :2, 1] = (blocks - thickness / 2)[:, None]
        corners[:, 2:, 1] = (blocks + thickness / 2)[:, None]
        shades = np.array([to_rgb(COLOURS[name]), _lighter(to_rgb(COLOURS[name]))])
        parts = np.array([span.event.numbers[2] % 2 for span in chosen])
        axes.add_collection(PolyCollection(corners, facecolors=shades[parts], **edge))
    axes.set_ylim(num_blocks - 0.5, -0.5)
    ticks = range(num_blocks) if num_blocks <= FEW_BLOCKS else [0, num_blocks // 2, num_blocks - 1]
    axes.set_yticks(list(ticks))
    axes.tick_params(labelsize=8)
    _hide_frame(axes)


def _lighter(colour: tuple[float, float, float]) -> tuple[float, ...]:
    return tuple(channel + LIGHTER * (1 - channel) for channel in colour)


def _name_launches(axes: Any, launches: Sequence[Launch], origin: int, scale: float) -> None:
    """A bracket over each launch that is wide enough to carry its name."""
    total = max(launch.end for launch in launches) - origin if launches else 1
    for launch in launches:
        if launch.end - launch.begin < 0.06 * total:
            continue
        begin, end = (launch.begin - origin) * scale, (launch.end - origin) * scale
        style = {"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": "#555555", "linewidth": 0.9}
        top = {"xycoords": axes.get_xaxis_transform(), "annotation_clip": False}
        axes.annotate("", (begin, 1.1), (end, 1.1), arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, **top)
        text = f"layer {launch.layer}: {_duration(launch.end - launch.begin)}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(text, ((begin + end) / 2, 1.1), ha="center", va="center", fontsize=9, bbox=box, **top)


def _draw_shares(axes: Any, rank: Mapping[str, Any]) -> None:
    shares = {name: ms / rank["block_ms"] for name, ms in (rank["work_ms"] | rank["wait_ms"]).items()}
    shares["idle"] = rank["idle_share"]
    names = list(shares)
    colours = [COLOURS.get(name, "#c4ccd1") for name in names]
    axes.barh(range(len(names)), list(shares.values()), color=colours, height=0.78)
    longest = max(shares.values())
    for row, (name, share) in enumerate(shares.items()):
        axes.text(share + 0.02 * longest, row, f"{100 * share:.1f} %  {name}", va="center", fontsize=8)
    axes.set_xlim(0, 2.6 * longest)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(f"block time; waits {100 * rank['wait_share']:.1f} %", fontsize=9, loc="left")
    axes.set_axis_off()


def _add_title_and_legend(figure: Any, summary: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    block_ms = sum(rank["block_ms"] for rank in summary["per_rank"])
    totals: dict[str, float] = {}
    for rank in summary["per_rank"]:
        for name, ms in (rank["work_ms"] | rank["wait_ms"]).items():
            totals[name] = totals.get(name, 0.0) + ms / block_ms
    lost = f"   -   {summary['lost_events']} events lost" if summary["lost_events"] else ""
    figure.suptitle(
        f"{summary['ranks']} ranks, {summary['launches']} launches, {_duration(summary['span_ms'] * 1e6)}"
        f"   -   blocks wait {100 * summary['wait_share']:.1f} % of their time"
        f"   -   clocks agree within {_duration(summary['clock_error_us'] * 1e3)}{lost}",
        fontsize=13,
    )
    handles = [Patch(color=COLOURS[n], label=f"{n}  {100 * totals[n]:.1f} %") for n in COLOURS if n in totals]
    handles.append(Patch(facecolor=IDLE, edgecolor="#b0b8bd", label="idle  (lighter: odd phases and panels)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=10)


def _hide_frame(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
