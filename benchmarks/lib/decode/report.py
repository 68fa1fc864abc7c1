"""From the times of decode to what a person reads: rows, the crossover, a table, CSV, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from comet.measure.timing import Timing

from lib.report import Row, cell, describe, table_of, write_csv, write_json

PREFIX = "transformers_"
OWN = ("own", "own_nccl", "own_fused")
KEYS = ("model", "weights", "ep", "tp", "tokens")
CENTRIC = "triton"
OTHERS = ("torch", "fused", "local", "local_nccl", *OWN)
# ``local`` is a part of decode over ranks, not another way to do it; tokens of the ranks' own are another task.
NO_RIVAL = ("comet", "local", *OWN)
IN_JSON_ONLY = ("times_us", "quantiles", "accuracy")
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


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """For each model, kind of weights and split over ranks: where warp decode stops being the fastest.

    ``tokens`` is the smallest measured number at which another path is faster, ``path`` the fastest one there, and
    ``fused`` the smallest at which the fused path is; ``None`` where there is none among ``measured``, the numbers at
    which warp decode ran.

    Example: comet 10, 20, 40 us at 1, 8, 64 tokens, fused 30, 30, 30, torch 50, 15, 60: tokens 8, path torch, fused 64.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        key = tuple(row[name] for name in KEYS[:-1])
        entry = found.setdefault(
            key, dict(zip(KEYS, key, strict=False)) | {"tokens": None, "path": None, "fused": None, "measured": []}
        )
        comet_us = row.get("comet_us")
        if comet_us is None:
            continue
        entry["measured"].append(row["tokens"])
        rivals = {name: time_us for name, time_us in variant_times(row).items() if name not in NO_RIVAL}
        path = min(rivals, key=rivals.__getitem__, default=None)
        if entry["tokens"] is None and path is not None and rivals[path] < comet_us:
            entry["tokens"], entry["path"] = row["tokens"], path
        if entry["fused"] is None and rivals.get("fused", math.inf) < comet_us:
            entry["fused"] = row["tokens"]
    return list(found.values())


def variant_times(row: Row) -> dict[str, float]:
    """Microseconds of the variants of a row that have a column; of ``triton`` the fastest tile shape, no trials."""
    names = ["comet", CENTRIC, *OTHERS, *(name for name in row.get("times_us", {}) if name.startswith(PREFIX))]
    return {name: row[f"{name}_us"] for name in names if row.get(f"{name}_us") is not None}


def format_table(rows: Sequence[Row]) -> str:
    """One aligned line per row; below it what was launched without a graph or not measured, and the crossovers."""
    hidden = (*IN_JSON_ONLY, *BELOW_TABLE)
    table = table_of(rows, columns(rows, hidden), partial(cell, near_one=7))
    return "\n".join([table, *_remarks(rows), *map(_sentence, crossovers(rows))])


def write_results(folder: Path, rows: Sequence[Row], facts: Row) -> str:
    """CSV and JSON of all rows so far, so that an interruption loses nothing; returns the JSON, one line."""
    lines = [row | {name: describe(row[name]) for name in BELOW_TABLE if name in row} for row in rows]
    write_csv(folder / "bench_decode.csv", lines, columns(rows, IN_JSON_ONLY))
    return write_json(folder, "bench_decode", {"facts": facts, "crossover": crossovers(rows), "rows": list(rows)})


def columns(rows: Sequence[Row], hidden: Sequence[str]) -> list[str]:
    """Names of all rows in the order they come."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in hidden]


def draw(path: Path, rows: Sequence[Row], roofline_tbs: float) -> None:
    """Above: microseconds over tokens and the time of reading the touched bytes. Below: fraction of the roofline."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for row in sorted((row for row in rows if variant_times(row)), key=lambda row: int(row["tokens"])):
        panels.setdefault(_title(row), []).append(row)
    names = list(dict.fromkeys(name for row in rows for name in variant_times(row)))
    figure = Figure(figsize=(1 + 5 * max(1, len(panels)), 8), layout="constrained")
    for number, (title, of_panel) in enumerate(panels.items()):
        above = figure.add_subplot(2, len(panels), number + 1, xscale="log", yscale="log", title=title)
        below = figure.add_subplot(2, len(panels), len(panels) + number + 1, xscale="log", xlabel="tokens")
        tokens = [row["tokens"] for row in of_panel]
        for color, name in enumerate(names):
            times = [variant_times(row).get(name, math.nan) for row in of_panel]
            if all(map(math.isnan, times)):
                continue
            width = 2 if name == "comet" else 1
            line: Row = {"marker": "o", "markersize": 3, "linewidth": width, "label": name, "color": f"C{color}"}
            above.plot(tokens, times, **line)
            rates = [row["mbytes"] / time for row, time in zip(of_panel, times, strict=True)]
            below.plot(tokens, [rate / roofline_tbs for rate in rates], **line)
        roofline = [row["mbytes"] / roofline_tbs for row in of_panel]
        above.plot(tokens, roofline, color="black", linestyle=":", label="read roofline")
        for axes in (above, below):
            axes.set_xticks(tokens, [str(count) for count in tokens])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        above.set_ylabel("us per step")
        below.set_ylabel("fraction of the read roofline")
        below.set_ylim(0, 1.05)
        above.legend(fontsize=7)
    figure.savefig(path, dpi=120)


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


def _sentence(crossover: Row) -> str:
    measured = ", ".join(map(str, crossover["measured"])) or "no"
    if crossover["tokens"] is None:
        return f"crossover of {_title(crossover)}: none, warp decode is the fastest at {measured} tokens"
    fused = "at none" if crossover["fused"] is None else f"at {crossover['fused']}"
    return (
        f"crossover of {_title(crossover)}: {crossover['path']} is faster at {crossover['tokens']} tokens, "
        f"the fused path {fused}, of {measured}"
    )
