"""From the times of decode to what a person reads: rows, a table, CSV, JSON and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from comet.measure.timing import Timing

from lib.report import IN_JSON_ONLY, Panels, Row, cell, draw_lines, names_of, table_of

PREFIX = "transformers_"
OWN = ("own", "own_nccl", "own_fused")
CENTRIC = "triton"
OTHERS = ("torch", "fused", "local", "local_nccl", *OWN)
BELOW_TABLE = ("no_graph", "failures")


def figures(
    timings: Mapping[str, Timing],
    accuracy: Mapping[str, tuple[float, float]],
    num_steps: int,
    touched_bytes: float,
    roofline_tbs: float,
) -> Row:
    """One row: microseconds of a step per variant, rate and fraction of the roofline of our fastest, and errors.

    Example: comet 0.4 ms for 4 steps that touch 2e8 bytes each, triton1 0.8 ms, roofline 4 TB/s: 100 us, 2 TB/s, 0.5 of
    the roofline, 2 x triton. With local 0.38 ms: added 5 us; with own 0.42 ms, too: own added 10 us.
    """
    times_us = {name: timing.median_ms * 1e3 / num_steps for name, timing in timings.items()}
    centric = min((name for name in times_us if name.startswith(CENTRIC)), key=times_us.__getitem__, default="")
    library = [name for name in times_us if name.startswith(PREFIX)]
    ours = [name for name in times_us if name not in (*OTHERS, *library) and not name.startswith(CENTRIC)]
    best = min(ours, key=times_us.__getitem__, default="")
    shown = {"comet": "comet", "triton": centric} | {name: name for name in (*OTHERS, *library)}
    row: Row = {f"{name}_us": times_us.get(source) for name, source in shown.items()}
    local_us, best_us = row["local_us"], times_us.get(best)
    for added, over_ranks_us in (("added_us", row["comet_us"]), ("own_added_us", row["own_us"])):
        row[added] = None if over_ranks_us is None or local_us is None else over_ranks_us - local_us
    row |= {
        "best": best or None,
        "best_us": best_us,
        "mbytes": touched_bytes / 1e6,
        "tbs": None if best_us is None else touched_bytes / (best_us * 1e6),
        "of_roofline": None if best_us is None else touched_bytes / (best_us * 1e6) / roofline_tbs,
    }
    rivals = {"triton": centric, "torch": "torch", "fused": "fused", "transformers": ""}
    rivals["transformers"] = min(library, key=times_us.__getitem__, default="")
    for name, source in rivals.items():
        row[f"x_{name}"] = None if best_us is None or source not in times_us else times_us[source] / best_us
    for name, source in (("comet", "comet"), ("triton", centric), ("torch", "torch")):
        row[f"{name}_error"], row[f"{name}_cosine"] = accuracy.get(source, (None, None))
    quantiles = {name: asdict(timing) for name, timing in timings.items()}
    return row | {"times_us": times_us, "quantiles": quantiles, "accuracy": dict(accuracy)}


def variant_times(row: Row) -> dict[str, float]:
    """Microseconds of the variants of a row that have a column; of ``triton`` the fastest tile shape, no trials."""
    names = ["comet", CENTRIC, *OTHERS, *(name for name in row.get("times_us", {}) if name.startswith(PREFIX))]
    return {name: row[f"{name}_us"] for name in names if row.get(f"{name}_us") is not None}


def format_table(rows: Sequence[Row]) -> str:
    """One aligned line per row; below it what was launched without a graph or not measured."""
    shown = names_of(rows, (*IN_JSON_ONLY, *BELOW_TABLE))
    table = table_of(rows, shown, partial(cell, near_one=7))
    return "\n".join([table, *_remarks(rows)])


def draw(roofline_tbs: float, path: Path, rows: Sequence[Row]) -> None:
    """Microseconds of a step over tokens, and the time of reading the touched bytes; a panel for each model."""
    panels: Panels = {}
    for row in sorted((row for row in rows if variant_times(row)), key=lambda row: int(row["tokens"])):
        times = variant_times(row) | {"read roofline": row["mbytes"] / roofline_tbs}
        lines = panels.setdefault(_title(row), {})
        for name, time in times.items():
            lines.setdefault(name, []).append((row["tokens"], time))
    draw_lines(path, panels, x="tokens", y="us per step")


def _title(row: Row) -> str:
    split = "" if row["ep"] * row["tp"] == 1 else f", EP{row['ep']} x TP{row['tp']}"
    return f"{row['model']}, {row['weights']}{split}"


def _remarks(rows: Sequence[Row]) -> list[str]:
    """A line for each reason, with the points it holds for."""
    points: dict[str, list[str]] = {}
    for row in rows:
        for kind, words in (("no_graph", "without a graph"), ("failures", "not measured")):
            for name, reason in row.get(kind, {}).items():
                points.setdefault(f"{words}: {name}: {reason}", []).append(f"{_title(row)}, {row['tokens']}")
    return [f"{remark} (at {'; '.join(where)})" for remark, where in points.items()]
