"""The layer of a point, its inputs, what it must do at least, and its times as a table and a picture.

Letters: T tokens per rank, K, D, F, E; W = EP x TP ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.config import MoEConfig
from comet.layer.group import make_expert_group
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layer.workspace import Workspace
from comet.layout import Biases, ExpertLayout
from comet.moe import MoE
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_fp8

from lib.ranks import Ranks, attempt
from lib.report import Panels, Row, cell, draw_lines, geometric_mean, table_of
from lib.shapes import SEEDS_PER_RANK, draw_weights, make_routing, make_weights

BACKWARD_FLOPS = 2  # gradients of the rows and of the weights, each as much as the forward GEMMs
BACKWARD_BYTES = 1  # output gradients are dispatched, input gradients combined
KEYS = ("model", "tokens", "ep", "tp", "routing", "direction")
VARIANTS = ("comet", "comet_graph", "plain", "pipelined", "all_gather", "gemm_comet", "gemm_torch", "comm_comet")
FP8_VARIANTS = ("comet_fp8", "comet_fp8_graph")
BASELINES = ("plain", "pipelined", "all_gather")
FIGURES = (
    "link_ms", "tflops", "link_gbs", "efficiency", "hidden", "x_plain", "x_best", "error", "error_fp8", "setting"
)  # fmt: skip
COLUMNS = (*KEYS, *(f"{name}_ms" for name in (*VARIANTS, *FP8_VARIANTS)), *FIGURES, "failures")
MEANS = ("efficiency", "x_plain", "x_best")
ROTATE = 4  # input sets: with outputs and weights more than the 50 MB of L2 in every real shape
WEIGHT_SEED = 1_000_000  # far from those of tokens, which would be rows of the weights


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The layer under test: ``w1 (e, 2F/TP, D)``, ``w2 (e, D, F/TP)``, biases, and Comet's module over the same memory.

    ``moe`` is ``None`` where it could not be built, for the reason in ``failures``, or was not asked for; ``fp8``, the
    same weights in block FP8, where it was not, or D or F/TP is no multiple of 128, or the path is another than Comet's
    own.
    """

    config: MoEConfig
    layout: ExpertLayout
    w1: Tensor
    w2: Tensor
    biases: Biases | None = None
    moe: MoE | None = None
    fp8: tuple[FP8, FP8] | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def pool(self) -> Workspace | None:
        """What a failure may leave something in."""
        return None if self.moe is None else self.moe.group.workspace


class Inputs(NamedTuple):
    """One of ``ROTATE`` input sets."""

    tokens: Tensor  # (T, D)
    ids: Tensor  # (T, K)
    weights: Tensor  # (T, K)
    grad: Tensor  # (T, D), of the output


class DrawnInPlace(MoE):
    """Comet's layer with weights drawn on its device: on the host, billions of numbers take longer than a run."""

    def reset_parameters(self, seed: int) -> None:
        """Draw the experts; routing is given, so what the router holds does not matter."""
        draw_weights(*self.expert_weights(), self.config, WEIGHT_SEED + self.group.rank, biases_of(self))


def biases_of(moe: MoE) -> Biases | None:
    """This rank's part of them, sharing memory; without gradients."""
    if moe.b1 is None or moe.b2 is None:
        return None
    return Biases(local(moe.b1).detach().flatten(1), local(moe.b2).detach())


@contextmanager
def open_layer(config: MoEConfig, arguments: argparse.Namespace, max_tokens: int, ranks: Ranks) -> Iterator[Layer]:
    """Build the layer, release its memory at the end; a layer Comet cannot build still serves the baselines.

    Args:
        arguments: ``parallel``, ``variants``, and ``path`` and ``overlap`` of Comet's layer.
    """
    layout = ExpertLayout.create(config, arguments.parallel, ranks.rank)
    moe, failure = None, ""
    if any(name.startswith("comet") for name in arguments.variants):
        moe, failure = attempt(partial(_build_comet, config, arguments, max_tokens, ranks), ranks)
    if moe is None:
        w1, w2 = make_weights(config, layout, ranks.device, ranks.dtype, WEIGHT_SEED + ranks.rank)
        biases = Biases(w1.new_empty(w1.shape[:2]), w2.new_empty(w2.shape[:2])) if config.expert_bias else None
        draw_weights(w1, w2, config, WEIGHT_SEED + ranks.rank, biases)
        failures = {"comet": failure} if failure else {}
        yield Layer(config=config, layout=layout, w1=w1, w2=w2, biases=biases, failures=failures)
        return
    w1, w2 = moe.expert_weights()
    w1 = w1.flatten(1, 2)
    wanted = set(FP8_VARIANTS) & set(arguments.variants) and isinstance(moe.experts, SymmetricPath)
    in_blocks = w1.shape[2] % FP8_BLOCK == w2.shape[2] % FP8_BLOCK == 0
    fp8 = (quantize_experts(w1), quantize_experts(w2)) if wanted and in_blocks else None
    yield Layer(config=config, layout=layout, w1=w1, w2=w2, biases=biases_of(moe), moe=moe, fp8=fp8)
    moe.group.close()


def _build_comet(config: MoEConfig, arguments: argparse.Namespace, max_tokens: int, ranks: Ranks) -> MoE:
    group = make_expert_group(config, arguments.parallel, max_tokens=max_tokens, dtype=ranks.dtype, device=ranks.device)
    return DrawnInPlace(config, group, path=arguments.path, overlap=arguments.overlap, param_dtype=ranks.dtype)


def quantize_experts(weight: Tensor) -> FP8:
    """``(e, N, K)``, one expert after the other: a float32 copy of all of them may not fit."""
    quantised = [quantize_fp8(expert) for expert in weight]
    elements, scales = (torch.stack([getattr(one, name) for one in quantised]) for name in ("elements", "scales"))
    return FP8(elements=elements, scales=scales)


def make_inputs(config: MoEConfig, num_tokens: int, routing: str, ranks: Ranks) -> list[Inputs]:
    """Draw the input sets of this rank; ``routing`` as ``lib.shapes.make_routing`` has it."""
    sets = []
    for seed in range(ranks.rank * SEEDS_PER_RANK, ranks.rank * SEEDS_PER_RANK + ROTATE):
        generator = torch.Generator(ranks.device).manual_seed(seed)
        shape = num_tokens, config.hidden_size
        tokens, grad = (torch.randn(shape, generator=generator, device=ranks.device).to(ranks.dtype) for _ in range(2))
        sizes: dict[str, Any] = {"num_experts": config.num_experts, "top_k": config.top_k, "device": ranks.device}
        sets.append(Inputs(tokens, *make_routing(routing, num_tokens=num_tokens, seed=seed, **sizes), grad))
    return sets


def relative_error(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest deviation relative to the root mean square, over all tensors; ``[3, 5]`` against ``[3, 4]``: 0.283."""
    errors = [0.0]
    for one, other in zip(actual, wanted, strict=True):
        one, other = one.detach().flatten().float(), other.detach().flatten().float()
        scale = max(other.norm().item() / math.sqrt(max(other.numel(), 1)), 1e-30)
        deviation = (one - other).abs().max().item() if one.numel() else 0.0
        errors.append(deviation / scale if math.isfinite(deviation) else math.inf)
    return max(errors)
