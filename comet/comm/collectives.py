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
from comet.comm.handshake import exchange, this_rank
from comet.errors import AgreedError
from comet.layout import ExpertLayout
from comet.utils.derivatives import first_only

ONE_ORDER = (
    "all ranks of a group must call its layers in one order, forward and backward, with gradients on all of them or on "
    "none; a backward pass is left out on all of them, or on none"
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
    """Copy rank 0's values to every rank of the default group, in place: ranks may compute other last bits."""
    if this_rank()[1] > 1:
        dist.broadcast(values, 0)
    return values


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of ``dtype`` are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def call_number(layer: int, *wanted: bool) -> int:
    """Pack into one number which layer is called, and which of up to four gradients are wanted.

    Example: layer 3 and (True, False, True): 3 * 16 + 5 = 53.
    """
    return layer * 16 + sum(flag << bit for bit, flag in enumerate(wanted))


def check_calls(calls: Sequence[int], *names: str, numbers: Sequence[int] = ()) -> None:
    """Raise ``AgreedError`` unless all ranks begin the same pass of the same layer and want the same gradients.

    Example: calls ``[51, 50]`` of names "tokens" and "w1 or w2": layer 3, requires_grad of tokens differs, True on rank
    0 only. Calls ``[49, 49]`` with numbers ``[5, 7]``: backward passes of calls 5 and 7 of layer 3; 0: a call begins.
    """
    numbers = numbers or [0] * len(calls)
    for rank, (call, number) in enumerate(zip(calls, numbers, strict=True)):
        if (call >> 4, number) != (calls[0] >> 4, numbers[0]):
            raise AgreedError(other_call(0, calls[0], rank, call, numbers[0], number))
    for bit, name in enumerate(names):
        flags = [bool(call >> bit & 1) for call in calls]
        if len(set(flags)) > 1:
            raise AgreedError(
                f"requires_grad={flags} of {name} on ranks 0 to {len(flags) - 1} must be equal on all ranks of the "
                "group, which exchange gradients in the backward pass; freeze on all of them, or on none"
            )


def other_call(rank: int, call: int, peer: int, other: int, number: int = 0, other_number: int = 0) -> str:
    """Return the message for two ranks that began different passes at the same time; numbers as of ``check_calls``."""
    mine, theirs = _began(call, number), _began(other, other_number)
    return f"rank {rank} {mine} (layers are counted as they are made) while rank {peer} {theirs}: {ONE_ORDER}"


def _began(call: int, number: int) -> str:
    if number:
        return f"began the backward pass of call {number} of layer {call >> 4}"
    return f"called layer {call >> 4} {'with' if call & 15 else 'without'} gradients"


def bad_ids(top_k_ids: Tensor, layout: ExpertLayout) -> Tensor:
    """Mark the ids, of any shape, that are neither -1 nor those of an expert."""
    return (top_k_ids < -1) | (top_k_ids >= layout.num_experts)


def check_ids(num_bad: Sequence[int], top_k_ids: Tensor, layout: ExpertLayout) -> None:
    """Raise ``AgreedError`` for the first rank with bad ids, ``num_bad`` of each; there it names such an id."""
    for rank, num in enumerate(num_bad):
        if num:
            shown = int(top_k_ids[bad_ids(top_k_ids, layout)][0]) if rank == layout.rank else f"{num} bad ids"
            raise AgreedError(
                f"top_k_ids of rank {rank} contain {shown}; every id must be -1 (masked) or in "
                f"[0, num_experts={layout.num_experts})"
            )


class CollectiveSteps:
    """The passes of one layer by collectives: forward and backward are a step of the group each, of all in them."""

    def __init__(self, comm: Communicator, process_group: ProcessGroup, number: int) -> None:
        self.comm, self.process_group, self.call = comm, process_group, call_number(number)

    def __call__(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """``compute(*tensors)``, differentiably."""
        with self.comm.step("forward pass", collectives=True):
            trains = wants_grad(*tensors)
            number = self.begin(0, trains=trains)
            if not trains:
                return compute(*tensors)
            output: Tensor = _StepBackward.apply(self, number, compute, *tensors)
            return output

    def begin(self, number: int, *, trains: bool = True) -> int:
        """Let all ranks say which pass they begin, and return its number (collective).

        The message has one size, unlike those of a pass itself: gloo ends a process that receives too much, and NCCL
        writes past the end. ``number`` and the error are those of ``check_calls``.
        """
        calls, numbers = zip(*exchange(self.process_group, (self.call + trains, number), self.comm.device), strict=True)
        check_calls(calls, numbers=numbers)
        self.comm.num_passes += 1
        return self.comm.num_passes


class _StepBackward(torch.autograd.Function):
    """A graph inside of one node, so that one call has all of its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, steps: CollectiveSteps, number: int, compute: Callable[..., Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.steps, ctx.number = steps, number
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
        output, needed = ctx.output, ctx.needs_input_grad[3:]
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if not kept:
            ctx.output = None
        wanted = [leaf for leaf, is_needed in zip(ctx.leaves, needed, strict=True) if is_needed]
        with ctx.steps.comm.step("backward pass", collectives=True):
            ctx.steps.begin(ctx.number)
            grads = iter(torch.autograd.grad(output, wanted, grad, retain_graph=kept, allow_unused=True))
        return None, None, None, *(next(grads) if is_needed else None for is_needed in needed)


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
