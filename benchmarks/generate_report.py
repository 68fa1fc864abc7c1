"""From the times of whole decode steps to what a person reads: rows, a table, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import cell

from comet.tables import aligned
from comet.tuner.timing import Timing

Row = dict[str, Any]

COLUMNS = (
    "model", "layers", "ep", "tp", "batch", "context",
    "path", "ms", "tokens_per_s", "mbytes", "tbs", "of_roof", "cosine", "failure",
)  # fmt: skip
IN_JSON_ONLY = ("quantiles",)


def path_rows(
    timings: Mapping[str, Timing],
    cosines: Mapping[str, float],
    failures: Mapping[str, str],
    *,
    steps: int,
    batch: int,
    num_bytes: float,
) -> list[Row]:
    """One row per path, the fastest first, those that failed last.

    Example: comet 4 ms for 8 steps of 2 sequences that touch 1e9 bytes each: 0.5 ms per step, 4000 tokens/s, 2 TB/s.

    Args:
        timings: Of a call, by path.
        cosines: Of the logits, by path.
        failures: Why a path was not timed.
        steps: Of a call.
        batch: Sequences.
        num_bytes: What a step touches.

    Returns:
        Rows without what is the same for all.
    """
    found = []
    for name, timing in sorted(timings.items(), key=lambda item: item[1].median_ms):
        step = timing.of_one(steps)
        row: Row = {"path": name, "ms": step.median_ms, "tokens_per_s": batch * 1e3 / step.median_ms}
        row |= {"mbytes": num_bytes / 1e6, "tbs": num_bytes / (step.median_ms * 1e9)}
        row |= {"cosine": cosines.get(name), "failure": None}
        found.append(row | {"quantiles": asdict(step)})
    for name, failure in failures.items():
        found.append(
            dict.fromkeys(COLUMNS[COLUMNS.index("path") :])
            | {"path": name, "cosine": cosines.get(name), "failure": failure}
        )
    return found


def format_table(rows: Sequence[Row]) -> str:
    """One aligned line per row."""
    shown = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    return "\n".join(aligned([shown, *([cell(row.get(name), near_one=6) for name in shown] for row in rows)]))


def write(folder: Path, rows: Sequence[Row], facts: Row) -> str:
    """All rows so far, as ``bench_generate.csv`` and ``.json``; returns the line of JSON."""
    with (folder / "bench_generate.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    line = json.dumps({"facts": facts, "rows": list(rows)})
    (folder / "bench_generate.json").write_text(line + "\n")
    return line


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Tokens per second over the length of the context, a line for each path; dashed where a graph is replayed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["path"] for row in rows):
        points = [(row["context"], row["tokens_per_s"]) for row in rows if row["path"] == name and row["tokens_per_s"]]
        style = "o--" if name.endswith("_graph") else "o-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("positions of the context")
    axes.set_ylabel("tokens per second")
    axes.set_title("{model}, {layers} layers, EP{ep} x TP{tp}, batch {batch}".format(**rows[0]))
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
