"""One MoE layer inside Megatron-core, forward + backward: Megatron's own dispatch and experts against Comet's.

    torchrun --nproc-per-node 2 benchmarks/bench_megatron.py --ep 2 --models qwen3_30b_a3b,mixtral_8x7b --tokens 4096

All variants are ``MoELayer`` with the same weights, bf16, without load-balancing losses and shared experts, and contain
Megatron's router; they are launched eagerly and interleaved by the protocol of ``comet.tuner.timing``:

    sequential    all-to-all, and one expert after the other (``SequentialMLP``)
    grouped       all-to-all, and ``GroupedMLP``, with torch's grouped GEMM where the package grouped_gemm is missing
                  (the fact ``grouped_gemm`` says which); Transformer Engine's experts are not measured
    comet         ``with_comet``: Comet's dispatch, experts and combine

A variant that fails, or whose output or gradients differ from those of the first one that runs by more than rounding
explains, is not timed and stands under ``failures``. Needs GPUs and Megatron-core 0.16.1 (0.17 and later have another
``GroupedMLP``). Rank 0 writes ``bench_megatron.json`` to ``--out``, prints a table in milliseconds and, as the last
line, the run.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from facts import gather_facts
from megatron_layers import ROTATE, grouped_gemm, make_layers, start_megatron, train
from points import Ranks, attempt, relative_error
from protocol import time_by_protocol
from report import Row, cell, table_of
from shapes import model
from start import run_and_leave, start_ranks, tell, whole_numbers, words
from torch import Tensor, nn

from comet.config import MoEConfig, ParallelConfig, require
from comet.group import ExpertGroup, make_expert_group
from comet.launch.cli import Parser
from comet.launch.distributed import started_by_torchrun
from comet.tuner.timing import Variant
from comet.workspace import Workspace

TOLERANCE = 0.15  # of the root mean square, the largest deviation that rounding can explain; as in ``bench_moe.py``
COLUMNS = ("model", "tokens", "ep", "sequential_ms", "grouped_ms", "comet_ms", "x_sequential", "x_grouped", "failures")


def checked(
    layers: dict[str, nn.Module], xs: list[Tensor], ranks: Ranks, pool: Workspace | None = None
) -> tuple[dict[str, Variant], dict[str, str]]:
    """What agrees with the first layer that runs, as variants, and why the others are not there; collective."""
    variants: dict[str, Variant] = {}
    failures: dict[str, str] = {}
    first, wanted = "", dict[str, Tensor]()
    for name, layer in layers.items():
        found, failure = attempt(partial(train, layer, xs[0]), ranks, pool)
        if found is not None and not first:
            first, wanted = name, found
        elif found is not None:
            error = ranks.worst(relative_error(tuple(found.values()), tuple(wanted[key] for key in found)))
            failure = "" if error <= TOLERANCE else f"differs from {first} by {error:.3g} root mean squares"
        if failure:
            failures[name] = failure
        else:
            variants[name] = lambda index, layer=layer: train(layer, xs[index])  # type: ignore[misc]
    return variants, failures


def measure_point(config: MoEConfig, group: ExpertGroup, num_tokens: int, rounds: int, ranks: Ranks) -> Row:
    """Check and time all variants; collective."""
    layers = make_layers(config, group)
    draw = torch.Generator().manual_seed(ranks.rank)
    shape = (num_tokens, 1, config.hidden_size)
    xs = [torch.randn(shape, generator=draw).to(ranks.device, torch.bfloat16) for _ in range(ROTATE)]
    variants, failures = checked(layers, xs, ranks, group.workspace)
    timings = time_by_protocol(variants, ranks, rounds=rounds, rotate=ROTATE)
    group.workspace.check()
    found: Row = {f"{name}_ms": timing.median_ms for name, timing in timings.items()}
    for name in ("sequential", "grouped"):
        if name in timings and "comet" in timings:
            found[f"x_{name}"] = timings[name].median_ms / timings["comet"].median_ms
    return found | {"failures": "; ".join(f"{name}: {reason}" for name, reason in failures.items())}


def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure all points; rank 0 reports."""
    start_megatron(arguments.ep)
    facts = gather_facts(ranks) | {"task": "bench_megatron", "rounds": arguments.rounds, "grouped_gemm": grouped_gemm()}
    rows: list[Row] = []
    for name in arguments.models:
        config = model(name)
        group = make_expert_group(
            config,
            ParallelConfig(ep=arguments.ep),
            max_tokens=max(arguments.tokens),
            dtype=torch.bfloat16,
            device=ranks.device,
        )
        for num_tokens in arguments.tokens:
            point = {"model": name, "tokens": num_tokens, "ep": arguments.ep}
            rows.append(point | measure_point(config, group, num_tokens, arguments.rounds, ranks))
            gc.collect()
            tell(ranks, f"{name} {num_tokens}: done")
        group.close()
    if ranks.rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        line = json.dumps(facts | {"rows": rows})
        (arguments.out / "bench_megatron.json").write_text(line + "\n")
        print(table_of(rows, COLUMNS, cell), line, sep="\n", flush=True)


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown model or a number that is too small."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=("qwen3_30b_a3b",), help="comma-separated names of shapes.py")
    parser.add_argument("--tokens", type=whole_numbers, default=[4096], help="tokens per rank, comma-separated")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10, help="counted calls of each variant")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_megatron"))
    arguments = parser.parse_args(command_line)
    for name in arguments.models:
        ParallelConfig(ep=arguments.ep).check(model(name))
    require(min(arguments.tokens) >= 1, f"tokens={arguments.tokens} must each be at least 1")
    require(arguments.rounds >= 1, f"rounds={arguments.rounds} must be at least 1")
    return arguments


def main(command_line: Sequence[str]) -> None:
    """One rank of the benchmark."""
    arguments = parse(command_line)
    require(started_by_torchrun(), "start the benchmark with torchrun: Megatron needs process groups, also of one rank")
    require(torch.cuda.is_available(), "Megatron-core needs GPUs")
    start_ranks(ParallelConfig(ep=arguments.ep), "auto", partial(run, arguments))


if __name__ == "__main__":
    run_and_leave(main)
