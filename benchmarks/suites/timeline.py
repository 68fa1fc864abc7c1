"""A timeline of the layer's forward pass: which block communicates, waits and computes when, on every rank.

    torchrun --nproc-per-node 4 benchmarks/bench.py timeline --model mixtral_8x7b --tokens 2048 --ep 4
    export TRITON_INTERPRET=1  # without GPUs
    torchrun --nproc-per-node 2 benchmarks/bench.py timeline --device cpu --model tiny --tokens 64 --ep 2

Rank 0 writes ``timeline.json`` (for ui.perfetto.dev), ``timeline.png`` and ``summary.json`` to ``--out`` and prints one
line of JSON. Under the interpreter blocks run one after the other and durations mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

from comet.config import require
from comet.kernels.runtime.recorder import DEFAULT_CAPACITY
from comet.measure.timing import LEAD_CYCLES
from comet.moe import MoE
from comet.trace.timeline import Timeline, record

from lib.arguments import parsed, suite_parser
from lib.moe import Inputs, make_inputs, open_layer
from lib.ranks import Ranks
from lib.report import Row, set_aside
from lib.shapes import model, parse_overlap
from lib.timing import run_facts

LEADS = 8  # two milliseconds: a recorded layer and its barrier take the host less


def record_layer(moe: MoE, inputs: Inputs, capacity: int) -> tuple[Timeline, bool]:
    """One recorded forward pass, and whether its output is bitwise the unrecorded one (collective).

    Kernels are compiled before, in a recorded call without rows in which no fused kernel waits for another rank. The
    ranks begin together, and GPUs once their hosts have launched everything: no wait is one for a late host.
    """
    tokens, ids, weights, _ = inputs
    with torch.no_grad():
        with record(moe.group, capacity=capacity):
            moe.routed_experts(tokens, torch.full_like(ids, -1), weights)
            moe.group.comm.barrier()
        expected = moe.routed_experts(tokens, ids, weights)
        with record(moe.group, capacity=capacity) as timeline:
            if moe.group.device.type == "cuda":
                torch.cuda._sleep(LEADS * LEAD_CYCLES)
            moe.group.comm.barrier()
            output = moe.routed_experts(tokens, ids, weights)
    return timeline, torch.equal(output, expected)


def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Record one layer; rank 0 writes and prints."""
    if ranks.device.type == "cpu":
        require(triton.knobs.runtime.interpret, "device=cpu must be used with TRITON_INTERPRET=1: only kernels record")
    config = model(arguments.model)
    with open_layer(config, arguments, arguments.tokens, ranks) as layer:
        if layer.moe is None:
            raise ValueError(f"model={arguments.model} must be a layer Comet can build: {layer.failures}")
        inputs = make_inputs(config, arguments.tokens, arguments.routing, ranks)
        timeline, is_equal = record_layer(layer.moe, inputs[0], arguments.capacity)
    differs = ranks.worst(float(not is_equal))
    if ranks.rank == 0:
        shape = {name: getattr(arguments, name) for name in ("model", "tokens", "ep", "tp", "routing")}
        facts: Row = run_facts(ranks) | shape
        facts["device"] += ", interpreted" if ranks.device.type == "cpu" else ""
        facts["files"] = [str(arguments.out / name) for name in ("timeline.json", "timeline.png", "summary.json")]
        for stem in ("timeline", "summary"):
            set_aside(arguments.out, stem)
        facts |= timeline.write(arguments.out) | {"output_unchanged": not differs}
        print(json.dumps({"benchmark": "record_timeline"} | facts))


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown model, routing or setting."""
    parser = suite_parser(
        "timeline", __doc__, model="mixtral_8x7b", ep=1, tp=1, routing="uniform", device="auto",
        out=Path("outputs/timeline"),
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank")
    parser.add_argument("--split", default="num_panels=4", help="comm_blocks=16,num_panels=4")
    parser.add_argument("--capacity", type=int, default=DEFAULT_CAPACITY, help="events a block can keep")
    parser.set_defaults(path="fused", variants=("comet",))
    arguments = parsed(parser, command_line)
    model(arguments.model)
    arguments.overlap = parse_overlap(arguments.split, "split")
    return arguments
