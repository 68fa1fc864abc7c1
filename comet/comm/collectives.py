"""Differentiable collectives of ``torch.distributed`` (gloo and NCCL) for the paths that need no symmetric memory.

Contract: every rank of the group calls the same collectives in the same order, in forward and in backward; so a tensor
that requires a gradient on one rank requires it on all (``check_grad_modes``). ``process_group=None`` is the default
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from comet.comm.base import Communicator
from comet.comm.handshake import this_rank
from comet.config import require
from comet.layout import ExpertLayout
from comet.utils.derivatives import first_only

ONE_ORDER = (
    "all ranks of a group must call its layers in one order, forward and backward, with gradients on all of them or on "
    "none"
)


def all_to_all_rows(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], process_group: ProcessGroup | None
) -> Tensor:
    """Send consecutive runs of rows to the ranks, in rank order; the backward pass sends the gradients back.

    Example: W=2, rank 0 holds rows ``[a, b, c]`` with send counts (1, 2), rank 1 holds ``[d]`` with (1, 0): rank 0
    receives ``[a, d]`` with receive counts (1, 1), rank 1 receives ``[b, c]`` with (2, 0).

    Args:
        rows: ``(N, D)``, N = sum of ``send_counts``; may be 0.

    Returns:
        ``(R, D)``, R = sum of ``recv_counts``, in order of the source rank.
    """
    return _AllToAllRows.apply(rows, send_counts, recv_counts, process_group)


def all_gather_stacked(tensor: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """Stack every rank's tensor; the backward pass sums the gradients of all ranks, in rank order, in float32.

    Example: W=2, rank 0 holds ``[1]``, rank 1 holds ``[2]``: both get ``[[1], [2]]``. The gradients
    ``[[3], [4]]`` on rank 0 and ``[[5], [6]]`` on rank 1 become ``[8]`` on rank 0 and ``[10]`` on rank 1.
    """
    return _AllGatherStacked.apply(tensor, process_group)


def of_first_rank(values: Tensor) -> Tensor:
    """What rank 0 decided, on every rank of the default group, in place: last bits of what ranks compute may differ."""
    if this_rank()[1] > 1:
        dist.broadcast(values, 0)
    return values


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def wants_grad(*tensors: Tensor) -> bool:
    """Whether a gradient is recorded for any of them."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def call_number(layer: int, *wanted: bool) -> int:
    """As one number for a message to all ranks, which layer is called, and which of up to four gradients are wanted.

    Example: layer 3 and (True, False, True): 3 * 16 + 5 = 53.
    """
    return layer * 16 + sum(flag << bit for bit, flag in enumerate(wanted))


def check_calls(calls: Sequence[int], *names: str) -> None:
    """Raise ``ValueError`` unless all ranks call the same layer and want the same gradients, for which they would wait.

    Example: calls ``[51, 50]`` of names "tokens" and "w1 or w2": layer 3, requires_grad of tokens differs, True on rank
    0 only.
    """
    for rank, call in enumerate(calls):
        if call >> 4 != calls[0] >> 4:
            raise ValueError(other_call(0, calls[0], rank, call))
    for bit, name in enumerate(names):
        flags = [bool(call >> bit & 1) for call in calls]
        require(
            len(set(flags)) == 1,
            f"requires_grad={flags} of {name} on ranks 0 to {len(flags) - 1} must be equal on all ranks of the group, "
            "which exchange gradients in the backward pass; freeze on all of them, or on none",
        )


def other_call(rank: int, call: int, peer: int, other: int) -> str:
    """Which layers two ranks called at the same time, and the rule."""
    mine, theirs = (f"layer {each >> 4} {'with' if each & 15 else 'without'} gradients" for each in (call, other))
    return (
        f"rank {rank} called {mine} (layers are counted as they are made) while rank {peer} called {theirs}: "
        + ONE_ORDER
    )


def bad_ids(top_k_ids: Tensor, layout: ExpertLayout) -> Tensor:
    """Where ids, of any shape, are neither -1 nor those of an expert."""
    return (top_k_ids < -1) | (top_k_ids >= layout.num_experts)


def check_ids(num_bad: Sequence[int], top_k_ids: Tensor, layout: ExpertLayout) -> None:
    """Raise ``ValueError`` on all ranks for the first with bad ids, ``num_bad`` of each; there it names such an id."""
    for rank, num in enumerate(num_bad):
        if num:
            shown = int(top_k_ids[bad_ids(top_k_ids, layout)][0]) if rank == layout.rank else f"{num} bad ids"
            raise ValueError(
                f"top_k_ids of rank {rank} contain {shown}; every id must be -1 (masked) or in "
                f"[0, num_experts={layout.num_experts})"
            )


def in_steps(comm: Communicator, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``compute(*tensors)`` by collectives: forward and backward are a step of the group each, of all in them."""
    with comm.step("forward pass", collectives=True):
        if not wants_grad(*tensors):
            return compute(*tensors)
        output: Tensor = _StepBackward.apply(comm, compute, *tensors)
        return output


class _StepBackward(torch.autograd.Function):
    """A graph inside of one node, so that one call has all of its backward pass."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.comm = comm
        ctx.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            ctx.output = compute(*ctx.leaves)
        output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    @first_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.output is None:
            raise RuntimeError("a second backward pass of this graph needs retain_graph=True in the first")
        output, needed = ctx.output, ctx.needs_input_grad[2:]
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if not kept:
            ctx.output = None
        wanted = [leaf for leaf, is_needed in zip(ctx.leaves, needed, strict=True) if is_needed]
        with ctx.comm.step("backward pass", collectives=True, refuses=False):
            ctx.comm.in_flight = True
            grads = iter(torch.autograd.grad(output, wanted, grad, retain_graph=kept, allow_unused=True))
        return None, None, *(next(grads) if is_needed else None for is_needed in needed)


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        process_group: ProcessGroup | None,
    ) -> Tensor:
        # A tensor, so that a checkpoint hands the backward pass the counts of the forward pass that it ran again.
        ctx.save_for_backward(torch.tensor([send_counts, recv_counts]))
        ctx.process_group = process_group  # type: ignore[attr-defined]
        received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), list(recv_counts), list(send_counts), group=process_group)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send_counts, recv_counts = ctx.saved_tensors[0].tolist()  # type: ignore[attr-defined]
        group = ctx.process_group  # type: ignore[attr-defined]
        return _AllToAllRows.apply(grads[0], recv_counts, send_counts, group), None, None, None


class _AllGatherStacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, process_group: ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group  # type: ignore[attr-defined]
        world_size = dist.get_world_size(process_group)
        stacked = tensor.new_empty(world_size, *tensor.shape)
        dist.all_gather(list(stacked.unbind()), tensor.contiguous(), group=process_group)
        return stacked

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        # Not reduce_scatter: gloo and NCCL sum in different orders, and both round to the dtype at every step.
        contributions = torch.empty_like(grad)
        dist.all_to_all_single(contributions, grad, group=ctx.process_group)  # type: ignore[attr-defined]
        return contributions.sum(0, dtype=accumulator_dtype(grad.dtype)).to(grad.dtype), None
