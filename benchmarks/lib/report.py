"""What all suites write: an aligned table, CSV, one line of JSON; what an earlier run left is kept."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comet.utils.shared_file import write_whole
from comet.utils.tables import aligned

from lib.ranks import Ranks, tell

Row = dict[str, Any]
Panels = dict[str, dict[str, list[tuple[float, float]]]]  # points of every line of every panel, by their titles
IN_JSON_ONLY = ("times_us", "quantiles", "accuracy", "seconds")  # of rows
SUFFIXES = (".csv", ".png", ".json", ".pt")  # of one run's files


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
        write_whole(folder / f"{name}.json", line + "\n")
    return line


def write_csv(path: Path, rows: Sequence[Row], columns: Sequence[str] | None = None) -> None:
    """All rows so far in the place of those that were there.

    Example: ``{"model": "tiny", "quantiles": {}}`` with columns ``("model", "tokens")`` is the line ``tiny,``.

    Args:
        columns: What is written of a row; by default all that rows hold, but what only JSON has.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or names_of(rows), restval="", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {name: describe(value) for name, value in row.items() if isinstance(value, dict)})
    write_whole(path, text.getvalue())


def names_of(rows: Sequence[Row], hidden: Sequence[str] = IN_JSON_ONLY) -> list[str]:
    """Names of all rows in the order they come."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in hidden]


def report(
    name: str,
    rows: Iterable[Row],
    ranks: Ranks,
    out: Path | None,
    *,
    keys: Sequence[str],
    facts: Row,
    summary: Callable[[list[Row]], Row] = lambda _: {},
    columns: Sequence[str] | None = None,
    table: Callable[[list[Row]], str] | None = None,
    picture: Callable[[Path, list[Row]], None] | None = None,
) -> None:
    """Measure all rows; as each comes, rank 0 writes CSV and JSON of those so far, so that an interruption loses none.

    At the end, also that by an exception, it prints the table and, as the last line, the JSON, and draws the picture.

    Args:
        name: Of the files in ``out``; those of an earlier run are set aside.
        rows: Measured as they are asked for, on all ranks; each gets its ``seconds``.
        keys: Of a row, that name its point.
        facts: Of the run; with the ``summary`` of the rows, and the rows, the object that becomes JSON.
        columns: Of the CSV, as ``write_csv`` has them, and of the table where no ``table`` is given.
    """

    def found() -> Row:
        return facts | summary(so_far) | {"rows": so_far}

    files = out if ranks.rank == 0 else None
    if files is not None:
        files.mkdir(parents=True, exist_ok=True)
        for old, new in set_aside(files, name):
            tell(ranks, f"{old.name} of an earlier run is now {new.name}")
    so_far: list[Row] = []
    begun = time.perf_counter()
    try:
        for row in rows:
            so_far.append(row | {"seconds": time.perf_counter() - begun})
            begun = time.perf_counter()
            if files is not None:
                write_csv(files / f"{name}.csv", so_far, columns)
                write_json(files, name, found())
            failures = row.get("failures") or row.get("failure") or ""
            point = " ".join(str(row[key]) for key in keys if row.get(key) is not None)
            done = f"{point}: done in {so_far[-1]['seconds']:.1f} s"
            tell(ranks, "; ".join(filter(None, (done, describe(failures) if isinstance(failures, dict) else failures))))
    finally:
        if so_far and ranks.rank == 0:
            text = table(so_far) if table else table_of(so_far, columns or names_of(so_far), cell)
            print(text, write_json(None, name, found()), sep="\n", flush=True)
            if picture is not None and files is not None:
                picture(files / f"{name}.png", so_far)


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
