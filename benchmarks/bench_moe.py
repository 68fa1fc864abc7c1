"""The whole MoE layer, forward or forward + backward: Comet against what everybody has, in one interleaved run.

    torchrun --nproc-per-node 4 benchmarks/bench_moe.py --models mixtral_8x7b,deepseek_v3 --tokens 2048,8192 --ep 4
    torchrun --nproc-per-node 2 benchmarks/bench_moe.py --device cpu --models tiny --tokens 64 --ep 2

Rank 0 writes ``bench_moe.csv`` (a row as soon as it is measured), ``.png`` and ``.json`` to ``--out``, prints one table
and, as the last line, the run as JSON. A variant or point that fails is recorded as such and the run goes on. Columns
and protocol: ``RESULTS.md`` beside this file.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accounting import layer_flops, link_bytes
from fp8 import deviation
from points import (
    ROTATE,
    Inputs,
    Layer,
    Ranks,
    Settings,
    attempt,
    floor_variants,
    layer_variants,
    make_inputs,
    open_layer,
    relative_error,
)
from report import FP8_VARIANTS, VARIANTS, Row, append_csv, as_json, draw, figures, format_table
from roofs import gemm_roof_tflops, link_roof_gbs
from routing import ROUTINGS
from shapes import model
from timing import Timing, Variant, capture, max_over_ranks, rank_barrier, time_interleaved
from torch import Tensor

from comet.config import OverlapConfig, ParallelConfig, require
from comet.launch.distributed import current_context, leave, open_store, process_group, started_by_torchrun
from comet.paths import SymmetricPath

# Replayed as a CUDA graph, without what its launches cost the host.
GRAPHS = ("comet_graph", "comet_fp8_graph", "comm_comet")
# Largest deviation from the plain path, relative to its root mean square, that rounding can explain.
TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 1e-3}


def measure_point(
    layer: Layer, num_tokens: int, settings: Settings, ranks: Ranks, rounds: int, link_roof: float | None
) -> Row:
    """Check and time all variants at one number of tokens; collective."""
    inputs = make_inputs(layer.config, num_tokens, settings, ranks)
    failures = dict(layer.failures)
    variants, errors = checked_variants(layer, inputs, settings, ranks, failures)
    floors, failure = attempt(partial(floor_variants, layer, inputs, settings, ranks), ranks)
    variants |= floors or {}
    if failure:
        failures["gemm"] = failure
    timings = time_interleaved(
        variants,
        rounds=rounds,
        barrier=rank_barrier(ranks.device, ranks.process_group),
        rotate=ROTATE,
        device=ranks.device,
        slowest=max_over_ranks(ranks.device, ranks.process_group),
    )
    times_ms = {name: timing.median_ms for name, timing in timings.items()}
    if settings.backward:
        for name in times_ms.keys() & {"gemm_comet", "gemm_torch"}:
            times_ms[name] *= 3  # the gradients of rows and weights are one forward each
    row_bytes = layer.config.hidden_size * ranks.dtype.itemsize
    traffic = link_bytes(inputs.ids[0], layer.layout, row_bytes, ranks.process_group, backward=settings.backward)
    flops = layer_flops(layer.config, layer.layout, num_tokens, backward=settings.backward)
    return (
        {f"{name}_ms": value for name, value in times_ms.items()}
        | figures(times_ms, flops, traffic, link_roof)
        | {"error": errors.get("comet"), "error_fp8": errors.get("comet_fp8")}
        | {"failures": describe(failures), "quantiles": quantiles(timings)}
        | {"setting": describe_setting(layer)}
    )


def checked_variants(
    layer: Layer, inputs: Inputs, settings: Settings, ranks: Ranks, failures: dict[str, str]
) -> tuple[dict[str, Variant], dict[str, float | None]]:
    """The variants that run and agree with the plain path, and their errors; the others go to ``failures``."""
    usable: dict[str, Variant] = {}
    wanted: tuple[Tensor, ...] | None = None
    errors: dict[str, float | None] = {}
    for name, variant in layer_variants(layer, inputs, settings, ranks).items():
        output, failure = attempt(partial(variant, 0), ranks)
        if output is not None:
            wanted = output if wanted is None and name == "plain" else wanted
            noise = layer.fp8.noise if layer.fp8 is not None and name in FP8_VARIANTS else None
            failure, errors[name] = compare(output, wanted if output else None, ranks, noise)
        timed: Variant | None = variant
        if not failure and name in GRAPHS and ranks.device.type == "cuda":
            timed, failure = attempt(partial(capture, variant, rotate=ROTATE), ranks)
        if failure or timed is None:
            failures[name] = failure
        else:
            usable[name] = timed
    return usable, errors


def compare(
    output: tuple[Tensor, ...], wanted: tuple[Tensor, ...] | None, ranks: Ranks, noise: float | None = None
) -> tuple[str, float | None]:
    """Why an output cannot be right ("" if it can), and its relative error; nothing without plain path.

    ``noise`` is what quantising makes of an output in block FP8 (``fp8.noise``).
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
    """Comm blocks, panels and phases that took effect, as ``16/4/2``; another path by its name."""
    if layer.moe is None:
        return ""
    path = layer.moe.experts
    if not isinstance(path, SymmetricPath):
        return type(path).__name__
    return f"{path.settings.comm_blocks}/{path.settings.layer1.num_panels}/{path.overlap.num_phases}"


def quantiles(timings: dict[str, Timing]) -> dict[str, dict[str, float]]:
    """Median, 10 % and 90 % of every variant, as measured."""
    return {name: asdict(timing) for name, timing in timings.items()}


def describe(failures: dict[str, str]) -> str:
    """One field of the table: ``comet: RuntimeError: ...; gemm: ...``."""
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())


def run(arguments: argparse.Namespace, settings: Settings, ranks: Ranks) -> None:
    """Measure all points, model by model; rank 0 reports."""
    facts = gather_facts(ranks)
    rows: list[Row] = []
    for name in arguments.models:
        keys = {
            "model": name,
            "ep": settings.parallel.ep,
            "tp": settings.parallel.tp,
            "routing": settings.routing,
            "direction": "forward+backward" if settings.backward else "forward",
        }
        with open_layer(model(name), settings, ranks) as layer:
            for num_tokens in arguments.tokens:
                measured, failure = attempt(
                    partial(
                        measure_point, layer, num_tokens, settings, ranks, arguments.rounds, facts["link_roof_gbs"]
                    ),
                    ranks,
                )
                rows.append(keys | {"tokens": num_tokens} | (measured or {"failures": f"point: {failure}"}))
                if ranks.rank == 0:
                    append_csv(arguments.out / "bench_moe.csv", rows[-1])
                    print(f"{name} {num_tokens}: done", file=sys.stderr, flush=True)
        del layer
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    if ranks.rank == 0:
        line = as_json(rows, facts)
        (arguments.out / "bench_moe.json").write_text(line + "\n")
        print(format_table(rows), flush=True)
        draw(arguments.out / "bench_moe.png", rows)
        print(line)


def gather_facts(ranks: Ranks) -> Row:
    """What a result needs to be repeated, and the roofs of this run; collective."""
    on_gpu = ranks.device.type == "cuda"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "not a git checkout",
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        "ranks": 1 if ranks.process_group is None else dist.get_world_size(ranks.process_group),
        "torch": torch.__version__,
        "gemm_roof_tflops": gemm_roof_tflops(ranks.device, ranks.process_group),
        "link_roof_gbs": link_roof_gbs(ranks.device, ranks.process_group),
    }


def parse(command_line: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; raises ``ValueError`` for an unknown model, routing or variant."""
    names = lambda text: tuple(text.split(","))  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=("mixtral_8x7b",), help="comma-separated names of shapes.py")
    parser.add_argument("--tokens", type=names, default=("2048", "8192"), help="tokens per rank, comma-separated")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--routing", default="uniform", help=", ".join(ROUTINGS))
    parser.add_argument("--backward", action="store_true", help="forward + backward")
    parser.add_argument("--path", default="auto", help="path of Comet's layer: auto, fused, twin, plain, reference")
    parser.add_argument(
        "--overlap", type=names, default=(), help="settings of Comet, such as comm_blocks=16,num_panels=4"
    )
    known = (*VARIANTS, *FP8_VARIANTS)
    parser.add_argument("--variants", type=names, default=VARIANTS, help=",".join(known))
    parser.add_argument("--rounds", type=int, default=20, help="counted calls of each variant")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_moe"))
    arguments = parser.parse_args(command_line)
    arguments.tokens = [int(number) for number in arguments.tokens]
    for name in arguments.models:
        model(name)
    require(arguments.routing in ROUTINGS, f"routing={arguments.routing!r} must be one of {', '.join(ROUTINGS)}")
    for name in arguments.variants:
        require(name in known, f"variants={name!r} must be one of {', '.join(known)}")
    pairs = dict(pair.split("=", 1) for pair in arguments.overlap)
    return arguments, Settings(
        parallel=ParallelConfig(ep=arguments.ep, tp=arguments.tp),
        max_tokens=max(arguments.tokens),
        routing=arguments.routing,
        backward=arguments.backward,
        path=arguments.path,
        overlap=OverlapConfig(**{name: int(value) for name, value in pairs.items()}) if pairs else None,
        variants=arguments.variants,
    )


def main(command_line: Sequence[str]) -> None:
    """One rank of the benchmark."""
    arguments, settings = parse(command_line)
    require(started_by_torchrun(), "start the benchmark with torchrun: it sets rank and world size")
    context = current_context()
    if arguments.device == "cpu":
        context = replace(context, device=torch.device("cpu"))
    world_size = settings.parallel.world_size
    require(
        context.world_size == world_size,
        f"nproc={context.world_size} must equal ep={settings.parallel.ep} x tp={settings.parallel.tp}",
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    with process_group(context, open_store(context)):
        run(arguments, settings, Ranks(context.rank, context.device, dist.group.WORLD if world_size > 1 else None))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave(0)
