"""The time of a layer over nodes: when rows are on the link, and when they are computed.

A rank computes a first half of its own tokens, then the guests of each other node, part by part, then the rest of its
own tokens. Its link carries its tokens out, node by node, and the sums of each part home as soon as they are computed.
Own tokens and the guests of each node have equally many routed rows where all experts are equally popular. Few tokens
take fewer runs: own tokens in one, or all that a rank has, own tokens and guests of all nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from comet.config import MoEConfig, ParallelConfig
from comet.kernels.runtime.limits import CHUNK_ROWS
from comet.layout import round_up
from comet.schedule.choice import Problem

PARTS = (1, 2, 4)  # in which the guests of a node may be computed
# Each leg has rows of so many slots at a time, one that is computed and two that travel, or else so many rows.
RING, RING_ROWS = 3, 8192
GEMM_WORK = 6  # floating-point operations of a routed row for each of D F columns: two multiply-adds in, one out


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a machine; the defaults are those of an H200 with a network card of 400 Gbit/s."""

    network_gbs: float = 50.0  # 1e9 bytes a second that leave a rank
    nvlink_gbs: float = 380.0  # the same inside a node
    tflops: float = 600.0  # grouped GEMMs in 16 bits
    memory_gbs: float = 4000.0  # 1e9 bytes of weights that a run reads in a second
    another_ms: float = 0.15  # what a choice of runs counts of the 1 ms that the host takes to launch one
    run_ms: float = 0.15  # what a run takes beyond its GEMMs: plan, first rows, last sums
    launch_ms: float = 10.0  # a host takes at least so long to launch a forward and a backward pass
    wgrad_ms: float = 5.0  # what a backward pass takes beyond twice its forward pass: weights are read in every run
    plain_ms: float = 2.0  # what path ``plain`` takes beyond its GEMMs and its rows


class Runs(NamedTuple):
    """The runs of a forward pass inside a node."""

    parts: int  # runs for the guests of each node; 0: own tokens and all guests are one run
    is_split: bool  # whether own tokens are two runs, one before the guests and one behind them

    def count(self, slots: int) -> int:
        """How many runs there are with so many other nodes."""
        return 1 + self.is_split + slots * self.parts


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Milliseconds of a forward pass and of what bounds it."""

    layer: float
    gemm: float
    nvlink: float
    network: float  # both legs
    in_node: float  # all runs without a wait for the network

    @property
    def hidden(self) -> float:
        """The share of the network's time in which the rank computes."""
        return max(0.0, 1 - (self.layer - self.in_node) / self.network)

    @property
    def bound(self) -> str:
        """The longest of the three, by name."""
        return max(("gemm", "nvlink", "network"), key=lambda name: float(getattr(self, name)))


def row_bytes(moe: MoEConfig, itemsize: int, *, trains: bool) -> int:
    """Bytes on the network for one token and one node that it reaches.

    Its row, K ids and K weights go there, and a sum comes back; in a backward pass a gradient goes there, and those of
    the token and of its K weights come back.

    Example: D = 32 in float32 and K = 2: 128 + 16 + 128 = 272, with a backward pass 272 + 128 + 128 + 8 = 536.
    """
    rows = 2 * moe.hidden_size * itemsize
    return rows + 8 * moe.top_k + (rows + 4 * moe.top_k) * trains


def expected_rows(moe: MoEConfig, parallel: ParallelConfig, num_tokens: int) -> float:
    """How often tokens of one rank reach another node where all experts are equally popular.

    Example: E = 4, K = 2, two nodes, 3 tokens: one of six pairs of experts lies in the token's own node: 3 * 5/6 = 2.5.
    """
    nodes = parallel.world_size // parallel.ranks_with_memory
    elsewhere = moe.num_experts - moe.num_experts // nodes
    missed = math.comb(elsewhere, moe.top_k) / math.comb(moe.num_experts, moe.top_k)
    return num_tokens * (nodes - 1) * (1 - missed)


def layer_times(problem: Problem, rates: Rates, runs: Runs) -> LayerTimes:
    """Follow one forward pass of a rank through its runs and its link.

    Example: two nodes of one rank, own tokens and guests of 4 ms each, legs of 2 ms, runs of no overhead. With own
    tokens in two runs: own tokens until 2, guests (there at 2) until 6, own tokens until 8; sums are home at 8. In one
    run for all: guests are there at 2, all is computed at 10, and sums are home at 12.
    """
    moe, parallel, itemsize, num_nodes = problem.moe, problem.parallel, problem.dtype.itemsize, problem.num_nodes
    rows = problem.num_tokens * moe.top_k / num_nodes  # routed rows of own tokens, and of the guests of a node
    compute = rows * GEMM_WORK * moe.hidden_size * moe.ffn_size / rates.tflops / 1e9
    weights = 3 * moe.hidden_size * moe.ffn_size * moe.num_experts / parallel.world_size * itemsize / rates.memory_gbs
    tokens, slots = expected_rows(moe, parallel, problem.num_tokens), num_nodes - 1
    out = home = tokens / slots * row_bytes(moe, itemsize, trains=False) / 2 / rates.network_gbs / 1e6

    def run(share: float) -> float:
        return rates.run_ms + max(share * compute, weights / 1e6)

    if not runs.parts:
        in_node = run(num_nodes)
        now = slots * out + in_node
        link = now + slots * home
    else:
        in_node = now = run(1 - runs.is_split / 2)
        link = slots * out
        for part in range(slots * runs.parts):
            now = max(now, (part + 1) / runs.parts * out) + run(1 / runs.parts)
            link = max(link, now) + home / runs.parts
        rest = run(1 / 2) * runs.is_split
        in_node, now = in_node + slots * runs.parts * run(1 / runs.parts) + rest, now + rest
    ranks = parallel.ranks_with_memory
    inside = problem.num_tokens + tokens  # each goes to the other ranks of the node, and its sums come back
    elsewhere = moe.num_experts - moe.num_experts // parallel.ep
    reached = 1 - math.comb(elsewhere, moe.top_k) / math.comb(moe.num_experts, moe.top_k)
    nvlink = inside * (ranks - 1) * reached * 2 * moe.hidden_size * itemsize / rates.nvlink_gbs / 1e6
    return LayerTimes(
        layer=max(now, link), gemm=num_nodes * compute, nvlink=nvlink, network=slots * (out + home), in_node=in_node
    )


def best_runs(problem: Problem, rates: Rates, *, joins: bool = True) -> Runs:
    """The runs that take the shortest time, each with a part of the time in which the host launches it.

    Args:
        joins: Whether guests and own tokens may be one run, where guests of all nodes have memory at a time.
    """
    slots = problem.num_nodes - 1
    cuts = [Runs(parts, is_split) for is_split in (True, False) for parts in PARTS]
    if joins and ring_slots(problem.num_nodes, round_up(problem.num_tokens, CHUNK_ROWS)) == slots:
        cuts.append(Runs(0, False))

    def cost(runs: Runs) -> float:
        return round(layer_times(problem, rates, runs).layer + rates.another_ms * runs.count(slots), 3)

    return min(cuts, key=cost)


def ring_slots(num_nodes: int, padded_tokens: int) -> int:
    """The slots of a group of so many nodes that have memory at a time; 5 nodes, M = 128: 4, M = 8192: 3."""
    return min(num_nodes - 1, max(RING, RING_ROWS // max(padded_tokens, 1)))


def node_tokens(problem: Problem) -> int:
    """The most tokens of a rank in one run inside a node: those of all nodes, where they are one run.

    Example: two nodes, 200 tokens in one run: 512, as each node's take whole chunks of 128.
    """
    joins = problem.num_nodes > 1 and not best_runs(problem, Rates()).parts
    return problem.num_nodes * round_up(problem.num_tokens, CHUNK_ROWS) if joins else problem.num_tokens


def training_times(problem: Problem, rates: Rates) -> tuple[float, float]:
    """Milliseconds of a forward and a backward pass that a host launches: inside the nodes, and on path ``plain``.

    ``plain`` sends a row to each expert elsewhere, back and forth in both passes, and computes meanwhile nothing. The
    times of ten layers over two nodes are in ``benchmarks/results/nodes.md``.
    """
    moe, parallel = problem.moe, problem.parallel
    times = layer_times(problem, rates, best_runs(problem, rates))
    elsewhere = problem.num_tokens * moe.top_k * (1 - parallel.ranks_with_memory / parallel.world_size)
    sent = 4 * elsewhere * moe.hidden_size * problem.dtype.itemsize / rates.network_gbs / 1e6
    plain = 1.1 * (sent + 3 * times.gemm) + rates.plain_ms
    return max(rates.launch_ms, 3 * times.layer + rates.wgrad_ms), plain
