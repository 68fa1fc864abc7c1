"""The whole MoE layer, forward or forward + backward: Comet against what everybody has.

    torchrun --nproc-per-node 4 benchmarks/bench.py moe --models mixtral_8x7b,deepseek_v3 --tokens 2048,8192 --ep 4 \\
        --routing uniform,zipf,hot
    torchrun --nproc-per-node 2 benchmarks/bench.py moe --device cpu --models tiny --tokens 64 --ep 2

A variant or point that fails is recorded as such and the run goes on. ``bench_moe.json`` has each row as soon as it is
measured; that of an earlier run becomes ``bench_moe.1.json``, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from comet.comm.handshake import gather
from comet.config import MoEConfig
from comet.graphed.moe import TrainingGraphs
from comet.layer.nodes import NodesPath
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.moe import MoE
from comet.reference.plain import make_exchange, plain_experts
from comet.tuner.timing import Variant, capture

from baselines.layer import (
    all_gather_experts,
    exchange_alone,
    gemm_variants,
    network_alone,
    node_alone,
    pipelined_experts,
    split_evenly,
)
from lib.moe import BASELINES, FP8_VARIANTS, ROTATE, Inputs, Layer, LayerSuite, make_inputs, relative_error
from lib.ranks import Ranks, release
from lib.report import Row, geometric_mean, over
from lib.shapes import ROUTINGS, model
from lib.suite import Checked, Point, option

BACKWARD_FLOPS = 2  # gradients of the rows and of the weights, each as much as the forward GEMMs
BACKWARD_BYTES = 1  # output gradients are dispatched, input gradients combined
KEYS = ("model", "tokens", "ep", "tp", "routing", "direction")
VARIANTS = (
    "comet", "comet_graph", "plain", "pipelined", "all_gather", "gemm_comet", "gemm_torch", "comm_comet", "network",
    "in_node",
)  # fmt: skip
FIGURES = (
    "link_ms", "tflops", "link_gbs", "efficiency", "hidden", "network_hidden", "x_plain", "x_best", "error",
    "error_fp8", "setting",
)  # fmt: skip
COLUMNS = (*KEYS, *(f"{name}_ms" for name in (*VARIANTS, *FP8_VARIANTS)), *FIGURES)
MEANS = ("efficiency", "x_plain", "x_best")

LayerVariant = Callable[[int], tuple[Tensor, ...]]
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens (T, D), ids and weights (T, K) to (T, D)
FORWARD_ONLY = {"pipelined": pipelined_experts, "all_gather": all_gather_experts}


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
    rows = gather(process_group, rows_to_ranks(top_k_ids, layout).tolist())
    traffic = torch.tensor(rows).fill_diagonal_(0)  # [source, destination]
    sent = (
        traffic.sum(1) * row_bytes  # dispatch: this rank's tokens
        + traffic.sum(0) * row_bytes  # combine: partial sums of the rows it received
    )
    return int(sent.max()) * (1 + BACKWARD_BYTES * backward)


def figures(times_ms: Mapping[str, float], flops: int, link_num_bytes: int, link_roofline: float | None) -> Row:
    """Figures that follow from the median times of a point; ``None`` where something was not measured.

    Example: comet 2 ms, plain 6, all_gather 5, gemm_comet 1.5, comm_comet 1, network 2, in_node 1.5, 3e9 operations of
    a rank, 1e6 bytes that the busiest one sends, roofline of a peer copy 100 GB/s: link 0.01 ms, 1.5 TFLOP/s, 0.5 GB/s,
    efficiency 0.75, 0.5 of the communication and 0.75 of the network hidden, 3 x plain, 2.5 x the best baseline.
    """
    layer = min((times_ms[name] for name in ("comet", "comet_graph") if name in times_ms), default=None)
    gemm = times_ms.get("gemm_comet", times_ms.get("gemm_torch"))
    link_ms = over(link_num_bytes / 1e6, link_roofline)
    best = min((times_ms[name] for name in BASELINES if name in times_ms), default=None)
    return {
        "link_ms": link_ms,
        "tflops": over(flops / 1e9, layer),
        "link_gbs": over(link_num_bytes / 1e6, layer),
        "efficiency": over(gemm and max(gemm, link_ms or 0.0), layer),
        "hidden": hidden(layer, gemm, times_ms.get("comm_comet")),
        "network_hidden": hidden(layer, times_ms.get("in_node"), times_ms.get("network")),
        "x_plain": over(times_ms.get("plain"), layer),
        "x_best": over(best, layer),
    }


def hidden(whole: float | None, rest: float | None, part: float | None) -> float | None:
    """The share of a part's own time that the whole does not take beyond the rest."""
    return None if whole is None or rest is None or part is None else 1 - (whole - rest) / part


class GraphedExperts:
    """The layer for a given routing, replayed forward and backward as ``comet.GraphedMoE`` replays a whole layer.

    Each call copies its inputs into the graphs' memory and the results out of it, as a user's call does.
    """

    def __init__(self, moe: MoE) -> None:
        self.moe = moe
        self.module = _Routed(moe)
        self.stream = torch.cuda.Stream() if moe.group.device.type == "cuda" else None
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.replay: TrainingGraphs | None = None

    def __call__(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``(T, D)``, as ``MoE.routed_experts``; all calls have the same number of tokens."""
        inputs = (tokens, ids, weights)
        if self.replay is None:
            output = self.moe.routed_experts(*inputs)  # compiles the kernels
            torch.autograd.grad(output, (tokens, weights, *self.moe.expert_parameters()), torch.zeros_like(output))
            self.replay = TrainingGraphs(self.module, self.moe, inputs, self.stream, self.graphs)
        return self.replay(*inputs)[0]


class _Routed(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor]:
        return (self.moe.routed_experts(tokens, ids, weights),)


def layer_variants(layer: Layer, inputs: Sequence[Inputs], asked: Run, ranks: Ranks) -> dict[str, LayerVariant]:
    """Every asked-for way to run the layer that exists here; the plain path first, to compare with."""
    layout, group, moe = layer.layout, ranks.process_group, layer.moe
    weights = (layer.w1, layer.w2, *(layer.biases or ()))
    w1, w2, *given = (weight.detach().requires_grad_(asked.backward) for weight in weights)
    biases = Biases(*given) if given else None
    baselines: dict[str, Experts] = {
        "plain": lambda *routed: plain_experts(
            RoutedTokens(*routed), w1, w2, layout, group, layer.config.activation, biases
        )
    }
    if not asked.backward:
        baselines |= {name: partial(run, layer, group) for name, run in FORWARD_ONLY.items()}
    experts = {name: run for name, run in baselines.items() if name in asked.variants}
    if moe is not None:
        experts["comet"] = moe.routed_experts
        if "comet_graph" in asked.variants and ranks.device.type == "cuda":
            experts["comet_graph"] = GraphedExperts(moe) if asked.backward else moe.routed_experts
    if layer.fp8 is not None and moe is not None and not asked.backward:
        assert isinstance(moe.experts, SymmetricPath | NodesPath)
        in_fp8, fp8_w1, fp8_w2 = moe.experts.fp8, *layer.fp8
        names = [name for name in FP8_VARIANTS if ranks.device.type == "cuda" or not name.endswith("graph")]
        run_fp8: Experts = lambda *routed: in_fp8(RoutedTokens(*routed), fp8_w1, fp8_w2, biases)  # noqa: E731
        experts |= {name: run_fp8 for name in names if name in asked.variants}
    found: dict[str, LayerVariant] = {}
    for name, run in experts.items():
        parameters = moe.expert_parameters() if moe is not None and name.startswith("comet") else (w1, w2, *given)
        found[name] = partial(_trained, run, parameters, inputs) if asked.backward else partial(_run, run, inputs)
    path = None if moe is None or asked.backward else moe.experts
    if "comm_comet" in asked.variants and isinstance(path, SymmetricPath):
        found["comm_comet"] = exchange_alone(path, inputs, layer.w2)
    if isinstance(path, NodesPath):
        if "network" in asked.variants:
            found["network"] = network_alone(path, inputs)
        if "in_node" in asked.variants:
            found["in_node"] = node_alone(path, inputs, w1, w2, biases)
    return found


def floor_variants(
    layer: Layer, inputs: Sequence[Inputs], routing: str, asked: Run, ranks: Ranks
) -> dict[str, Variant]:
    """The GEMMs alone: on balanced rows for uniform routing, else on the rows that reach this rank."""
    if not {"gemm_comet", "gemm_torch"} & set(asked.variants):
        return {}
    if routing == "uniform":
        counts = split_evenly(balanced_rows(len(inputs[0].ids), layer.layout), layer.layout.experts_local)
    else:
        counts = make_exchange(inputs[0].ids, layer.layout, ranks.process_group).expert_counts
    variants = gemm_variants(layer.w1, layer.w2, counts)
    return {name: variant for name, variant in variants.items() if name in asked.variants}


def _run(experts: Experts, inputs: Sequence[Inputs], index: int) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (experts(*inputs[index][:3]),)


def _trained(
    experts: Experts, parameters: tuple[Tensor, ...], inputs: Sequence[Inputs], index: int
) -> tuple[Tensor, ...]:
    tokens, ids, weights, grad = inputs[index]
    leaves = [tokens.detach().requires_grad_(), weights.detach().requires_grad_()]
    output = experts(leaves[0], ids, leaves[1])
    return output, *map(local, torch.autograd.grad(output, (*leaves, *parameters), grad))


# Replayed as a CUDA graph, without what its launches cost the host; with a backward pass ``GraphedExperts``.
GRAPHS = ("comet_graph", "comet_fp8_graph", "comm_comet")
# Largest deviation from the plain path, relative to its root mean square, that rounding can explain; block FP8 makes
# 0.06 of these on average, and among millions of numbers six times that.
TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 1e-3}
FP8_TOLERANCE = 1.0


def measure_point(layer: Layer, num_tokens: int, routing: str, asked: Run, ranks: Ranks, facts: Row) -> Row:
    inputs = make_inputs(layer.config, num_tokens, routing, ranks)
    checked = Checked(ranks, layer.pool, layer.failures)
    errors = check_variants(layer, inputs, asked, checked)
    floors = checked.value("gemm", partial(floor_variants, layer, inputs, routing, asked, ranks))
    checked.variants |= floors or {}
    timings = checked.time(rounds=asked.rounds, rotate=ROTATE)
    times_ms = {name: timing.median_ms for name, timing in timings.items()}
    if asked.backward:
        for name in times_ms.keys() & {"gemm_comet", "gemm_torch"}:
            times_ms[name] *= 3  # the gradients of rows and weights are one forward each
    row_bytes = layer.config.hidden_size * ranks.dtype.itemsize
    traffic = link_bytes(inputs[0].ids, layer.layout, row_bytes, ranks.process_group, backward=asked.backward)
    flops = layer_flops(layer.config, layer.layout, num_tokens, backward=asked.backward)
    if layer.pool is not None:  # kernels give up waiting without an error, and their times mean nothing
        layer.pool.check()  # may raise on one rank alone: no collective may follow
    row = checked.row(timings) | {f"{name}_ms": value for name, value in times_ms.items()}
    row |= {"error": errors.get("comet"), "error_fp8": errors.get("comet_fp8"), "setting": describe_setting(layer)}
    return row | figures(times_ms, flops, traffic, facts["link_roofline_gbs"])


def check_variants(layer: Layer, inputs: Sequence[Inputs], asked: Run, checked: Checked) -> dict[str, float]:
    """Let the variants that run and agree with the plain path be timed; the errors of all (collective)."""
    errors: dict[str, float] = {}
    wanted: tuple[Tensor, ...] = ()
    ranks = checked.ranks

    def judge(name: str, output: tuple[Tensor, ...]) -> str:
        nonlocal wanted
        wanted = wanted or (output if name == "plain" else ())
        if not (wanted and output):  # communication alone has no output
            return ""
        errors[name] = ranks.worst(relative_error(output, wanted))
        within = errors[name] <= (FP8_TOLERANCE if name in FP8_VARIANTS else TOLERANCE[ranks.dtype])
        return "" if within else f"differs from the plain path by {errors[name]:.3g} root mean squares"

    for name, variant in layer_variants(layer, inputs, asked, ranks).items():
        form: LayerVariant | None = variant
        if checked.value(name, partial(variant, 0), partial(judge, name)) is None:
            continue
        if name in GRAPHS and ranks.device.type == "cuda" and not asked.backward:
            form = checked.value(name, partial(capture, variant, rotate=ROTATE))
            if form is None or checked.value(name, partial(form, 0), partial(judge, name)) is None:
                continue
        assert form is not None
        checked.variants[name] = form
    return errors


def describe_setting(layer: Layer) -> str:
    """Comm blocks and panels that took effect, as ``0/4``; another path by its name."""
    if layer.moe is None:
        return ""
    path = layer.moe.experts
    if not isinstance(path, SymmetricPath):
        return type(path).__name__
    settings = path.backend.settings
    return f"{settings.comm_blocks}/{settings.num_panels}"


@dataclass(frozen=True, kw_only=True)
class Run(LayerSuite):
    COLUMNS = COLUMNS

    models: tuple[str, ...] = ("mixtral_8x7b",)
    tokens: tuple[int, ...] = (2048, 8192)
    routing: tuple[str, ...] = option(ROUTINGS[:1], of=ROUTINGS)
    backward: bool = option(default=False, text="forward + backward")
    variants: tuple[str, ...] = option(VARIANTS, of=(*VARIANTS, *FP8_VARIANTS))
    rounds: int = 20
    out: Path | None = Path("outputs/bench_moe")

    def check(self) -> None:
        """Models and split are known; what does not fit the ranks is a failure of theirs."""
        _ = [*map(model, self.models), self.split]

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        for name in self.models:
            with self.open_layer(model(name), max(self.tokens), ranks) as layer:
                # One for all points: at EP2 x TP2 on four GPUs a second group of the process hung.
                for num_tokens, routing in product(self.tokens, self.routing):
                    keys = {"model": name, "tokens": num_tokens, "ep": self.ep, "tp": self.tp, "routing": routing}
                    keys["direction"] = "forward+backward" if self.backward else "forward"
                    yield Point(
                        keys, partial(measure_point, layer, num_tokens, routing, self, ranks, facts), layer.pool
                    )
            del layer
            release(ranks)

    def summary(self, rows: Sequence[Row]) -> Row:
        return {"geometric_mean": {name: geometric_mean(row.get(name) for row in rows) for name in MEANS}}
