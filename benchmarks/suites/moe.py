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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from comet.config import ParallelConfig, require
from comet.launch.distributed import started_by_torchrun
from comet.layer.routed_experts import SymmetricPath
from comet.measure.timing import Variant

from lib.arguments import require_known, suite_parser, words
from lib.moe.fp8 import deviation
from lib.moe.layer import ROTATE, Inputs, Layer, Settings, find_fault, open_layer, relative_error
from lib.moe.report import (
    COLUMNS,
    FP8_VARIANTS,
    VARIANTS,
    draw,
    figures,
    format_summary,
    format_table,
    layer_flops,
    link_bytes,
    whole_run,
)
from lib.ranks import Ranks, attempt
from lib.report import Row, append_csv, describe, set_aside, write_json
from lib.shapes import ROUTINGS, model, parse_overlap
from lib.start import gather_facts, release, start_ranks, tell
from lib.timing import time_by_protocol
from variants.layer import Graph, Shared, floor_variants, layer_variants, record

# Replayed as a CUDA graph, without what its launches cost the host; with a backward pass ``GraphedExperts``.
GRAPHS = ("comet_graph", "comet_fp8_graph", "comm_comet")
# Largest deviation from the plain path, relative to its root mean square, that rounding can explain.
TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 1e-3}


def measure_point(
    layer: Layer,
    num_tokens: int,
    settings: Settings,
    ranks: Ranks,
    rounds: int,
    link_roofline: float | None,
    shared: Shared,
) -> Row:
    """Check and time all variants at one number of tokens and one routing; collective."""
    inputs = shared.draw(layer.config, num_tokens, settings, ranks)
    failures = dict(layer.failures)
    variants, errors = checked_variants(layer, inputs, settings, ranks, failures, shared.graphs)
    floors, failure = attempt(partial(floor_variants, layer, inputs, settings, ranks), ranks, layer.pool)
    variants |= floors or {}
    if failure:
        failures["gemm"] = failure
    start = time.perf_counter()
    timings = time_by_protocol(variants, ranks, rounds=rounds, rotate=ROTATE)
    timed_seconds = time.perf_counter() - start
    times_ms = {name: timing.median_ms for name, timing in timings.items()}
    if settings.backward:
        for name in times_ms.keys() & {"gemm_comet", "gemm_torch"}:
            times_ms[name] *= 3  # the gradients of rows and weights are one forward each
    row_bytes = layer.config.hidden_size * ranks.dtype.itemsize
    traffic = link_bytes(inputs.ids[0], layer.layout, row_bytes, ranks.process_group, backward=settings.backward)
    flops = layer_flops(layer.config, layer.layout, num_tokens, backward=settings.backward)
    return (
        {f"{name}_ms": value for name, value in times_ms.items()}
        | figures(times_ms, flops, traffic, link_roofline)
        | {"error": errors.get("comet"), "error_fp8": errors.get("comet_fp8")}
        | {"failures": describe(failures), "quantiles": {name: asdict(timing) for name, timing in timings.items()}}
        | {"setting": describe_setting(layer), "timed_seconds": timed_seconds}
    )


def checked_variants(
    layer: Layer,
    inputs: Inputs,
    settings: Settings,
    ranks: Ranks,
    failures: dict[str, str],
    graphs: dict[str, Graph] | None = None,
) -> tuple[dict[str, Variant], dict[str, float | None]]:
    """The variants that run and agree with the plain path, and their errors; the others go to ``failures``.

    ``graphs`` holds what was recorded with these inputs before, and gets what is recorded now.
    """
    graphs = {} if graphs is None else graphs
    usable: dict[str, Variant] = {}
    wanted: tuple[Tensor, ...] | None = None
    errors: dict[str, float | None] = {}

    def check(name: str, first: Callable[[], tuple[Tensor, ...]]) -> str:
        nonlocal wanted
        output, failure = attempt(first, ranks, layer.pool)
        if output is not None:
            wanted = output if wanted is None and name == "plain" else wanted
            noise = layer.fp8.noise if layer.fp8 is not None and name in FP8_VARIANTS else None
            failure, errors[name] = compare(output, wanted if output else None, ranks, noise)
        return failure

    for name, variant in layer_variants(layer, inputs, settings, ranks).items():
        graph, failure = graphs.get(name), ""
        if graph is None:
            failure = check(name, partial(variant, 0))
            if not failure and name in GRAPHS and ranks.device.type == "cuda" and not settings.backward:
                graph, failure = attempt(partial(record, variant, ROTATE), ranks, layer.pool)
        if graph is not None:
            graphs[name], failure = graph, check(name, graph.first)
        if failure:
            failures[name] = failure
        else:
            usable[name] = variant if graph is None else graph.replay
    return usable, errors


def compare(
    output: tuple[Tensor, ...], wanted: tuple[Tensor, ...] | None, ranks: Ranks, noise: float | None = None
) -> tuple[str, float | None]:
    """Why an output cannot be right ("" if it can), and its relative error; nothing without plain path.

    ``noise`` is what quantising makes of an output in block FP8 (``lib/moe/fp8.py``).
    """
    if wanted is None:
        return "", None
    if noise is not None:
        failure, rms = deviation(output[0], wanted[0], ranks.worst(noise))
        failed = ranks.worst(float(bool(failure)))
        return failure or ("differs on another rank" if failed else ""), ranks.worst(rms)
    error = ranks.worst(relative_error(output, wanted))
    if error <= TOLERANCE[ranks.dtype]:
        return "", error
    return f"differs from the plain path by {error:.3g} root mean squares", error


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
    tell(ranks, f"rooflines: done in {time.perf_counter() - start:.1f} s")
    rows: list[Row] = []
    for name in arguments.models:
        for row in measure_model(name, arguments, settings, ranks, facts["link_roofline_gbs"]):
            rows.append({"model": name} | row)
            if ranks.rank == 0:
                append_csv(table, [rows[-1]], COLUMNS)
            tell(ranks, progress(rows[-1]))
    if ranks.rank == 0:
        line = write_json(arguments.out, "bench_moe", whole_run(rows, facts))
        print(format_table(rows), format_summary(rows), sep="\n", flush=True)
        draw(arguments.out / "bench_moe.png", rows)
        print(line)


def measure_model(
    name: str, arguments: argparse.Namespace, settings: Settings, ranks: Ranks, link_roofline: float | None
) -> Iterator[Row]:
    """A row for each number of tokens and routing, without the model's name; collective.

    After a fault on the device the points that are left get a layer of their own.
    """
    points = deque(product(arguments.tokens, arguments.routing))
    while points:
        start = time.perf_counter()
        with open_layer(model(name), settings, ranks) as layer:
            tell(ranks, f"{name}: layer made in {time.perf_counter() - start:.1f} s")
            yield from measure_layer(layer, points, settings, ranks, arguments.rounds, link_roofline)
        del layer
        release(ranks)


def measure_layer(
    layer: Layer,
    points: deque[tuple[int, str]],
    settings: Settings,
    ranks: Ranks,
    rounds: int,
    link_roofline: float | None,
) -> Iterator[Row]:
    """Take points, of tokens and routing, and measure them until none is left or one meets a fault; collective."""
    keys = {
        "ep": settings.parallel.ep,
        "tp": settings.parallel.tp,
        "direction": "forward+backward" if settings.backward else "forward",
    }
    shared, drawn, fault = Shared(), points[0][0], ""
    while points and not fault:
        start = time.perf_counter()
        num_tokens, routing = points.popleft()
        if num_tokens != drawn:
            shared, drawn = Shared(), num_tokens
        routed = replace(settings, routing=routing)
        measured, failure = attempt(
            partial(measure_point, layer, num_tokens, routed, ranks, rounds, link_roofline, shared), ranks
        )
        if fault := find_fault(layer, ranks):
            measured, failure = None, fault
        point = keys | {"tokens": num_tokens, "routing": routing, "seconds": time.perf_counter() - start}
        yield point | (measured or {"failures": f"point: {failure}"})


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
        routing=arguments.routing[0],
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
