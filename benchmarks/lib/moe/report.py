"""From times of the layer to what a person reads: what a point must do at least, a table, a picture, one line of JSON.

Letters: T tokens per rank, K, D, F, E; W = EP x TP ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.config import MoEConfig
from comet.layout import ExpertLayout

from lib.report import Panels, Row, cell, draw_lines, geometric_mean, table_of

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
    """Tokens that reach each rank, ``(W,)`` int64, each counted once per rank however many of its experts it goes to.

    Example: E=4, EP=2, TP=1, ids ``(T, K)`` ``[[0, 1], [1, 3], [2, -1]]``, -1 masks: tokens 0 and 1 reach rank 0,
    tokens 1 and 2 rank 1: ``[2, 2]``.
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


def figures(times_ms: Mapping[str, float], flops: int, link_num_bytes: int, link_roofline: float | None) -> Row:
    """What follows from the median times of a point; ``None`` where something was not measured.

    Example: comet 2 ms, plain 6, all_gather 5, gemm_comet 1.5, comm_comet 1, 3e9 operations of a rank, 1e6 bytes that
    the busiest one sends, roofline of a peer copy 100 GB/s: link 0.01 ms, 1.5 TFLOP/s, 0.5 GB/s, efficiency 0.75, 0.5
    of the communication hidden, 3 x plain, 2.5 x the best baseline.
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
    """One aligned line per row, then the geometric means of ``MEANS`` over the rows that have them."""
    return table_of([*rows, {"model": "geometric mean"} | geometric_means(rows)], COLUMNS, cell)


def geometric_means(rows: Sequence[Row]) -> Row:
    """Of each of ``MEANS``, over the rows that have it."""
    return {name: geometric_mean(row.get(name) for row in rows) for name in MEANS}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Milliseconds of every way to run the layer over the number of tokens, a panel for each model and routing."""
    panels: Panels = {}
    for row in rows:
        lines = panels.setdefault(f"{row['model']} {row.get('routing', '')}", {})
        for name in (*FP8_VARIANTS, *VARIANTS):
            if row.get(f"{name}_ms"):
                lines.setdefault(name, []).append((row["tokens"], row[f"{name}_ms"]))
    draw_lines(path, panels, x="tokens", y="ms")
