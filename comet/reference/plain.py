"""Expert parallelism without symmetric memory: the plain path (what everybody has today) and the gathered reference.

``plain_experts``: sort routed rows by destination, exchange counts, wait for them on the host, all-to-all, grouped
GEMM, eager activation, grouped GEMM, all-to-all back, un-sort, weighted sum. It overlaps nothing, so it is the baseline
of the benchmarks, and it runs wherever ``torch.distributed`` does. ``gather_reference_experts`` moves the weights, not
the tokens, and runs ``comet.reference.layer`` on them: slow, and the specification on several ranks.

Both are differentiable in tokens, weights, w1, w2 and biases. Letters as in the design: T tokens here, K slots each, D,
F, E experts, e of this shard, W = EP x TP ranks; N = rows sent, R = rows received. Not covered: a capacity factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from comet.comm.collectives import (
    accumulator_dtype,
    all_gather_stacked,
    all_to_all_rows,
    bad_ids,
    call_number,
    check_calls,
    check_ids,
    wants_grad,
)
from comet.comm.handshake import await_collectives, to_host
from comet.config import check_token_dtype, require
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.reference.layer import reference_experts
from comet.utils.autocast import product, without_autocast
from comet.utils.match import Sizes, check_id_dtype

# routed tokens, w1, w2, layout, process_group, activation, biases -> (T, D), as plain_experts
CollectiveExperts = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExchange:
    """The exchange of routed rows on the plain path; a routed row goes to all TP ranks of its expert's shard.

    Entry ``(t*K + k)*TP + j`` is token t's slot k for TP rank j.
    """

    layout: ExpertLayout  # the experts over the ranks
    send_entries: Tensor  # (N,) int64: entries by destination rank, then local expert, then entry; no masked ones
    send_counts: tuple[int, ...]  # W rows sent to each rank
    recv_counts: tuple[int, ...]  # W rows received from each rank
    recv_order: Tensor  # (R,) int64: received rows by local expert, then source rank, then entry
    expert_counts: tuple[int, ...]  # e received rows of each local expert
    expert_ends: Tensor  # (e,) int32: their running sum, the offsets of a grouped GEMM


class LowRank(NamedTuple):
    """A change ``up @ down`` of the weights ``(e, O, I)`` of experts."""

    down: Tensor  # (e, r, I)
    up: Tensor  # (e, O, r)


Adapters = tuple[LowRank | None, LowRank | None]  # one for w1, one for w2


def plain_experts(
    routed: RoutedTokens,
    w1: Tensor,
    w2: Tensor,
    layout: ExpertLayout,
    process_group: ProcessGroup | None,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
    *,
    interleaved: bool = False,
    adapters: Adapters = (None, None),
) -> Tensor:
    """Send every token to the ranks of its experts and back, one step after the other; collective.

    Args:
        routed: T may be 0 and differ between ranks; ids may be int64, weights are float64 with float64 tokens.
        w1: ``(e, 2F/TP, D)``, gate rows first, then up rows; dtype of ``tokens``.
        w2: ``(e, D, F/TP)``, dtype of ``tokens``.
        process_group: The W ranks; not used when W is 1.
        biases: ``(e, 2F/TP)`` and ``(e, D)``, dtype of ``tokens``; ``None``: there are none.
        interleaved: Whether rows of w1 and b1 are gate and up in turn, as gpt-oss has them.
        adapters: What is added to w1 and to w2.

    Returns:
        ``(T, D)``: ``round(sum over slots and TP ranks of weight * output)``, summed in float32.

    Raises:
        ValueError: If a shape, dtype or id breaks the rules above, or the group is not the layout's; on all ranks, if
            gradients are wanted on some of them only.
    """
    tokens, top_k_ids, top_k_weights = routed
    check_inputs(routed, w1, w2, layout, tokens.dtype)
    call = call_number(0, wants_grad(tokens), wants_grad(tokens, w1, w2, *(biases or ())))
    exchange = make_exchange(top_k_ids, layout, process_group, call)
    with without_autocast(tokens.device):
        received = dispatch_rows(tokens, exchange, process_group)
        outputs = expert_rows(
            received, w1, w2, exchange, activation, biases, interleaved=interleaved, adapters=adapters
        )
        returned = return_rows(outputs, exchange, process_group)
        return weighted_sum(returned, top_k_ids, top_k_weights, exchange)


def make_exchange(
    top_k_ids: Tensor, layout: ExpertLayout, process_group: ProcessGroup | None, call: int = 0
) -> RowExchange:
    """Decide which rows travel where; waits once for the device; collective.

    Example: E=4, EP=2, TP=1, K=2, rank 0 with ids ``[[3, 0], [1, -1]]`` and rank 1 with no tokens: on rank 0
    ``send_entries = [1, 2, 0]``, ``send_counts = (2, 1)``, ``recv_counts = (2, 0)``, ``expert_counts = (1, 1)``; on
    rank 1 ``recv_counts = (1, 0)``, ``expert_counts = (0, 1)``.

    Args:
        call: ``call_number`` of whether gradients of tokens, and of rows, are wanted.
    """
    check_group(layout, process_group)
    num_ranks, num_local = layout.world_size, layout.experts_local
    bad = bad_ids(top_k_ids, layout)
    bins = _destination_bins(top_k_ids.masked_fill(bad, -1), layout)
    counts = torch.zeros(num_ranks * num_local + 1, dtype=torch.int64, device=bins.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    # The last bin holds the masked entries. The last columns tell all ranks of bad ids and of what is called
    # here, so that all raise and none waits.
    told = [bad.sum().expand(num_ranks, 1), counts.new_full((num_ranks, 1), call)]
    sent = torch.cat([counts[:-1].view(num_ranks, num_local), *told], dim=1)
    received = sent
    if num_ranks > 1:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=process_group)
    sent_host, received_host = to_host(torch.stack([sent, received]), process_group)
    check_calls([row.pop() for row in received_host], "tokens", "tokens, w1 or w2")
    check_ids([row.pop() for row in received_host], top_k_ids, layout)
    send_counts = tuple(sum(row[:num_local]) for row in sent_host)
    recv_counts = tuple(map(sum, received_host))
    received = received[:, :num_local]
    local_experts = torch.arange(num_local, device=bins.device).repeat(num_ranks)
    recv_experts = local_experts.repeat_interleave(received.flatten(), output_size=sum(recv_counts))
    return RowExchange(
        layout=layout,
        send_entries=bins.argsort(stable=True)[: sum(send_counts)],
        send_counts=send_counts,
        recv_counts=recv_counts,
        recv_order=recv_experts.argsort(stable=True),
        expert_counts=tuple(map(sum, zip(*received_host, strict=True))),
        expert_ends=received.sum(0).cumsum(0).to(torch.int32),
    )


def dispatch_rows(tokens: Tensor, exchange: RowExchange, process_group: ProcessGroup | None) -> Tensor:
    """Send ``(T, D)`` tokens to the ranks of their experts; returns ``(R, D)`` received rows by source rank."""
    layout = exchange.layout
    sent = _GatherRows.apply(tokens, exchange.send_entries, layout.top_k * layout.tp)
    if layout.world_size == 1:
        return sent
    return all_to_all_rows(sent, exchange.send_counts, exchange.recv_counts, process_group)


def expert_rows(
    received: Tensor,
    w1: Tensor,
    w2: Tensor,
    exchange: RowExchange,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
    *,
    interleaved: bool = False,
    adapters: Adapters = (None, None),
) -> Tensor:
    """Run every received row ``(R, D)`` through its local expert; returns ``(R, D)`` in the same order."""
    rows = _GatherRows.apply(received, exchange.recv_order, 1)
    counts, ends = exchange.expert_counts, exchange.expert_ends
    pre = _adapted_matmul(rows, w1, adapters[0], counts, ends)
    if biases is not None:
        pre = _AddBias.apply(pre, biases.b1, counts, True)
    gate, up = (pre[:, ::2], pre[:, 1::2]) if interleaved else pre.chunk(2, dim=-1)
    outputs = _adapted_matmul(activation.forward(gate, up), w2, adapters[1], counts, ends)
    if biases is not None:
        outputs = _AddBias.apply(outputs, biases.b2, counts, exchange.layout.tp_rank == 0)
    return torch.empty_like(outputs).index_copy(0, exchange.recv_order, outputs)


def return_rows(outputs: Tensor, exchange: RowExchange, process_group: ProcessGroup | None) -> Tensor:
    """Send ``(R, D)`` outputs back to where their rows came from; returns ``(N, D)`` in the order they were sent."""
    if exchange.layout.world_size == 1:
        return outputs
    return all_to_all_rows(outputs, exchange.recv_counts, exchange.send_counts, process_group)


def weighted_sum(returned: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, exchange: RowExchange) -> Tensor:
    """Add up each token's outputs: ``(N, D)`` rows and ``(T, K)`` ids and weights to ``(T, D)``."""
    num_tokens, top_k = top_k_ids.shape
    fan_out = top_k * exchange.layout.tp
    entries = returned.new_zeros(num_tokens * fan_out, returned.shape[1])
    entries = entries.index_copy(0, exchange.send_entries, returned).view(num_tokens, fan_out, returned.shape[1])
    weights = top_k_weights.masked_fill(top_k_ids < 0, 0.0)  # a NaN weight of a masked slot does no harm
    weights = weights.repeat_interleave(exchange.layout.tp, dim=1).to(accumulator_dtype(returned.dtype))
    return (entries * weights.unsqueeze(-1)).sum(1).to(returned.dtype)


def _adapted_matmul(
    rows: Tensor, weights: Tensor, change: LowRank | None, expert_counts: tuple[int, ...], expert_ends: Tensor
) -> Tensor:
    """Multiply rows as ``grouped_matmul`` does, by weights with a change that is never added to them."""
    found = grouped_matmul(rows, weights, expert_counts, expert_ends)
    if change is None:
        return found
    inner = grouped_matmul(rows, change.down, expert_counts, expert_ends)
    return found + grouped_matmul(inner, change.up, expert_counts, expert_ends)


def grouped_matmul(rows: Tensor, weights: Tensor, expert_counts: tuple[int, ...], expert_ends: Tensor) -> Tensor:
    """Multiply rows ``(R, I)``, by expert, by its weight ``(e, O, I)``: torch's grouped GEMM for bf16 on a GPU, else
    one by one.

    Example: rows ``[[1], [2], [3]]``, weights ``[[[10]], [[100]]]``, counts (1, 2), ends ``[1, 3]`` give
    ``[[10], [200], [300]]``.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] > 0:
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=expert_ends)
    runs = rows.split(list(expert_counts))
    return torch.cat([product(run, weight) for run, weight in zip(runs, weights.unbind(), strict=True)])


def gather_reference_experts(
    routed: RoutedTokens,
    w1: Tensor,
    w2: Tensor,
    layout: ExpertLayout,
    process_group: ProcessGroup | None,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """Gather all experts and run the reference on this rank's tokens; collective, differentiable, memory-hungry.

    Args, and what is raised: as for ``plain_experts``; the gradients of w1 and w2 sum over the tokens of all ranks.
    """
    check_inputs(routed, w1, w2, layout, routed.tokens.dtype)
    check_group(layout, process_group)
    if layout.world_size > 1:
        number = call_number(0, wants_grad(w1), wants_grad(w2), *(wants_grad(bias) for bias in biases or ()))
        call = torch.tensor(number, device=routed.tokens.device)
        check_calls(to_host(all_gather_stacked(call, process_group), process_group), "w1", "w2", "b1", "b2")
        w1, w2 = gather_weights(w1, w2, layout, process_group)
        biases = None if biases is None else gather_biases(biases, layout, process_group)
        await_collectives(process_group, routed.tokens.device)
    return reference_experts(*routed, w1, w2, ep=layout.ep, tp=layout.tp, activation=activation, biases=biases)


def gather_weights(
    w1: Tensor, w2: Tensor, layout: ExpertLayout, process_group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """All experts from every rank's shard: ``(e, 2F/TP, D)``, ``(e, D, F/TP)`` to ``(E, 2F, D)``, ``(E, D, F)``."""
    columns = all_gather_stacked(w2, process_group).view(layout.ep, layout.tp, *w2.shape).movedim(1, 3)
    return _gather_gate_up(w1, layout, process_group), columns.reshape(layout.num_experts, w2.shape[1], -1)


def _gather_gate_up(part: Tensor, layout: ExpertLayout, process_group: ProcessGroup | None) -> Tensor:
    """``(e, 2F/TP, ..)`` of every rank as ``(E, 2F, ..)``."""
    experts, _, *rest = part.shape
    ranks = all_gather_stacked(part, process_group).view(layout.ep, layout.tp, experts, 2, -1, *rest)
    return ranks.movedim(1, 3).reshape(layout.num_experts, -1, *rest)


def gather_biases(biases: Biases, layout: ExpertLayout, process_group: ProcessGroup | None) -> Biases:
    """Gather all experts' biases: every rank's ``(e, 2F/TP)``, ``(e, D)`` become ``(E, 2F)``, ``(E, D)``.

    The ranks of a shard hold the same b2: the first rank's is taken, and its gradient serves all of them.
    """
    b2 = all_gather_stacked(biases.b2, process_group).view(layout.ep, layout.tp, *biases.b2.shape)
    copies = b2 - b2.detach()  # 0, with gradients
    whole = b2[:, 0].detach() + copies.sum(1)
    return Biases(_gather_gate_up(biases.b1, layout, process_group), whole.flatten(0, 1))


def check_group(layout: ExpertLayout, process_group: ProcessGroup | None) -> None:
    """Raise ``ValueError`` unless the process group has the layout's size and gives this process the layout's rank."""
    if layout.world_size == 1:
        return
    size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    require(
        size == layout.world_size,
        f"process_group of {size} ranks must have ep x tp = {layout.world_size} of the layout",
    )
    require(
        rank == layout.rank, f"rank={layout.rank} of the layout must be this process's rank {rank} in process_group"
    )


def check_inputs(routed: RoutedTokens, w1: Tensor, w2: Tensor, layout: ExpertLayout, dtype: torch.dtype | None) -> None:
    """Raise ``ValueError`` unless these are as for ``plain_experts``, with weights of this dtype, or of any."""
    tokens, top_k_ids, top_k_weights = routed
    device = tokens.device
    sizes = Sizes(K=(layout.top_k, "top_k"), e=(layout.experts_local, "num_experts / ep"))
    sizes.match("tokens", tokens, "T D")
    check_token_dtype(tokens.dtype)
    sizes.match("top_k_ids", top_k_ids, "T K", device=device)
    sizes.match("top_k_weights", top_k_weights, "T K", device=device)
    check_id_dtype(top_k_ids)
    sizes.match("w2", w2, "e D F", dtype=dtype, device=device)
    sizes.match("w1", w1, "e 2F D", dtype=dtype, device=device)


def _destination_bins(top_k_ids: Tensor, layout: ExpertLayout) -> Tensor:
    """Destination rank x e + local expert of every entry, W x e for masked ones: ``(T, K)`` to ``(T*K*TP,)`` int64."""
    ids = top_k_ids.long().unsqueeze(-1)
    shard, local_expert = ids // layout.experts_local, ids % layout.experts_local
    ranks = shard * layout.tp + torch.arange(layout.tp, device=ids.device)
    bins = ranks * layout.experts_local + local_expert
    return bins.masked_fill(ids < 0, layout.world_size * layout.experts_local).flatten()


class _GatherRows(torch.autograd.Function):
    """``rows[entries // fan_out]`` for distinct entries; a row's gradient sums its entries in order, in float32.

    The backward pass of ``index_select`` would add with atomics, in the dtype of the rows.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, entries: Tensor, fan_out: int) -> Tensor:
        ctx.save_for_backward(entries)
        ctx.num_rows, ctx.fan_out = rows.shape[0], fan_out  # type: ignore[attr-defined]
        return rows.index_select(0, entries // fan_out)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (entries,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, fan_out = grads[0], ctx.fan_out  # type: ignore[attr-defined]
        slots = grad.new_zeros(ctx.num_rows * fan_out, grad.shape[1])  # type: ignore[attr-defined]
        slots = slots.index_copy(0, entries, grad)
        if fan_out == 1:
            return slots, None, None
        slots = slots.view(-1, fan_out, grad.shape[1])
        return slots.sum(1, dtype=accumulator_dtype(grad.dtype)).to(grad.dtype), None, None


class _AddBias(torch.autograd.Function):
    """Each row with its expert's bias, or without; the bias has its gradient, summed in order, either way.

    Under TP the ranks of a shard hold the bias of the outputs alike, and see the gradients of the same rows; one of
    them adds it.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, bias: Tensor, counts: tuple[int, ...], adds: bool) -> Tensor:
        ctx.save_for_backward(torch.tensor(counts))
        ctx.bias_dtype = bias.dtype  # type: ignore[attr-defined]
        if not adds:
            return rows.view_as(rows)
        per_row = bias.repeat_interleave(torch.tensor(counts, device=bias.device), dim=0, output_size=rows.shape[0])
        return rows + per_row

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, counts = grads[0], ctx.saved_tensors[0].tolist()  # type: ignore[attr-defined]
        sums = [run.sum(0, dtype=accumulator_dtype(grad.dtype)) for run in grad.split(counts)]
        return grad, torch.stack(sums).to(ctx.bias_dtype), None, None  # type: ignore[attr-defined]
