"""The timeline as a picture: for each rank what its blocks do over time, one lane per block, and their shares of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comet.errors import UnavailableError
from comet.trace.events import NETWORK, WAITS, WORKS, Launch, Span

# Colour-blind readers can distinguish these; waits are the reds.
COLOURS = {
    "dispatch": "#e69f00",
    "layer 0 GEMM": "#2b6cb0",
    "layer 1 GEMM": "#7fb7e6",
    "reduce and send": "#2a9d5c",
    "final sum": "#b48ad6",
    "wait for rows": "#e02020",
    "wait for panel": "#ff6f61",
    "wait for partial sums": "#8b0000",
    "send to nodes": "#8c6d31",
    "wait for nodes": "#d6278a",
}
IDLE = "#eceff1"
LIGHTER = 0.28  # share of white that is mixed in
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
    ranks, num_blocks = summary["ranks"], max(launch.blocks for launch in launches)
    lane_inches = min(max(0.22 * num_blocks, 1.1), 2.6)
    size = WIDTH_INCHES, ranks * (lane_inches + 0.5) + 1.7
    layout = ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.06)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout=layout)
    scale, unit = _unit(summary["span_ms"] * 1e6)
    origin = min([*(launch.begin for launch in launches), *(span.begin for span in spans)])
    rows = figure.subplots(ranks, 1, sharex=True, squeeze=False)[:, 0]
    for rank, lanes in enumerate(rows):
        own = [launch for launch in launches if launch.rank == rank]
        _draw_lanes(lanes, [span for span in spans if span.event.rank == rank], own, num_blocks, origin, scale)
        _name_launches(lanes, own, origin, scale)
        waits = 100 * summary["per_rank"][rank]["wait_share"]
        lanes.set_ylabel(f"rank {rank}\nwaits {waits:.1f} %", fontweight="bold")
    rows[0].set_xlim(0, (max([*(launch.end for launch in launches), *(span.end for span in spans)]) - origin) * scale)
    rows[-1].set_xlabel(f"time, {unit}")
    _add_title_and_legend(figure, summary)
    figure.savefig(path)


def _unit(span_ns: float) -> tuple[float, str]:
    return (1e-3, "us") if span_ns < 5e6 else (1e-6, "ms")


def _duration(nanoseconds: float) -> str:
    """Three digits at least, and the unit; 1234567 is ``1235 us``."""
    scale, unit = _unit(nanoseconds)
    value = nanoseconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


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
    for name in (*WORKS, *WAITS, *NETWORK.values()):
        chosen = [span for span in spans if span.name == name]
        if not chosen:
            continue
        times = (np.array([[span.begin, span.end] for span in chosen], dtype=float) - origin) * scale
        blocks = np.array([span.event.block for span in chosen], dtype=float)
        corners: Any = np.empty((len(chosen), 4, 2))
        corners[:, :, 0] = times[:, [0, 1, 1, 0]]
        corners[:, :2, 1] = (blocks - thickness / 2)[:, None]
        corners[:, 2:, 1] = (blocks + thickness / 2)[:, None]
        dark = np.array(to_rgb(COLOURS[name]))
        shades = np.array([dark, dark + LIGHTER * (1 - dark)])
        parts = np.array([span.event.numbers[2] % 2 for span in chosen])
        axes.add_collection(PolyCollection(corners, facecolors=shades[parts], **edge))
    lanes = sorted({span.event.block for span in spans} & NETWORK.keys())
    axes.set_ylim(num_blocks - 0.5, min(lanes, default=0) - 0.5)
    ticks = range(num_blocks) if num_blocks <= FEW_BLOCKS else [0, num_blocks // 2, num_blocks - 1]
    axes.set_yticks([*lanes, *ticks], [*(NETWORK[lane] for lane in lanes), *map(str, ticks)])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _name_launches(axes: Any, launches: Sequence[Launch], origin: int, scale: float) -> None:
    total = max(launch.end for launch in launches) - origin if launches else 1
    for launch in launches:
        if launch.end - launch.begin < 0.06 * total:
            continue
        begin, end = (launch.begin - origin) * scale, (launch.end - origin) * scale
        style = {"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": "#555555", "shrinkA": 0, "shrinkB": 0}
        top = {"xycoords": axes.get_xaxis_transform(), "annotation_clip": False}
        axes.annotate("", (begin, 1.05), (end, 1.05), arrowprops=style, **top)
        text = f"layer {launch.layer}: {_duration(launch.end - launch.begin)}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(text, ((begin + end) / 2, 1.05), ha="center", va="center", fontsize=9, bbox=box, **top)


def _add_title_and_legend(figure: Any, summary: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    totals: Counter[str] = Counter()
    for rank in summary["per_rank"]:
        totals.update(rank["work_ms"] | rank["wait_ms"])
    block_ms = sum(rank["block_ms"] for rank in summary["per_rank"])
    lost = f"   -   {summary['lost_events']} events lost" if summary["lost_events"] else ""
    figure.suptitle(
        f"{summary['ranks']} ranks, {summary['launches']} launches, {_duration(summary['span_ms'] * 1e6)}"
        f"   -   blocks wait {100 * summary['wait_share']:.1f} % of their time"
        f"   -   clocks agree within {_duration(summary['clock_error_us'] * 1e3)}{lost}",
        fontsize=13,
    )
    shares = {name: 100 * totals[name] / block_ms for name in COLOURS if name in totals}
    handles = [Patch(color=COLOURS[name], label=f"{name}  {share:.1f} %") for name, share in shares.items()]
    handles.append(Patch(facecolor=IDLE, edgecolor="#b0b8bd", label="idle  (lighter: odd phases and panels)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=10)
