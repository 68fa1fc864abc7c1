"""Layer 0 and layer 1 one by one: fused, only the GEMM, only the communication, for several ways to split the GPU.

    torchrun --nproc-per-node 4 benchmarks/bench_layers.py --models mixtral_8x7b,deepseek_v3 --tokens 2048,8192 --ep 4
    torchrun --nproc-per-node 4 benchmarks/bench_layers.py --ep 4 --try comm_blocks=8 --try comm_blocks=32,num_panels=8
    torchrun --nproc-per-node 4 benchmarks/bench_layers.py --ep 4 --try transport=copy --try transport=copy,num_phases=4
    torchrun --nproc-per-node 4 benchmarks/bench_layers.py --ep 4 --try beside=0
    torchrun --nproc-per-node 2 benchmarks/bench_layers.py --device cpu --models tiny --tokens 64 --ep 2

All launches of a point are timed in one interleaved loop, on a GPU as CUDA graphs. Rank 0 writes ``bench_layers.csv``
(a point's rows as soon as they are measured) and ``.json`` to ``--out``, prints one table and, as the last line, the
best split of every point as JSON. A launch that fails or hangs is recorded and the run goes on. ``beside=0`` keeps both
layers to Triton. Columns and protocol: ``RESULTS.md`` beside this file.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from facts import gather_facts
from layer_launches import checked_launches, timed_variants
from layer_points import Point, open_point
from layer_report import COLUMNS, KEYS, format_table, make_rows, summary
from overlap import parse_overlap
from points import Ranks, Settings, attempt, open_layer
from protocol import time_by_protocol
from report import Row, append_csv
from routing import ROUTINGS
from shapes import model
from start import run_and_leave, start_ranks, tell, whole_numbers, words

from comet.config import OverlapConfig, ParallelConfig, require
from comet.group import make_expert_group
from comet.launch.cli import Parser
from comet.launch.distributed import started_by_torchrun

# One setting at a time leaves the default, so that a layer has at most ten launches.
GRID: dict[str, tuple[Any, ...]] = {
    "comm_blocks": (8, 16, 32, 64),
    "num_panels": (2, 4, 8),
    "num_phases": (2, 4),
    "beside": (False,),
    "transport": ("copy",),
}
TIMEOUT_S = 5.0  # a hang is reported quickly


def measure_point(point: Point, ranks: Ranks, rounds: int) -> list[Row]:
    """Check and time every launch of one point; a row per split (collective)."""
    failures: dict[str, str] = {}
    launches = checked_launches(point, ranks, failures)
    variants, opening = timed_variants(launches, point, ranks, failures)
    timings = time_by_protocol(variants, ranks, rounds=rounds, rotate=1, opening=opening)
    point.workspace.check()
    return make_rows(point.paths, timings, failures)


def run(arguments: argparse.Namespace, settings: Settings, ranks: Ranks) -> None:
    """Measure all points, model by model; rank 0 reports."""
    if ranks.rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
    facts = gather_facts(ranks)
    rows: list[Row] = []
    for name in arguments.models:
        for num_tokens, measured in measure_model(name, arguments, settings, ranks):
            parallel = settings.parallel
            keys = dict(zip(KEYS, (name, num_tokens, parallel.ep, parallel.tp, settings.routing), strict=True))
            new = [keys | row for row in measured]
            rows += new
            if ranks.rank == 0:
                append_csv(arguments.out / "bench_layers.csv", new, COLUMNS)
            tell(ranks, f"{name} {num_tokens}: done")
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    if ranks.rank == 0:
        found = summary(rows, facts)
        (arguments.out / "bench_layers.json").write_text(json.dumps(found | {"rows": rows}) + "\n")
        print(format_table(rows), flush=True)
        print(json.dumps(found))


def measure_model(
    name: str, arguments: argparse.Namespace, settings: Settings, ranks: Ranks
) -> Iterator[tuple[int, list[Row]]]:
    """Rows of one number of tokens after the other; the model's weights live only here (collective)."""
    config = model(name)
    group = make_expert_group(
        config,
        settings.parallel,
        max_tokens=settings.max_tokens,
        dtype=ranks.dtype,
        device=ranks.device,
        timeout_s=TIMEOUT_S,
    )
    with open_layer(config, settings, ranks) as layer:
        for num_tokens in arguments.tokens:
            opening = partial(open_point, layer, group, num_tokens, settings.routing, arguments.tries, ranks)
            measured, failure = attempt(
                lambda: measure_point(opening(), ranks, arguments.rounds),  # noqa: B023
                ranks,
                group.workspace,
            )
            yield num_tokens, measured or [{"failures": f"point: {failure}"}]
    group.close()


def default_grid() -> list[OverlapConfig]:
    """The default first, then every other value of ``GRID``, one setting at a time."""
    default = OverlapConfig()
    changed = [replace(default, **{name: value}) for name, values in GRID.items() for value in values]
    return [default, *(overlap for overlap in changed if overlap != default)]


def parse(command_line: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; raises ``ValueError`` for an unknown model, routing or setting."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=("mixtral_8x7b",), help="comma-separated names of shapes.py")
    parser.add_argument("--tokens", type=whole_numbers, default=[2048, 8192], help="tokens per rank, comma-separated")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--routing", default="uniform", help=", ".join(ROUTINGS))
    parser.add_argument(
        "--try",
        dest="tries",
        action="append",
        default=[],
        help="comm_blocks=16,num_panels=4,beside=0 or transport=copy; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=7, help="counted calls of each launch")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_layers"))
    arguments = parser.parse_args(command_line)
    arguments.tries = (
        [OverlapConfig(), *(parse_overlap(text, "try") for text in arguments.tries)]
        if arguments.tries
        else default_grid()
    )
    for name in arguments.models:
        model(name)
    require(arguments.routing in ROUTINGS, f"routing={arguments.routing!r} must be one of {', '.join(ROUTINGS)}")
    parallel = ParallelConfig(ep=arguments.ep, tp=arguments.tp)
    return arguments, Settings(
        parallel=parallel, max_tokens=max(arguments.tokens), routing=arguments.routing, variants=()
    )


def main(command_line: Sequence[str]) -> None:
    """One rank of the benchmark."""
    arguments, settings = parse(command_line)
    require(started_by_torchrun(), "start the benchmark with torchrun: it sets rank and world size")
    start_ranks(settings.parallel, arguments.device, partial(run, arguments, settings))


if __name__ == "__main__":
    run_and_leave(main)
