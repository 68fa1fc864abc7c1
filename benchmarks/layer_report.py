"""From the times of one point to what a person reads: a row per split, a table and the best splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from accounting import geometric_mean
from bench_moe import describe
from layer_points import Split
from report import Row, table_of

from comet.tuner.timing import Timing

# A layer, its GEMM and its communication.
LAYERS = {"0": ("layer0", "gemm0", "dispatch"), "1": ("layer1", "gemm1", "combine")}
PLANS_IN_A_ROW = 8  # of one launch
KEYS = ("model", "tokens", "ep", "tp", "routing")
FIGURES = tuple(
    name
    for layer, pieces in LAYERS.items()
    for name in (*(f"{piece}_ms" for piece in pieces), f"efficiency{layer}", f"hidden{layer}")
)
COLUMNS = (*KEYS, *Split._fields, *FIGURES, "plan_ms", "best", "failures")
SPLIT = "comm/panels/phases/beside/transport"
TABLE = ("model", "tokens", SPLIT, *COLUMNS[len(KEYS) + len(Split._fields) :])


def overlap_figures(layer: float | None, gemm: float | None, comm: float | None) -> tuple[float | None, float | None]:
    """How well a layer overlaps its GEMM with its communication; ``None`` where a time is missing.

    Example: layer 5 ms, GEMM 4, communication 2: efficiency 4 / 5 = 0.8, and 1 - (5 - 4) / 2 = 0.5 is hidden.

    Args:
        layer: Milliseconds of the fused launch.
        gemm: Of its GEMM alone.
        comm: Of its communication alone.

    Returns:
        Efficiency, the longer of GEMM and communication over the layer, and the hidden part of the communication.
    """
    if layer is None or gemm is None or comm is None:
        return None, None
    return max(gemm, comm) / layer, 1 - (layer - gemm) / comm


def make_rows(splits: Iterable[Split], timings: Mapping[str, Timing], failures: Mapping[str, str]) -> list[Row]:
    """One row per split; the one with the shortest layer 0 + layer 1 is the best.

    Args:
        splits: What was tried.
        timings: Of the launches, under the names ``Split.launches`` gives them, and of the pieces.
        failures: Likewise, and of splits under their text.

    Returns:
        The rows, without ``KEYS``.
    """
    rows: list[Row] = []
    for split in splits:
        names = dict(zip(("layer0", "layer1"), split.launches(), strict=True))
        found = {piece: timings.get(names.get(piece, piece)) for piece in ("plan", *LAYERS["0"], *LAYERS["1"])}
        found["plan"] = found["plan"] and found["plan"].of_one(PLANS_IN_A_ROW)
        times = {piece: None if timing is None else timing.median_ms for piece, timing in found.items()}
        row: Row = (
            split._asdict()
            | {SPLIT: "/".join(map(str, split))}
            | {f"{piece}_ms": value for piece, value in times.items()}
        )
        for layer, pieces in LAYERS.items():
            row[f"efficiency{layer}"], row[f"hidden{layer}"] = overlap_figures(*(times[piece] for piece in pieces))
        mine = {
            name: why for name, why in failures.items() if "=" not in name or name in (str(split), *split.launches())
        }
        quantiles = {piece: asdict(timing) for piece, timing in found.items() if timing is not None}
        rows.append(row | {"best": "", "failures": describe(mine), "quantiles": quantiles})
    complete = [row for row in rows if row["layer0_ms"] is not None and row["layer1_ms"] is not None]
    if complete:
        min(complete, key=lambda row: row["layer0_ms"] + row["layer1_ms"])["best"] = "*"
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """One aligned line per row; columns in which nothing was measured are left out."""
    return table_of(rows, TABLE, _cell)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def summary(rows: Sequence[Row], facts: Row) -> Row:
    """Facts about the machine, the best split of every point, and the geometric means of their efficiencies."""
    best = [{name: _rounded(row.get(name)) for name in COLUMNS} for row in rows if row.get("best")]
    means = {name: geometric_mean(row[name] for row in best) for name in ("efficiency0", "efficiency1")}
    return {"facts": facts, "geometric_mean": means, "best": best}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
