"""The file and the table of a run: one line of JSON; files of an earlier run are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from comet.utils.shared_file import write_whole
from comet.utils.tables import aligned

Row = dict[str, Any]
IN_JSON_ONLY = ("times_us", "quantiles", "accuracy", "speculation", "seconds")  # columns of rows
REMARKS = ("no_graph", "failures")  # columns of reasons by variant, which stand below the table
SUFFIXES = (".png", ".json", ".pt")  # of one run's files


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; of 2 and 8 it is 4; of none it is ``None``."""
    present = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, present)) / len(present)) if present else None


def over(above: float | None, below: float | None) -> float | None:
    """``above / below``; ``None`` where one of them was not measured."""
    return None if above is None or below is None else above / below


def cell(value: Any) -> str:
    """A value as it stands in a table, with more digits just below 1, where similarities are.

    Example: ``None``, 0.9987123, 0.12345 and 123.4: ``-``, ``0.998712``, ``0.123`` and ``123``.
    """
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.6g}" if 0.99 < value < 1 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table_of(rows: Sequence[Row], keys: Sequence[str], columns: Sequence[str] = (), means: Row | None = None) -> str:
    """One aligned line per row, then the means; below them the reasons of remarks, with the points of each.

    Empty columns are left out. ``keys`` are the columns that name a point.
    """
    names = columns or dict.fromkeys(name for row in rows for name in row if name not in (*IN_JSON_ONLY, *REMARKS))
    shown = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    lines = [shown, *([cell(row.get(name)) for name in shown] for row in rows)]
    if means:
        lines.append(["geometric mean", *(cell(means.get(name)) for name in shown[1:])])
    points: dict[str, list[str]] = {}
    for row in rows:
        point = " ".join(str(row.get(name)) for name in keys)
        for remark in [f"{kind}: {name}: {why}" for kind in REMARKS for name, why in row.get(kind, {}).items()]:
            points.setdefault(remark, []).append(point)
    return "\n".join([*aligned(lines), *(f"{remark} (at {'; '.join(where)})" for remark, where in points.items())])


def write_json(folder: Path | None, name: str, found: Row) -> str:
    line = json.dumps(found)
    if folder is not None:
        write_whole(folder / f"{name}.json", line + "\n")
    return line


def set_aside(folder: Path, stem: str) -> list[tuple[Path, Path]]:
    """Make the folder, and rename what an earlier run left there; old and new names.

    Example: ``bench_moe.json`` becomes ``bench_moe.1.json``, that of the next run ``bench_moe.2.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").exists()]
    number = 1
    while any((folder / f"{stem}.{number}{suffix}").exists() for suffix in SUFFIXES):
        number += 1
    renamed = [(path, path.with_suffix(f".{number}{path.suffix}")) for path in earlier]
    for old, new in renamed:
        old.rename(new)
    return renamed
