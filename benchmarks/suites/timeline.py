"""A timeline of the layer's forward pass: which block communicates, waits and computes when, on every rank.

    torchrun --nproc-per-node 4 benchmarks/bench.py timeline --model mixtral_8x7b --tokens 2048 --ep 4
    export TRITON_INTERPRET=1  # without GPUs
    torchrun --nproc-per-node 2 benchmarks/bench.py timeline --device cpu --model tiny --tokens 64 --ep 2

Rank 0 writes ``timeline.json`` (for ui.perfetto.dev), ``timeline.png`` and ``summary.json`` to ``--out`` and prints one
line of JSON. Under the interpreter blocks run one after the other and durations mean nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from comet.config import require
from comet.kernels.runtime.recorder import DEFAULT_CAPACITY
from comet.moe import MoE
from comet.trace.timeline import Timeline, record
from comet.tuner.timing import LEAD_CYCLES

from lib.moe import Inputs, LayerSuite, make_inputs
from lib.ranks import Ranks
from lib.report import Row, set_aside
from lib.shapes import ROUTINGS, model
from lib.suite import option
from lib.timing import run_facts

LEADS = 8  # two milliseconds: a recorded layer and its barrier take the host less


def record_layer(moe: MoE, inputs: Inputs, capacity: int) -> tuple[Timeline, bool]:
    """Record one forward pass; return also whether its output has the bits of an unrecorded one (collective).

    A recorded call without rows compiles the kernels before. Ranks begin together, and GPUs once their hosts have
    launched everything, so that no wait is for a late host.
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


@dataclass(frozen=True, kw_only=True)
class Run(LayerSuite):
    model: str = "mixtral_8x7b"
    tokens: int = 2048
    routing: str = option("uniform", of=ROUTINGS)
    overlap: str = "num_panels=4"
    capacity: int = option(DEFAULT_CAPACITY, "events a block can keep")
    path: str = "fused"
    out: Path = Path("outputs/timeline")

    def check(self) -> None:
        _ = model(self.model), self.split

    def run(self, ranks: Ranks) -> None:
        if ranks.device.type == "cpu":
            interpreted = triton.knobs.runtime.interpret
            require(interpreted, "device=cpu must be used with TRITON_INTERPRET=1: only kernels record")
        config = model(self.model)
        with self.open_layer(config, self.tokens, ranks) as layer:
            if layer.moe is None:
                raise ValueError(f"model={self.model} must be a layer Comet can build: {layer.failures}")
            inputs = make_inputs(config, self.tokens, self.routing, ranks)
            timeline, is_equal = record_layer(layer.moe, inputs[0], self.capacity)
        differs = ranks.worst(float(not is_equal))
        if ranks.rank == 0:
            shape = {name: getattr(self, name) for name in ("model", "tokens", "ep", "tp", "routing")}
            facts: Row = run_facts(ranks) | shape
            facts["device"] += ", interpreted" if ranks.device.type == "cpu" else ""
            facts["files"] = [str(self.out / name) for name in ("timeline.json", "timeline.png", "summary.json")]
            for stem in ("timeline", "summary"):
                set_aside(self.out, stem)
            facts |= timeline.write(self.out) | {"output_unchanged": not differs}
            print(json.dumps({"benchmark": "record_timeline"} | facts))
