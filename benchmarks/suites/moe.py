"""The whole MoE layer, forward or forward + backward: Comet against what everybody has.

    torchrun --nproc-per-node 4 benchmarks/bench.py moe --models mixtral_8x7b,deepseek_v3 --tokens 2048,8192 --ep 4 \\
        --routing uniform,zipf,hot
    torchrun --nproc-per-node 2 benchmarks/bench.py moe --device cpu --models tiny --tokens 64 --ep 2

A variant or point that fails is recorded as such and the run goes on. ``bench_moe.csv`` has each row as soon as it is
measured; that of an earlier run becomes ``bench_moe.1.csv``, and so on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from comet.config import ParallelConfig, require
from comet.launch.distributed import started_by_torchrun
from comet.layer.routed_experts import SymmetricPath
from comet.measure.timing import Variant, capture

from lib.arguments import require_known, suite_parser, words
from lib.moe.layer import ROTATE, Inputs, Layer, Settings, make_inputs, open_layer, relative_error
from lib.moe.report import (
    COLUMNS,
    FP8_VARIANTS,
    VARIANTS,
    draw,
    figures,
    format_table,
    geometric_means,
    layer_flops,
    link_bytes,
)
from lib.ranks import Ranks, attempt
from lib.report import Row, append_csv, describe, set_aside, write_json
from lib.shapes import ROUTINGS, model, parse_overlap
from lib.start import gather_facts, release, start_ranks, tell
from lib.timing import time_by_protocol
from variants.layer import LayerVariant, floor_variants, layer_variants

# Replayed as a CUDA graph, without what its launches cost the host; with a backward pass ``GraphedExperts``.
GRAPHS = ("comet_graph", "comet_fp8_graph", "comm_comet")
# Largest deviation from the plain path, relative to its root mean square, that rounding can explain; block FP8 makes
# 0.06 of these on average, and among millions of numbers six times that.
TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 1e-3}
FP8_TOLERANCE = 1.0


def measure_point(
    layer: Layer,
    num_tokens: int,
    routing: str,
    settings: Settings,
    ranks: Ranks,
    rounds: int,
    link_roofline: float | None,
) -> Row:
    """Check and time all variants at one number of tokens and one routing; collective."""
    inputs = make_inputs(layer.config, num_tokens, routing, ranks)
    failures = dict(layer.failures)
    variants, errors = checked_variants(layer, inputs, settings, ranks, failures)
    floors, failure = attempt(partial(floor_variants, layer, inputs, routing, settings, ranks), ranks, layer.pool)
    timed: dict[str, Variant] = {**variants, **(floors or {})}
    if failure:
        failures["gemm"] = failure
    start = time.perf_counter()
    timings = time_by_protocol(timed, ranks, rounds=rounds, rotate=ROTATE)
    timed_seconds = time.perf_counter() - start
    times_ms = {name: timing.median_ms for name, timing in timings.items()}
    if settings.backward:
        for name in times_ms.keys() & {"gemm_comet", "gemm_torch"}:
            times_ms[name] *= 3  # the gradients of rows and weights are one forward each
    row_bytes = layer.config.hidden_size * ranks.dtype.itemsize
    traffic = link_bytes(inputs.ids[0], layer.layout, row_bytes, ranks.process_group, backward=settings.backward)
    flops = layer_flops(layer.config, layer.layout, num_tokens, backward=settings.backward)
    row: Row = {f"{name}_ms": value for name, value in times_ms.items()}
    row |= {"error": errors.get("comet"), "error_fp8": errors.get("comet_fp8"), "setting": describe_setting(layer)}
    row |= {"failures": describe(failures), "quantiles": {name: asdict(timing) for name, timing in timings.items()}}
    return row | figures(times_ms, flops, traffic, link_roofline) | {"timed_seconds": timed_seconds}


def checked_variants(
    layer: Layer, inputs: Inputs, settings: Settings, ranks: Ranks, failures: dict[str, str]
) -> tuple[dict[str, LayerVariant], dict[str, float]]:
    """The variants that run and agree with the plain path, and their errors; the others go to ``failures``."""
    usable: dict[str, LayerVariant] = {}
    errors: dict[str, float] = {}
    wanted: tuple[Tensor, ...] = ()

    def check(name: str, variant: LayerVariant) -> str:
        nonlocal wanted
        output, failure = attempt(partial(variant, 0), ranks, layer.pool)
        if output is None:
            return failure
        wanted = wanted or (output if name == "plain" else ())
        if not (wanted and output):  # communication alone has no output
            return ""
        errors[name] = ranks.worst(relative_error(output, wanted))
        within = errors[name] <= (FP8_TOLERANCE if name in FP8_VARIANTS else TOLERANCE[ranks.dtype])
        return "" if within else f"differs from the plain path by {errors[name]:.3g} root mean squares"

    for name, variant in layer_variants(layer, inputs, settings, ranks).items():
        failure = check(name, variant)
        if not failure and name in GRAPHS and ranks.device.type == "cuda" and not settings.backward:
            recorded, failure = attempt(partial(capture, variant, rotate=ROTATE), ranks, layer.pool)
            if recorded is not None:
                variant, failure = recorded, check(name, recorded)
        if failure:
            failures[name] = failure
        else:
            usable[name] = variant
    return usable, errors


def describe_setting(layer: Layer) -> str:
    """Comm blocks and panels that took effect, as ``0/4``; another path by its name."""
    if layer.moe is None:
        return ""
    path = layer.moe.experts
    if not isinstance(path, SymmetricPath):
        return type(path).__name__
    settings = path.backend.settings
    return f"{settings.comm_blocks}/{settings.layer1.num_panels}"


def run(arguments: argparse.Namespace, settings: Settings, ranks: Ranks) -> None:
    """Measure all points, model by model; rank 0 reports."""
    table = arguments.out / "bench_moe.csv"
    if ranks.rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for old, new in set_aside(arguments.out, "bench_moe"):
            tell(ranks, f"{old.name} of an earlier run is now {new.name}")
    start = time.perf_counter()
    facts = gather_facts(ranks)
    link = facts["link_roofline_gbs"]
    tell(ranks, f"rooflines: done in {time.perf_counter() - start:.1f} s")
    rows: list[Row] = []
    for name in arguments.models:
        with open_layer(model(name), settings, ranks) as layer:
            # One for all points: at EP2 x TP2 on four GPUs a group made anew for each hung.
            for num_tokens, routing in product(arguments.tokens, arguments.routing):
                keys = {"model": name, "tokens": num_tokens, "ep": arguments.ep, "tp": arguments.tp, "routing": routing}
                keys["direction"] = "forward+backward" if settings.backward else "forward"
                rows.append(keys | measure(layer, num_tokens, routing, settings, ranks, arguments.rounds, link))
                if ranks.rank == 0:
                    append_csv(table, [rows[-1]], COLUMNS)
                tell(ranks, progress(rows[-1]))
        del layer
        release(ranks)
    if ranks.rank == 0:
        print(format_table(rows))
        draw(arguments.out / "bench_moe.png", rows)
        found = {"facts": facts, "geometric_mean": geometric_means(rows), "rows": rows}
        print(write_json(arguments.out, "bench_moe", found), flush=True)


def measure(
    layer: Layer,
    num_tokens: int,
    routing: str,
    settings: Settings,
    ranks: Ranks,
    rounds: int,
    link_roofline: float | None,
) -> Row:
    """The figures of one point; from what goes wrong in it the ranks recover, and it touches no other (collective)."""
    start = time.perf_counter()
    point = partial(measure_point, layer, num_tokens, routing, settings, ranks, rounds, link_roofline)
    measured, failure = attempt(point, ranks, layer.pool)
    if layer.pool is not None:  # kernels give up waiting without an error, and their times mean nothing
        failure = attempt(layer.pool.check, ranks, layer.pool)[1] or failure
    row = {"failures": f"point: {failure}"} if measured is None or failure else measured
    release(ranks)
    return row | {"seconds": time.perf_counter() - start}


def progress(row: Row) -> str:
    """What is said of a finished row: ``tiny 64 zipf: done in 3.1 s, 0.9 s of it timed rounds``, and what failed."""
    timed = f", {row['timed_seconds']:.1f} s of it timed rounds" if "timed_seconds" in row else ""
    failures = f"; {row['failures']}" if row["failures"] else ""
    return f"{row['model']} {row['tokens']} {row['routing']}: done in {row['seconds']:.1f} s{timed}{failures}"


def parse(command_line: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; raises ``ValueError`` for an unknown model, routing or variant."""
    known = (*VARIANTS, *FP8_VARIANTS)
    parser = suite_parser(
        "moe", __doc__, models=("mixtral_8x7b",), tokens=[2048, 8192], ep=1, tp=1, path="auto", rounds=20,
        device="auto", out=Path("outputs/bench_moe"),
    )  # fmt: skip
    parser.add_argument("--routing", type=words, default=ROUTINGS[:1], help=f"of {','.join(ROUTINGS)}")
    parser.add_argument("--backward", action="store_true", help="forward + backward")
    parser.add_argument("--overlap", default="", help="settings of Comet, such as comm_blocks=16,num_panels=4")
    parser.add_argument("--variants", type=words, default=VARIANTS, help=f"of {','.join(known)}")
    arguments = parser.parse_args(command_line)
    for name in arguments.models:
        model(name)
    require_known("routing", arguments.routing, ROUTINGS)
    require_known("variants", arguments.variants, known)
    return arguments, Settings(
        parallel=ParallelConfig(ep=arguments.ep, tp=arguments.tp),
        max_tokens=max(arguments.tokens),
        backward=arguments.backward,
        path=arguments.path,
        overlap=parse_overlap(arguments.overlap, "overlap") if arguments.overlap else None,
        variants=arguments.variants,
    )


def main(command_line: Sequence[str]) -> None:
    """One rank of the benchmark."""
    arguments, settings = parse(command_line)
    require(started_by_torchrun(), "start the benchmark with torchrun: it sets rank and world size")
    start_ranks(settings.parallel, arguments.device, partial(run, arguments, settings))
