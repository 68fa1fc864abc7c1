"""Rivals of Comet's layer: other ways to run it, its two GEMMs alone, its communication alone.

The other ways are what a careful user would try first over ``torch.distributed``, forward only: from tokens ``(T, D)``,
ids and weights ``(T, K)`` to ``(T, D)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from comet.comm.collectives import accumulator_dtype
from comet.config import require
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm
from comet.kernels.runtime.arguments import TileTable
from comet.layer.nodes import NodesPath, joined
from comet.layer.routed_experts import SymmetricPath, forward
from comet.layout import Biases, ExpertLayout, RoutedTokens, added_biases
from comet.modular.experts import tiles_of_ids
from comet.reference.plain import dispatch_rows, expert_rows, grouped_matmul, make_exchange, weighted_sum
from comet.tuner.timing import Variant

from lib.moe import Inputs, Layer

BLOCK_ROWS = 128


def split_evenly(num_rows: int, num_experts: int) -> tuple[int, ...]:
    """Rows of each expert when all are alike; 7 rows over 3 experts: (3, 2, 2)."""
    share, rest = divmod(num_rows, num_experts)
    return tuple(share + (expert < rest) for expert in range(num_experts))


def gemm_variants(w1: Tensor, w2: Tensor, expert_counts: tuple[int, ...]) -> dict[str, Variant]:
    """Both GEMMs without SwiGLU, of e experts' routed rows: ``gemm_torch`` and, on a GPU, ``gemm_comet``."""
    table = tile_table(expert_counts, w1.device)
    ends = torch.tensor(list(accumulate(expert_counts)), dtype=torch.int32, device=w1.device)
    num_rows, config = sum(expert_counts), GemmConfig.select(w1.dtype)
    # The table's rows are more; zeros would draw less power and flatter the clock.
    operands = [torch.randn(len(table.row_ids), w.shape[2], device=w.device, dtype=w.dtype) for w in (w1, w2)]
    outputs = [w.new_empty(len(table.row_ids), w.shape[1]) for w in (w1, w2)]

    def by_torch(_: int) -> None:
        for rows, weight in zip(operands, (w1, w2), strict=True):
            grouped_matmul(rows[:num_rows], weight, expert_counts, ends)

    def by_comet(_: int) -> None:
        for rows, weight, into in zip(operands, (w1, w2), outputs, strict=True):
            group_gemm(rows, weight, into, table, gather=False, layout="nk", config=config)

    variants: dict[str, Variant] = {"gemm_torch": by_torch}
    return variants | {"gemm_comet": by_comet} if w1.is_cuda else variants


def tile_table(expert_counts: tuple[int, ...], device: torch.device | str) -> TileTable:
    """Lay the rows out as the plan does, in one phase, every expert from a multiple of 128 rows.

    Example: counts (130, 0, 5): tiles ``[[0, 0, 128, 0], [0, 128, 2, 0], [2, 256, 5, 0]]``.
    """
    experts = torch.arange(len(expert_counts), dtype=torch.int32, device=device)
    ids = experts.repeat_interleave(torch.tensor(expert_counts, device=device))
    return tiles_of_ids(ids[:, None], len(expert_counts), BLOCK_ROWS)[0]


def exchange_alone(path: SymmetricPath, inputs: Sequence[Inputs], w2: Tensor) -> Callable[[int], tuple[Tensor, ...]]:
    """A variant of the whole layer without GEMMs: plan, dispatch and combine of an input set, all blocks at it."""
    hidden = w2.new_zeros(path.backend.rules.max_routed_rows, w2.shape[2])

    def run(index: int) -> tuple[Tensor, ...]:
        tokens, ids, weights, _ = inputs[index]
        plan = path.backend.plan(ids, weights)
        path.backend.dispatch(tokens, plan)
        if path.name == "fused":  # no tiles, so no GEMM: the expert outputs that travel are whatever is in memory
            without_tiles = replace(
                plan,
                tile_starts=torch.zeros_like(plan.tile_starts),
                segment_counts=torch.zeros_like(plan.segment_counts),
            )
            path.backend.gemm_combine(hidden, w2, without_tiles)
        else:
            y = hidden.new_zeros(hidden.shape[0], w2.shape[1])
            path.backend.combine(y, plan, weighted=True)
        return ()

    return run


def network_alone(path: NodesPath, inputs: Sequence[Inputs]) -> Callable[[int], tuple[Tensor, ...]]:
    """A variant of the network's two legs: own tokens to the other nodes, and as many sums as guests came back."""

    def run(index: int) -> tuple[Tensor, ...]:
        guests_of(path, RoutedTokens(*inputs[index][:3]))
        return ()

    return run


def guests_of(path: NodesPath, routed: RoutedTokens) -> list[RoutedTokens]:
    """Send tokens to the other nodes, and each guest home as it came; returns the guests that came here."""
    trip, came = path.rails.depart(routed, trains=False), []
    for stop in path.rails.stops:
        came.append(trip.guests(stop))
        trip.send_home(stop, came[-1].tokens)
    trip.arrive(routed.tokens)
    return came


def node_alone(
    path: NodesPath, inputs: Sequence[Inputs], w1: Tensor, w2: Tensor, biases: Biases | None
) -> Callable[[int], tuple[Tensor, ...]]:
    """A variant of what runs inside the nodes: own tokens and guests that came before."""
    parts = []
    for tokens, ids, weights, _ in inputs:
        routed = RoutedTokens(tokens, ids, weights)
        first = path.first_part(len(ids))
        came = [RoutedTokens(*(each.clone() for each in guests)) for guests in guests_of(path, routed)]
        own = routed._replace(top_k_ids=path.rails.ids_in(path.nodes.node, ids))
        last = [own.part(slice(first, None))] * path.runs.is_split
        runs = [own.part(slice(0, first)), *came, *last]
        parts.append(runs if path.runs.parts else [joined(runs)])

    def run(index: int) -> tuple[Tensor, ...]:
        for part in parts[index]:
            with path.workspace.forward_step:
                forward(part, w1, w2, path.backend, biases, trains=False)
        return ()

    return run


NUM_CHUNKS = 2


@torch.no_grad()
def pipelined_experts(layer: Layer, process_group: ProcessGroup | None, *routed: Tensor) -> Tensor:
    """The plain path on two halves of the tokens: one travels while the other is computed."""
    layout = layer.layout
    require(layout.world_size > 1, f"world_size={layout.world_size} must be more than 1 to pipeline communication")
    tokens, ids, weights = (each.tensor_split(NUM_CHUNKS) for each in routed)
    exchanges = [make_exchange(chunk, layout, process_group) for chunk in ids]
    fan_out = layout.top_k * layout.tp
    arriving, returning = [], []
    for chunk, exchange in zip(tokens, exchanges, strict=True):
        sent = chunk.index_select(0, exchange.send_entries // fan_out)
        arriving.append(_start_all_to_all(sent, exchange.send_counts, exchange.recv_counts, process_group))
    for (received, arrival, _sent), exchange in zip(arriving, exchanges, strict=True):
        arrival.wait()
        outputs = expert_rows(received, layer.w1, layer.w2, exchange, layer.config.activation, layer.biases)
        returning.append(_start_all_to_all(outputs, exchange.recv_counts, exchange.send_counts, process_group))
    results = []
    for number, (returned, arrival, _outputs) in enumerate(returning):
        arrival.wait()
        results.append(weighted_sum(returned, ids[number], weights[number], exchanges[number]))
    return torch.cat(results)


@torch.no_grad()
def all_gather_experts(layer: Layer, process_group: ProcessGroup | None, *routed: Tensor) -> Tensor:
    """All-gather the tokens, compute this rank's experts on all, reduce-scatter; T must be equal on all ranks."""
    layout, w2, tokens = layer.layout, layer.w2, routed[0]
    num_ranks, first = layout.world_size, layout.first_expert
    tokens_all, ids_all, weights_all = (_all_gather(tensor, num_ranks, process_group) for tensor in routed)
    owned = (ids_all >= first) & (ids_all < first + layout.experts_local)
    alone = ExpertLayout(num_experts=layout.experts_local, top_k=layout.top_k, ep=1, tp=1, rank=0)
    exchange = make_exchange((ids_all - first).masked_fill(~owned, -1), alone, None)
    b1, b2 = added_biases(layer.biases, layout)
    added = None if b1 is None else Biases(b1, torch.zeros_like(w2[:, :, 0]) if b2 is None else b2)
    rows = dispatch_rows(tokens_all, exchange, None)
    outputs = expert_rows(rows, layer.w1, w2, exchange, layer.config.activation, added)
    weights = weights_all.flatten()[exchange.send_entries, None]
    partial = torch.zeros(tokens_all.shape, dtype=accumulator_dtype(tokens.dtype), device=tokens.device)
    partial.index_add_(0, exchange.send_entries // layout.top_k, outputs * weights)
    partial = partial.to(tokens.dtype)
    if num_ranks == 1:
        return partial
    result = torch.empty_like(tokens)
    dist.reduce_scatter_tensor(result, partial, group=process_group)
    return result


def _start_all_to_all(
    rows: Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...], process_group: ProcessGroup | None
) -> tuple[Tensor, Work, Tensor]:
    """Begin an all-to-all; the rows sent come back too, so that they live until it is over."""
    received = rows.new_empty(sum(recv_counts), rows.shape[1])
    work = dist.all_to_all_single(
        received, rows, list(recv_counts), list(send_counts), group=process_group, async_op=True
    )
    assert work is not None, "an asynchronous collective returns its handle"
    return received, work, rows


def _all_gather(tensor: Tensor, num_ranks: int, process_group: ProcessGroup | None) -> Tensor:
    if num_ranks == 1:
        return tensor
    gathered = tensor.new_empty(num_ranks * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=process_group)
    return gathered
