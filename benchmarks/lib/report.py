"""What all suites write: an aligned table, CSV, one line of JSON; what an earlier run left is kept."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comet.utils.tables import aligned

Row = dict[str, Any]
Panels = dict[str, dict[str, list[tuple[float, float]]]]  # points of every line of every panel, by their titles
SUFFIXES = (".csv", ".png", ".json")  # of one run's files


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; of 2 and 8 it is 4; of none it is ``None``."""
    present = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, present)) / len(present)) if present else None


def cell(value: Any, near_one: int | None = None) -> str:
    """A value as it stands in a table; ``near_one`` digits tell similarities just below 1 apart.

    Example: ``None``, 0.99871, 0.12345 and 123.4: ``-``, ``0.999`` (with 4 digits ``0.9987``), ``0.123`` and ``123``.
    """
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if near_one is not None and 0.99 < value < 1:
        return f"{value:.{near_one}f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table_of(rows: Sequence[Row], columns: Sequence[str], to_cell: Callable[[Any], str]) -> str:
    """One aligned line per row, names first; columns in which nothing stands are left out."""
    shown = [name for name in columns if any(row.get(name) not in (None, "") for row in rows)]
    return "\n".join(aligned([shown, *([to_cell(row.get(name)) for name in shown] for row in rows)]))


def describe(failures: Mapping[str, str]) -> str:
    """One field of a table: ``comet: RuntimeError: ...; gemm: ...``."""
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())


def write_json(folder: Path | None, name: str, found: Row) -> str:
    """One line of JSON, which becomes the file ``name.json`` of a folder, if there is to be one."""
    line = json.dumps(found)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(line + "\n")
    return line


def write_csv(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """All rows so far in the place of those that were there."""
    path.unlink(missing_ok=True)
    append_csv(path, rows, columns)


def append_csv(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Add rows now, so that an interruption loses nothing; the first ones write the header.

    Example: ``{"model": "tiny", "quantiles": {}}`` with columns ``("model", "tokens")`` is the line ``tiny,``.
    """
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def set_aside(folder: Path, stem: str) -> list[tuple[Path, Path]]:
    """Rename what an earlier run left, so that its rows are not taken for this run's; old and new names.

    Example: ``bench_moe.csv`` becomes ``bench_moe.1.csv``, that of the next run ``bench_moe.2.csv``.
    """
    earlier = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").exists()]
    number = 1
    while any((folder / f"{stem}.{number}{suffix}").exists() for suffix in SUFFIXES):
        number += 1
    renamed = [(path, path.with_suffix(f".{number}{path.suffix}")) for path in earlier]
    for old, new in renamed:
        old.rename(new)
    return renamed


def draw_lines(path: Path, panels: Panels, *, x: str, y: str) -> None:
    """A picture of panels side by side, each with its title and its lines, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5 * max(1, len(panels)), 4.5), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels.items(), strict=False
    ):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
        axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
