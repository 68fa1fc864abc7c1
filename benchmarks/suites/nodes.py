"""Expected times of layers over nodes: a model of runs and link, not a measurement.

    python benchmarks/bench.py nodes --nodes 2,4 --network-gbs 25

One row for each layer and number of nodes whose ranks share its experts: milliseconds of a forward pass, of its GEMMs
and of both links alone, which of these is longest, and how many times as long the layer takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from comet.config import ParallelConfig
from comet.schedule.choice import Problem
from comet.schedule.network import Rates, best_runs, layer_times

from lib.report import table_of
from lib.shapes import model
from lib.suite import CommandLine, option

MODELS = ("mixtral_8x7b", "phi35_moe", "qwen2_moe", "qwen3_30b_a3b", "deepseek_v3")


@dataclass(frozen=True, kw_only=True)
class Run(CommandLine):
    models: tuple[str, ...] = MODELS
    nodes: tuple[int, ...] = (2, 4, 8, 16)
    node_size: int = option(8, "ranks of a node")
    tokens: int = 8192
    network_gbs: int = option(50, "1e9 bytes a second that leave a rank")

    @classmethod
    def main(cls, command_line: Sequence[str]) -> None:
        """Print a table of all layers that divide over so many ranks, and the rows as JSON."""
        options = cls.parse(command_line)
        rates, rows = Rates(network_gbs=options.network_gbs), []
        for name in options.models:
            moe = model(name)
            for nodes in options.nodes:
                ranks = nodes * options.node_size
                if moe.num_experts % ranks:
                    continue
                parallel = ParallelConfig(ep=ranks, node_size=options.node_size)
                problem = Problem(moe, parallel, options.tokens, torch.bfloat16)
                runs = best_runs(problem, rates)
                times = layer_times(problem, rates, runs)
                keys = {"model": name, "nodes": nodes, "ep": ranks, "runs": runs.count(nodes - 1)}
                of_bound = times.layer / getattr(times, times.bound)
                rows.append(keys | asdict(times) | {"bound": times.bound, "x_bound": of_bound})
        print(table_of(rows, ("model", "nodes")))
        print(json.dumps({"task": "bench_nodes", "rates": asdict(rates), "rows": rows}))
