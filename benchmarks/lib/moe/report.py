"""From times of the layer to what a person reads: what a point must do at least, a table, a picture, one line of JSON.

Letters: T tokens per rank, K, D, F, E; W = EP x TP ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.config import MoEConfig
from comet.layout import ExpertLayout

from lib.report import Row, cell, geometric_mean, table_of

BACKWARD_FLOPS = 2  # gradients of the rows and of the weights, each as much as the forward GEMMs
BACKWARD_BYTES = 1  # output gradients are dispatched, input gradients combined


def balanced_rows(num_tokens: int, layout: ExpertLayout) -> int:
    """Routed rows of one rank if all experts are alike; T=6, K=2, EP=2, TP=2 (W=4): 4 * 6 * 2 / 2 = 24."""
    return layout.world_size * num_tokens * layout.top_k // layout.ep


def layer_flops(config: MoEConfig, layout: ExpertLayout, num_tokens: int, *, backward: bool) -> int:
    """Floating-point operations of one rank's GEMMs; D=4, F=8, 3 rows, TP=1: 384 + 192 = 576, with backward 1728."""
    rows, width = balanced_rows(num_tokens, layout), config.ffn_size // layout.tp
    forward = (
        2 * rows * config.hidden_size * 2 * width  # gate and up
        + 2 * rows * width * config.hidden_size  # down
    )
    return forward * (1 + BACKWARD_FLOPS * backward)


def rows_to_ranks(top_k_ids: Tensor, layout: ExpertLayout) -> Tensor:
    """Tokens that reach each rank, each counted once per rank however many of its experts it goes to.

    Example: E=4, EP=2, TP=1, ids ``[[0, 1], [1, 3], [2, -1]]``: tokens 0 and 1 reach rank 0, tokens 1 and 2 rank 1:
    ``[2, 2]``.

    Args:
        top_k_ids: ``(T, K)`` int32, -1 masks.
        layout: The experts over the ranks.

    Returns:
        ``(W,)`` int64.
    """
    shards = torch.where(top_k_ids < 0, layout.ep, top_k_ids // layout.experts_local).long()
    reached = torch.zeros(top_k_ids.shape[0], layout.ep + 1, dtype=torch.int64, device=top_k_ids.device)
    reached.scatter_(1, shards, 1)
    return reached[:, : layout.ep].sum(0).repeat_interleave(layout.tp)


def link_bytes(
    top_k_ids: Tensor, layout: ExpertLayout, row_bytes: int, process_group: ProcessGroup | None, *, backward: bool
) -> int:
    """Bytes the busiest rank must send over its link, rank-deduplicated (as many arrive); collective."""
    mine = rows_to_ranks(top_k_ids, layout)
    rows = [torch.empty_like(mine) for _ in range(layout.world_size)]
    if layout.world_size > 1:
        dist.all_gather(rows, mine, group=process_group)
    else:
        rows = [mine]
    traffic = torch.stack(rows).fill_diagonal_(0)  # [source, destination]
    sent = (
        traffic.sum(1) * row_bytes  # dispatch: this rank's tokens
        + traffic.sum(0) * row_bytes  # combine: partial sums of the rows it received
    )
    return int(sent.max()) * (1 + BACKWARD_BYTES * backward)


KEYS = ("model", "tokens", "ep", "tp", "routing", "direction")
VARIANTS = ("comet", "comet_graph", "plain", "pipelined", "all_gather", "gemm_comet", "gemm_torch", "comm_comet")
FP8_VARIANTS = ("comet_fp8", "comet_fp8_graph")
BASELINES = ("plain", "pipelined", "all_gather")
FIGURES = (
    "link_ms", "tflops", "link_gbs", "efficiency", "hidden", "x_plain", "x_best", "error", "error_fp8", "setting"
)  # fmt: skip
COLUMNS = (*KEYS, *(f"{name}_ms" for name in (*VARIANTS, *FP8_VARIANTS)), *FIGURES, "failures")
MEANS = ("efficiency", "x_plain", "x_best")
PANEL_INCHES, LEGEND_INCHES, LEAST_INCHES = (3.2, 2.5), 1.3, 6.0


def figures(times_ms: Mapping[str, float], flops: int, link_num_bytes: int, link_roofline: float | None) -> Row:
    """What follows from the times of a point; ``None`` where something was not measured.

    Example: comet 2 ms, plain 6, all_gather 5, gemm_comet 1.5, comm_comet 1, 3e9 operations, 1e6 bytes, roofline 100
    GB/s: link 0.01 ms, 1.5 TFLOP/s, 0.5 GB/s, efficiency 0.75, 0.5 of the communication hidden, 3 x plain, 2.5 x the
    best baseline.

    Args:
        times_ms: Median of each variant that ran.
        flops: Operations of one rank.
        link_num_bytes: Deduplicated bytes the busiest rank sends.
        link_roofline: GB/s of a peer copy, or ``None``.

    Returns:
        All of ``FIGURES`` but the errors and ``setting``.
    """
    layer = min((times_ms[name] for name in ("comet", "comet_graph") if name in times_ms), default=None)
    gemm = times_ms.get("gemm_comet", times_ms.get("gemm_torch"))
    link_ms = link_num_bytes / (link_roofline * 1e6) if link_roofline else None
    best = min((times_ms[name] for name in BASELINES if name in times_ms), default=None)
    plain, comm = times_ms.get("plain"), times_ms.get("comm_comet")
    return {
        "link_ms": link_ms,
        "tflops": None if layer is None else flops / (layer * 1e9),
        "link_gbs": None if layer is None else link_num_bytes / (layer * 1e6),
        "efficiency": None if layer is None or gemm is None else max(gemm, link_ms or 0.0) / layer,
        "hidden": None if layer is None or gemm is None or comm is None else 1 - (layer - gemm) / comm,
        "x_plain": None if layer is None or plain is None else plain / layer,
        "x_best": None if layer is None or best is None else best / layer,
    }


def format_table(rows: Sequence[Row]) -> str:
    """One aligned line per row, then the geometric means of each routing, where there are several, and of all."""
    means = [{"routing": routing} | of for routing, of in means_by_routing(rows).items()]
    lines = [*rows, *({"model": "geometric mean"} | of for of in (*means, geometric_means(rows)))]
    return table_of(lines, COLUMNS, cell)


def geometric_means(rows: Sequence[Row]) -> Row:
    """Of each of ``MEANS``, over the rows that have it."""
    return {name: geometric_mean(row.get(name) for row in rows) for name in MEANS}


def means_by_routing(rows: Sequence[Row]) -> dict[str, Row]:
    """Geometric means of each routing; nothing where there is only one."""
    routings = list(dict.fromkeys(row["routing"] for row in rows if "routing" in row))
    if len(routings) < 2:
        return {}
    return {routing: geometric_means([row for row in rows if row.get("routing") == routing]) for routing in routings}


def summary(rows: Sequence[Row]) -> Row:
    """How Comet fares against the best baseline of every point.

    Example: ``x_best`` 1.5, 0.9 and, where Comet failed, none: 3 points, 2 compared, 1 slower; ``least`` is the second
    row's ``x_best`` and what tells its point from others.

    Returns:
        ``points``, ``compared``, ``slower``, and ``least``, which is ``None`` if none was compared.
    """
    compared = [row for row in rows if row.get("x_best") is not None]
    least = min(compared, key=lambda row: row["x_best"], default=None)
    return {
        "points": len(rows),
        "compared": len(compared),
        "slower": sum(row["x_best"] < 1 for row in compared),
        "least": None if least is None else {name: least.get(name) for name in ("x_best", *KEYS)},
    }


def format_summary(rows: Sequence[Row]) -> str:
    """``summary`` in one line."""
    found = summary(rows)
    line = (
        f"Compared at {found['compared']} of {found['points']} points: Comet is slower than the best baseline at "
        f"{found['slower']}"
    )
    if found["least"] is None:
        return line
    least = found["least"]
    where = f"{least['model']}, {least['tokens']} tokens, ep={least['ep']} tp={least['tp']}, {least['routing']}"
    return f"{line}; least x_best {least['x_best']:.3f} ({where})"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Bars of every way to run the layer, relative to the plain path (lower is better); black: the GEMMs alone.

    A column of panels per model and a row of them per routing.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.get("plain_ms")]
    drawn = [name for name in (*FP8_VARIANTS, *VARIANTS[:5]) if any(row.get(f"{name}_ms") for row in rows)]
    models, routings = (list(dict.fromkeys(row.get(key, "") for row in rows)) or [""] for key in ("model", "routing"))
    width = max(len(models) * PANEL_INCHES[0], LEAST_INCHES)
    figure = Figure(figsize=(width, 0.6 + len(routings) * PANEL_INCHES[1]), layout="constrained")
    panels = figure.subplots(len(routings), len(models), squeeze=False, sharey=True)
    for line, routing in enumerate(routings):
        for column, model in enumerate(models):
            chosen = [row for row in rows if (row.get("model", ""), row.get("routing", "")) == (model, routing)]
            _draw_panel(panels[line][column], chosen, drawn)
            panels[line][column].set_title(f"{model} {routing}", fontsize=9)
        panels[line][0].set_ylabel("time / plain path")
    entries: dict[str, Any] = {}
    for panel in panels.flat:
        entries |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if entries:
        columns = min(len(entries), int(width / LEGEND_INCHES))
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_panel(axes: Any, rows: Sequence[Row], drawn: Sequence[str]) -> None:
    width = 0.8 / max(1, len(drawn))
    for offset, name in enumerate(drawn):
        heights = [(row.get(f"{name}_ms") or 0.0) / row["plain_ms"] for row in rows]
        axes.bar([place + offset * width for place in range(len(rows))], heights, width, label=name)
    for place, row in enumerate(rows):
        gemm = row.get("gemm_comet_ms") or row.get("gemm_torch_ms")
        if gemm:
            ends = place - width / 2, place + 0.8 - width / 2
            axes.hlines(gemm / row["plain_ms"], *ends, colors="black", label="GEMMs alone")
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))])
    axes.set_xticklabels([f"{row['tokens']} tokens" for row in rows], fontsize=8)


def whole_run(rows: Sequence[Row], facts: Row) -> Row:
    """Facts about the machine, the summary, and all rows with their quantiles."""
    means = {"geometric_mean": geometric_means(rows), "geometric_mean_by_routing": means_by_routing(rows)}
    return {"facts": facts, "summary": summary(rows), **means, "rows": list(rows)}
