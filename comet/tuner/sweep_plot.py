"""The picture of a sweep: time against communication blocks, one subplot per shape, one line per other setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from comet.tuner.layers import counted
from comet.tuner.sweep import Outcome, Point

MAX_COLUMNS = 3
SUBPLOT_INCHES = (5.0, 3.6)
DOTS_PER_INCH = 110
TOP_MARGIN = 1.1


def plot_sweep(results: Mapping[Point, Outcome], path: Path) -> None:
    """Draw all points that ran as a PNG; a shape without any keeps an empty subplot that says so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(point.shape for point in results))
    columns = min(len(shapes), MAX_COLUMNS)
    rows = math.ceil(len(shapes) / columns)
    size = (SUBPLOT_INCHES[0] * columns, SUBPLOT_INCHES[1] * rows)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(shapes) :]:
        axes.set_axis_off()
    for shape, axes in zip(shapes, grid, strict=False):
        lines = sweep_lines({point: item for point, item in results.items() if point.shape == shape})
        for (panels, phases, transport), line in lines.items():
            label = f"{counted(panels, 'panel')}, {counted(phases, 'phase')}, {transport}"
            axes.plot(*zip(*line, strict=True), "o-", markersize=4, label=label)
        axes.set(xlabel="communication blocks", ylabel="ms", title=shape.title)
        if lines:
            times = [ms for line in lines.values() for _, ms in line]
            axes.set_ylim(0, TOP_MARGIN * max(times))
            axes.set_xticks(sorted({blocks for line in lines.values() for blocks, _ in line}))
            axes.legend(fontsize="small")
        else:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "every setting failed", ha="center", transform=axes.transAxes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def sweep_lines(results: Mapping[Point, Outcome]) -> dict[tuple[int, int, str], list[tuple[int, float]]]:
    """Lines of one shape: (panels, phases, transport) -> (comm_blocks, ms) of the points that ran, ascending."""
    lines: dict[tuple[int, int, str], list[tuple[int, float]]] = {}
    for point, item in results.items():
        if item.ms is not None:
            knobs = point.knobs
            name = (knobs.num_panels, knobs.num_phases, knobs.transport)
            lines.setdefault(name, []).append((knobs.comm_blocks, item.ms))
    return {name: sorted(line) for name, line in lines.items()}
