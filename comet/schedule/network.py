"""The time of a layer over nodes: when rows are on the link, and when they are computed.

A rank computes a first half of its own tokens, then the guests of each other node, part by part, then the rest of its
own tokens. Its link carries its tokens out, node by node, and the sums of each part home as soon as they are computed.
Own tokens and the guests of each node have equally many routed rows where all experts are equally popular.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from comet.config import MoEConfig, ParallelConfig
from comet.schedule.choice import Problem

PARTS = (1, 2, 4)  # in which the guests of a node may be computed
GEMM_WORK = 6  # floating-point operations of a routed row for each of D F columns: two multiply-adds in, one out


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a machine; the defaults are those of an H200 with a network card of 400 Gbit/s."""

    network_gbs: float = 50.0  # 1e9 bytes a second that leave a rank
    nvlink_gbs: float = 380.0  # the same inside a node
    tflops: float = 600.0  # grouped GEMMs in 16 bits
    run_ms: float = 0.15  # what a run takes beyond its GEMMs: plan, first rows, last sums
    launch_ms: float = 10.0  # a host takes at least so long to launch a forward and a backward pass
    wgrad_ms: float = 5.0  # what a backward pass takes beyond twice its forward pass: weights are read in every run
    plain_ms: float = 2.0  # what path ``plain`` takes beyond its GEMMs and its rows


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
        return 1 - (self.layer - self.in_node) / self.network

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


def layer_times(problem: Problem, rates: Rates, *, num_parts: int) -> LayerTimes:
    """Follow one forward pass of a rank through its runs and its link.

    Example: two nodes of one rank, own tokens and guests of 4 ms each, legs of 2 ms, runs of no overhead: own tokens
    until 2, guests (there at 2) until 6, own tokens until 8; sums are home at 8.
    """
    moe, parallel, itemsize = problem.moe, problem.parallel, problem.dtype.itemsize
    num_nodes = parallel.world_size // parallel.ranks_with_memory
    rows = problem.num_tokens * moe.top_k / num_nodes  # routed rows of own tokens, and of the guests of a node
    compute = rows * GEMM_WORK * moe.hidden_size * moe.ffn_size / rates.tflops / 1e9
    tokens = expected_rows(moe, parallel, problem.num_tokens)
    slots = num_nodes - 1
    out = home = tokens / slots * row_bytes(moe, itemsize, trains=False) / 2 / rates.network_gbs / 1e6
    now, link = rates.run_ms + compute / 2, slots * out
    for part in range(slots * num_parts):
        arrived = (part + 1) / num_parts * out
        now = max(now, arrived) + rates.run_ms + compute / num_parts
        link = max(link, now) + home / num_parts
    now += rates.run_ms + compute / 2
    ranks = parallel.ranks_with_memory
    inside = problem.num_tokens + tokens  # each goes to the other ranks of the node, and its sums come back
    elsewhere = moe.num_experts - moe.num_experts // parallel.ep
    reached = 1 - math.comb(elsewhere, moe.top_k) / math.comb(moe.num_experts, moe.top_k)
    nvlink = inside * (ranks - 1) * reached * 2 * moe.hidden_size * itemsize / rates.nvlink_gbs / 1e6
    return LayerTimes(
        layer=max(now, link), gemm=num_nodes * compute, nvlink=nvlink, network=slots * (out + home),
        in_node=num_nodes * compute + (2 + slots * num_parts) * rates.run_ms,
    )  # fmt: skip


def best_parts(problem: Problem, rates: Rates) -> int:
    """The number of parts in which guests take the shortest time."""
    return min(PARTS, key=lambda parts: round(layer_times(problem, rates, num_parts=parts).layer, 3))


def training_times(problem: Problem, rates: Rates) -> tuple[float, float]:
    """Milliseconds of a forward and a backward pass that a host launches: inside the nodes, and on path ``plain``.

    ``plain`` sends a row to each expert elsewhere, back and forth in both passes, and computes meanwhile nothing. The
    times of ten layers over two nodes are in ``benchmarks/results/nodes.md``.
    """
    moe, parallel = problem.moe, problem.parallel
    times = layer_times(problem, rates, num_parts=best_parts(problem, rates))
    elsewhere = problem.num_tokens * moe.top_k * (1 - parallel.ranks_with_memory / parallel.world_size)
    sent = 4 * elsewhere * moe.hidden_size * problem.dtype.itemsize / rates.network_gbs / 1e6
    plain = 1.1 * (sent + 3 * times.gemm) + rates.plain_ms
    return max(rates.launch_ms, 3 * times.layer + rates.wgrad_ms), plain
