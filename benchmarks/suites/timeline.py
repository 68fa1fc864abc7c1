"""A timeline of the layer's forward pass: which block communicates, waits and computes when, on every rank.

    torchrun --nproc-per-node 4 benchmarks/bench.py timeline --model mixtral_8x7b --tokens 2048 --ep 4
    export TRITON_INTERPRET=1  # without GPUs
    torchrun --nproc-per-node 2 benchmarks/bench.py timeline --device cpu --model tiny --tokens 64 --ep 2

Rank 0 writes ``timeline.json`` (for ui.perfetto.dev), ``timeline.png`` and ``summary.json`` to ``--out`` and prints one
line of JSON. On GPUs it says what recording costs: the same layer with and without, as CUDA graphs, interleaved by the
protocol of ``comet.measure.timing``. Under the interpreter blocks run one after the other and durations mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from comet.config import ParallelConfig, require
from comet.kernels.runtime.recorder import DEFAULT_CAPACITY, Recorder
from comet.launch.distributed import started_by_torchrun
from comet.measure.timing import capture, rank_barrier
from comet.moe import MoE
from comet.trace.timeline import Timeline, record, recording_to

from lib.arguments import require_known, suite_parser
from lib.moe.layer import Inputs, Settings, make_inputs, open_layer
from lib.ranks import Ranks, device_name
from lib.report import Row
from lib.shapes import ROUTINGS, model, parse_overlap
from lib.start import start_ranks
from lib.timing import time_by_protocol


def forward(moe: MoE, inputs: Inputs, index: int = 0) -> Tensor:
    """The routed experts on the first input set."""
    with torch.no_grad():
        return moe.routed_experts(inputs.tokens[0], inputs.ids[0], inputs.weights[0])


def record_layer(moe: MoE, inputs: Inputs, capacity: int) -> tuple[Timeline, bool]:
    """One recorded forward pass, and whether its output is bitwise the unrecorded one (collective).

    Kernels are compiled before, in a recorded call without rows in which no fused kernel waits for another rank.
    """
    with record(moe.group, capacity=capacity), torch.no_grad():
        moe.routed_experts(inputs.tokens[0], torch.full_like(inputs.ids[0], -1), inputs.weights[0])
    expected = forward(moe, inputs)
    with record(moe.group, capacity=capacity) as timeline:
        output = forward(moe, inputs)
    return timeline, torch.equal(output, expected)


def measure_overhead(moe: MoE, inputs: Inputs, capacity: int, rounds: int, ranks: Ranks) -> dict[str, float]:
    """Milliseconds with and without recording, and the overhead: 0.01 is 1 % (collective, GPUs only)."""
    recorder = Recorder.allocate(ranks.device, capacity)
    wait_for_ranks = rank_barrier(ranks.device, ranks.process_group)

    def recorded(index: int) -> None:
        with recording_to(moe.group.workspace, recorder):
            forward(moe, inputs)

    def opening() -> None:
        recorder.clear()
        wait_for_ranks()

    timings = time_by_protocol(
        {"off": capture(partial(forward, moe, inputs), rotate=1), "on": capture(recorded, rotate=1)},
        ranks,
        rounds=rounds,
        rotate=1,
        opening=opening,
    )
    off, on = timings["off"].median_ms, timings["on"].median_ms
    return {"off_ms": off, "on_ms": on, "overhead": on / off - 1}


def run(arguments: argparse.Namespace, settings: Settings, ranks: Ranks) -> None:
    """Record one layer; rank 0 writes and prints."""
    if ranks.device.type == "cpu":
        require(triton.knobs.runtime.interpret, "device=cpu must be used with TRITON_INTERPRET=1: only kernels record")
    config = model(arguments.model)
    with open_layer(config, settings, ranks) as layer:
        if layer.moe is None:
            raise ValueError(f"model={arguments.model} must be a layer Comet can build: {layer.failures}")
        inputs = make_inputs(config, arguments.tokens, arguments.routing, ranks)
        timeline, is_equal = record_layer(layer.moe, inputs, arguments.capacity)
        cost = None
        if ranks.device.type == "cuda":
            cost = measure_overhead(layer.moe, inputs, arguments.capacity, arguments.rounds, ranks)
    differs = ranks.worst(float(not is_equal))
    if ranks.rank == 0:
        print(json.dumps(report(arguments, ranks, timeline, cost) | {"output_unchanged": not differs}))


def report(arguments: argparse.Namespace, ranks: Ranks, timeline: Timeline, cost: dict[str, float] | None) -> Row:
    """Write the files; what was recorded as one object."""
    summary = timeline.write(arguments.out)
    return {
        "benchmark": "record_timeline",
        **{name: getattr(arguments, name) for name in ("model", "tokens", "ep", "tp", "routing")},
        "device": device_name(ranks.device) + (", interpreted" if ranks.device.type == "cpu" else ""),
        "recording": cost,
        "files": [str(arguments.out / name) for name in ("timeline.json", "timeline.png", "summary.json")],
        **summary,
    }


def parse(command_line: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; raises ``ValueError`` for an unknown model, routing or setting."""
    parser = suite_parser(
        "timeline", __doc__, model="mixtral_8x7b", ep=1, tp=1, routing="uniform", rounds=21, device="auto",
        out=Path("outputs/timeline"),
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank")
    parser.add_argument("--split", default="num_panels=4", help="comm_blocks=16,num_panels=4")
    parser.add_argument("--capacity", type=int, default=DEFAULT_CAPACITY, help="events a block can keep")
    arguments = parser.parse_args(command_line)
    model(arguments.model)
    require_known("routing", [arguments.routing], ROUTINGS)
    return arguments, Settings(
        parallel=ParallelConfig(ep=arguments.ep, tp=arguments.tp),
        max_tokens=arguments.tokens,
        path="fused",
        overlap=parse_overlap(arguments.split, "split"),
        variants=("comet",),
    )


def main(command_line: Sequence[str]) -> None:
    """One rank of the benchmark."""
    arguments, settings = parse(command_line)
    require(started_by_torchrun(), "start the benchmark with torchrun: it sets rank and world size")
    start_ranks(settings.parallel, arguments.device, partial(run, arguments, settings))
