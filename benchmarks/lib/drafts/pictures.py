"""Pictures of a run of the suite speculation: what drafts are worth, what caches hit, and what the routing is like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comet.kernels.experts.tables import POLICIES

from lib.report import Row
from lib.routing.predictors import predictor_rows, sharing_rows
from lib.routing.traces import BEST, Trace, replayed_hits, reuse_by_distance

LONGEST_DISTANCE = 32  # tokens back
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def routing_facts(trace: Trace, budgets: Sequence[float] = ()) -> Row:
    """What the pictures of a trace show: hits by budget and policy, reuse by distance, and weights by rank.

    Args:
        trace: Recorded.
        budgets: Shares of the experts at which predictors and ways to share slots are compared.
    """
    top_k, experts = trace.ids.shape[2], trace.num_experts
    slots, few = (
        sorted({max(int(share * experts), top_k) for share in shares if share < 1}) for shares in (SHARES, budgets)
    )
    exactly, within = reuse_by_distance(trace, min(LONGEST_DISTANCE, len(trace.ids) // 2))
    return {
        "tokens": len(trace.ids),
        "slots": slots,
        "experts": experts,
        "hits": {policy: replayed_hits(trace, slots, policy) for policy in (*POLICIES, BEST)},
        "reused_by_distance": exactly,
        "reused_within": within,
        "guessed_by_layer": guessed_by_layer(trace),
        "predictors": predictor_rows(trace, few),
        "sharing": sharing_rows(trace, few),
        "weight_by_rank": trace.weights.sort(dim=2, descending=True).values.mean(0).tolist(),
        "experts_of_80_percent": torch.bincount(trace.ids.flatten(), minlength=experts).sort(descending=True)
        .values.cumsum(0).lt(0.8 * trace.ids.numel()).sum().item() + 1,
    }  # fmt: skip


def guessed_by_layer(trace: Trace) -> list[float] | None:
    """Share of each layer's experts, from the second on, that its router names by the tokens of the layer before."""
    if trace.guessed is None:
        return None
    return (trace.guessed[..., None] == trace.ids[..., None, :]).any(-1).float().mean((0, 2))[1:].tolist()


def draw_all(folder: Path, quality: Row, top_r: Sequence[Row], facts: Row, rows: Sequence[Row]) -> list[Path]:
    """Write the pictures; returns where they are.

    Args:
        folder: Exists.
        quality: Of ``measure_drafts``.
        top_r: Of ``measure_top_r``.
        facts: Of ``routing_facts``.
        rows: Of the table: hits that were measured.
    """
    pictures: dict[str, Callable[[Any], None]] = {
        "acceptance": partial(_acceptance, quality),
        "adaptive": partial(_adaptive, quality["modes"]),
        "top_r": partial(_top_r, top_r),
        "hits": partial(_hits, facts, rows),
        "weights": partial(_weights, facts["weight_by_rank"]),
        "locality": partial(_locality, facts),
    }
    return [_draw(folder / f"{name}.png", plot) for name, plot in pictures.items()]


def _draw(path: Path, plot: Callable[[Any], None]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    plot(figure)
    for axes in figure.axes:
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def _acceptance(quality: Row, figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for tolerance in dict.fromkeys(row["tolerance"] for row in quality["by_position"]):
        mine = [row for row in quality["by_position"] if row["tolerance"] == tolerance and "acceptance" in row]
        name = "conservative" if tolerance is None else f"adaptive, T = {tolerance}"
        left.plot([row["position"] for row in mine], [row["acceptance"] for row in mine], "o-", label=name)
    left.set(xlabel="place of the draft in its round", ylabel="accepted, of drafts that are made", ylim=(0, 1))
    known = [row for row in quality["by_confidence"] if row["acceptance"] is not None]
    width = 1 / len(quality["by_confidence"])
    right.bar([row["from"] for row in known], [row["acceptance"] for row in known], 0.9 * width, align="edge")
    drafts = sum(row["drafts"] for row in known)
    shares = [row["drafts"] / drafts for row in known]
    right.step([row["from"] for row in known], shares, where="post", color="black", label="share of drafts")
    right.set(xlabel="confidence q of the first draft; conservative")


def _adaptive(modes: Sequence[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    rows = [row for row in modes if row["tolerance"] is not None]
    tolerances = [row["tolerance"] for row in rows]
    errors = [row["standard_error"] for row in rows]
    left.errorbar(tolerances, [row["nll_added"] for row in rows], errors, fmt="o-")
    left.set(xlabel="T", ylabel="held-out loss added, nats a token")
    for name in ("agreement", "acceptance"):
        right.plot(tolerances, [row[name] for row in rows], "o-", label=name)
    right.axhline(next(row["acceptance"] for row in modes if row["tolerance"] is None), linestyle=":", color="gray",
                  label="acceptance, conservative")  # fmt: skip
    right.set(xlabel="T", ylabel="share", ylim=(0, 1))


def _top_r(rows: Sequence[Row], figure: Any) -> None:
    axes = figure.subplots()
    for name, label in (("nll_draft", "the newest token only"), ("nll_all", "all tokens")):
        axes.plot([row["r"] for row in rows], [row[name] for row in rows], "o-", label=f"r experts for {label}")
    axes.set(xlabel="r, experts of a token", ylabel="held-out loss, nats a token")


def _hits(facts: Row, rows: Sequence[Row], figure: Any) -> None:
    axes = figure.subplots()
    shares = [slots / facts["experts"] for slots in facts["slots"]]
    for policy, hits in facts["hits"].items():
        axes.plot(shares, hits, "k:" if policy == BEST else "-", label=f"{policy}, replayed")
    measured = [row for row in rows if row.get("hits") is not None and row["variant"].startswith("cache")]
    for name in dict.fromkeys(row["variant"] for row in measured):
        mine = [row for row in measured if row["variant"] == name]
        axes.plot(
            [row["slots"] / facts["experts"] for row in mine],
            [row["hits"] for row in mine],
            "o",
            label=f"{name}, measured",
        )
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8, label="uniform routing")
    axes.set(xlabel="budget, share of the experts", ylabel="hits", xlim=(0, 1), ylim=(0, 1))


def _weights(weights: Sequence[Sequence[float]], figure: Any) -> None:
    axes = figure.subplots()
    ranks = range(1, len(weights[0]) + 1)
    for layer, mine in enumerate(weights):
        axes.plot(ranks, mine, "o-", label=f"layer {layer}")
    axes.set(xlabel="rank of the expert", ylabel="mean routing weight", ylim=(0, None))


def _locality(facts: Row, figure: Any) -> None:
    axes = figure.subplots()
    distances = range(1, len(facts["reused_within"]) + 1)
    axes.plot(distances, facts["reused_within"], label="used by any of the last d tokens")
    axes.plot(distances, facts["reused_by_distance"], label="used by the token d before")
    top_k = len(facts["weight_by_rank"][0])
    uniform = [1 - (1 - top_k / facts["experts"]) ** distance for distance in distances]
    axes.plot(distances, uniform, color="gray", linewidth=0.8, label="any of the last d, uniform routing")
    axes.set(xlabel="d, tokens back", ylabel="share of a token's experts", ylim=(0, 1))
