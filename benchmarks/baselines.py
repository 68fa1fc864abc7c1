"""Other ways to run routed experts over ``torch.distributed``, forward only: what a careful user would try first.

Same arguments and result as ``comet.plain.plain_experts``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from comet.collectives import accumulator_dtype
from comet.config import require
from comet.layout import ExpertLayout
from comet.plain import dispatch_rows, expert_rows, make_exchange, weighted_sum

NUM_CHUNKS = 2


@torch.no_grad()
def pipelined_experts(
    tokens: Tensor,
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    layout: ExpertLayout,
    process_group: ProcessGroup | None,
) -> Tensor:
    """The plain path on two halves of the tokens: one travels while the other is computed.

    Raises:
        ValueError: If the layout is one rank: nothing travels.
    """
    require(layout.world_size > 1, f"world_size={layout.world_size} must be more than 1 to pipeline communication")
    ids, weights = top_k_ids.tensor_split(NUM_CHUNKS), top_k_weights.tensor_split(NUM_CHUNKS)
    exchanges = [make_exchange(chunk, layout, process_group) for chunk in ids]
    fan_out = layout.top_k * layout.tp
    arriving, returning = [], []
    for chunk, exchange in zip(tokens.tensor_split(NUM_CHUNKS), exchanges, strict=True):
        sent = chunk.index_select(0, exchange.send_entries // fan_out)
        arriving.append(_start_all_to_all(sent, exchange.send_counts, exchange.recv_counts, process_group))
    for (received, arrival, _sent), exchange in zip(arriving, exchanges, strict=True):
        arrival.wait()
        outputs = expert_rows(received, w1, w2, exchange)
        returning.append(_start_all_to_all(outputs, exchange.recv_counts, exchange.send_counts, process_group))
    results = []
    for number, (returned, arrival, _outputs) in enumerate(returning):
        arrival.wait()
        results.append(weighted_sum(returned, ids[number], weights[number], exchanges[number]))
    return torch.cat(results)


@torch.no_grad()
def all_gather_experts(
    tokens: Tensor,
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    layout: ExpertLayout,
    process_group: ProcessGroup | None,
) -> Tensor:
    """All-gather the tokens, compute this rank's experts on all, reduce-scatter; T must be equal on all ranks."""
    num_ranks, first = layout.world_size, layout.first_expert
    tokens_all, ids_all, weights_all = (
        _all_gather(tensor, num_ranks, process_group) for tensor in (tokens, top_k_ids, top_k_weights)
    )
    owned = (ids_all >= first) & (ids_all < first + layout.experts_local)
    alone = ExpertLayout(num_experts=layout.experts_local, top_k=layout.top_k, ep=1, tp=1, rank=0)
    exchange = make_exchange((ids_all - first).masked_fill(~owned, -1), alone, None)
    outputs = expert_rows(dispatch_rows(tokens_all, exchange, None), w1, w2, exchange)
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
