"""The layer in plain torch over symmetric memory: the CPU path and the oracle of ``comet.layer.fused``.

The order of work is that of the kernels: local rows first, then each phase as its source ranks' rows arrive; partial
sums in slot order, final sums in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from comet.comm.base import SymmTensor
from comet.comm.collectives import accumulator_dtype, check_calls
from comet.comm.signals import signal, wait
from comet.config import require
from comet.errors import CapacityError
from comet.kernels.runtime.activation import Activation
from comet.kernels.runtime.limits import CHUNK_FLAGS, CHUNK_ROWS, COMBINE_CHUNK_ROWS
from comet.layer.backend import ActivationGradients, Backend
from comet.layer.plan import Plan
from comet.layer.twin.plan import exchange_ids, plan_tensors, receive_ids
from comet.layer.workspace import Workspace
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_rows
from comet.quantization.packed import pack, unpack
from comet.utils.autocast import without_autocast


class Twin(Backend):
    """The layer in plain torch, on CPUs."""

    def _plan(self, ids: Tensor, weights: Tensor, *, trains: bool) -> Plan:
        layout, workspace, rules, device = self.layout, self.workspace, self.rules, self.workspace.comm.device
        require(device.type == "cpu", f"path='twin' needs a workspace on the CPU, this one is on {device}")
        exchange_ids(ids, weights, workspace, call=self.call(trains=trains))
        tensors = plan_tensors(*receive_ids(ids, layout, workspace), layout, rules)
        num_tokens, max_tokens, block_rows = ids.shape[0], workspace.max_tokens, rules.block_rows
        plan = Plan(layout=layout, num_tokens=num_tokens, max_tokens=max_tokens, block_rows=block_rows, **tensors)
        if plan.status[2]:
            raise CapacityError(
                f"rank {layout.rank} needs {int(plan.status[0])} routed rows, more than the {rules.max_routed_rows} "
                f"that max_imbalance={rules.max_imbalance} reserves; raise it or leave it unset, and let no token "
                "name an expert twice"
            )
        return plan

    def dispatch_gemm(
        self, x: Tensor, w1: Tensor | FP8, plan: Plan, b1: Tensor | None = None, *, save_pre_activation: bool
    ) -> tuple[Tensor | FP8, Tensor | None]:
        """Phase by phase."""
        if isinstance(w1, FP8):
            return self._dispatch_gemm_fp8(x, w1, plan, b1), None
        workspace = self.workspace
        push_rows(x, plan, workspace, workspace.recv_rows)
        pre = x.new_empty(plan.routed_row_ids.numel(), w1.shape[1])
        for rows, expert in _tile_runs(plan, workspace):
            torch.mm(workspace.recv_rows.local[plan.routed_row_ids[rows]], w1[expert].T, out=pre[rows])
            if b1 is not None:
                pre[rows] += b1[expert]
        hidden = self.settings.activation.forward(*pre.chunk(2, dim=1))
        return hidden, pre if save_pre_activation else None

    def gemm_combine(self, hidden: Tensor | FP8, w2: Tensor | FP8, plan: Plan, b2: Tensor | None = None) -> Tensor:
        """GEMM, of block FP8 in float32, then ``combine``."""
        if isinstance(hidden, FP8) and isinstance(w2, FP8):
            return self.combine(self._grouped_mm_fp8(hidden, w2, plan, b2), plan, weighted=True)
        assert isinstance(hidden, Tensor)
        assert isinstance(w2, Tensor)
        y = _grouped_mm(hidden, w2.transpose(1, 2), plan)
        if b2 is not None:
            for segment, expert in _nonempty(plan):
                y[segment] += b2[expert]
        return self.combine(y, plan, weighted=True)

    def _dispatch_gemm_fp8(self, x: Tensor, w1: FP8, plan: Plan, b1: Tensor | None) -> FP8:
        workspace = self.workspace
        hidden_size, ffn = x.shape[1], w1.elements.shape[1] // 2
        packed = pack(quantize_rows(x, trusted=True), x.dtype)
        received = workspace.recv_rows.with_columns(packed.shape[1])
        push_rows(packed, plan, workspace, received)
        num_rows = plan.routed_row_ids.numel()
        hidden = torch.empty(num_rows, ffn, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(num_rows, ffn // FP8_BLOCK, dtype=torch.float32, device=x.device)
        for rows, expert in _tile_runs(plan, workspace):
            arrived = unpack(received.local[plan.routed_row_ids[rows]], hidden_size)
            pre = multiply(arrived, w1, expert)
            if b1 is not None:
                pre += b1[expert]
            quantised = quantize_rows(self.settings.activation.forward(*pre.chunk(2, dim=1)), trusted=True)
            hidden[rows], scales[rows] = quantised.elements, quantised.scales
        return FP8(elements=hidden, scales=scales, block_rows=1, trusted=True)

    def _grouped_mm_fp8(self, hidden: FP8, w2: FP8, plan: Plan, b2: Tensor | None) -> Tensor:
        y = torch.empty(hidden.elements.shape[0], w2.elements.shape[1], dtype=self.workspace.shape.dtype)
        for segment, expert in _nonempty(plan):
            rows = FP8(elements=hidden.elements[segment], scales=hidden.scales[segment], block_rows=1, trusted=True)
            product = multiply(rows, w2, expert)
            y[segment] = (product if b2 is None else product + b2[expert]).to(y.dtype)
        return y

    def barrier(self) -> None:
        """Between processes."""
        workspace, comm = self.workspace, self.workspace.comm
        half = (int(workspace.epoch) + 1) & 1
        for calls in workspace.calls.peers:
            calls[half, comm.rank] = self.call(trains=True)
        comm.in_flight = True
        comm.barrier()
        workspace.epoch += 1
        comm.in_flight = False  # should all ranks raise
        check_calls(workspace.calls.local[half].tolist())
        comm.in_flight = True

    def dispatch_dgrad(self, grad_output: Tensor, w2: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """``dispatch``, then GEMM."""
        grads = _rows_of(self.dispatch(grad_output, plan), plan.routed_row_ids)
        return grads, _grouped_mm(grads, w2, plan)

    def activation_backward(self, pre_activation: Tensor, grad_hidden: Tensor, plan: Plan) -> ActivationGradients:
        """Routed rows of no segment are 0."""
        return activation_backward(pre_activation, grad_hidden, plan, self.settings.activation)

    def bias_backward(
        self, grad_pre: Tensor, grad_rows: Tensor, b2: Tensor | None, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Expert by expert."""
        return bias_backward(grad_pre, grad_rows, b2, grad_row_weights, plan)

    def dgrad_combine(
        self, grad_pre: Tensor, w1: Tensor, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """GEMM, then the combine."""
        send_sums(_grouped_mm(grad_pre, w1, plan), plan, self.workspace, weighted=False, row_grads=grad_row_weights)
        grads = torch.zeros(plan.num_tokens, plan.layout.top_k, dtype=torch.float32)
        return sum_arrived(grad_pre.dtype, plan, self.workspace, grads), grads

    def fc1_wgrad(self, grad_pre: Tensor, received: Tensor, plan: Plan) -> Tensor:
        """Expert by expert."""
        return wgrad(grad_pre, _rows_of(received, plan.routed_row_ids), plan)

    def fc2_wgrad(self, grad_rows: Tensor, weighted_hidden: Tensor, plan: Plan) -> Tensor:
        """Expert by expert."""
        return wgrad(grad_rows, weighted_hidden, plan)

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        """Push, then wait for all sources."""
        received = self.workspace.recv_rows.with_columns(rows.shape[1])
        push_rows(rows, plan, self.workspace, received)
        for source, count in enumerate(plan.recv_counts.tolist()):
            if source != plan.layout.rank:
                first = source * (plan.max_tokens // CHUNK_ROWS)
                _wait_chunks(plan, self.workspace, range(first, first + -(-count // CHUNK_ROWS)))
        return received.local

    def combine(self, y: Tensor, plan: Plan, *, weighted: bool) -> Tensor:
        """Send all sums, then wait for those of the others."""
        send_sums(y, plan, self.workspace, weighted=weighted, row_grads=None)
        return sum_arrived(y.dtype, plan, self.workspace, None)


def multiply(rows: FP8, weight: FP8, expert: int) -> Tensor:
    """``(n, N)`` float32: rows ``(n, K)`` times one expert's matrix of ``(e, N, K)``."""
    matrix = FP8(elements=weight.elements[expert], scales=weight.scales[expert], trusted=True)
    with without_autocast(rows.elements.device):
        return rows.dequantize() @ matrix.dequantize().T


def activation_backward(pre: Tensor, grad_hidden: Tensor, plan: Plan, activation: Activation) -> ActivationGradients:
    """Backward of ``weight * activation(gate, up)``, in float32 (float64 stays float64); 0 in rows of no segment."""
    wide, used = accumulator_dtype(pre.dtype), _used_rows(plan)
    ids, slots = plan.routed_row_ids[used], plan.routed_slots[used]
    weights = plan.row_weights[ids, slots][:, None]
    gate, up = pre[used].to(wide).chunk(2, dim=1)
    grad_used = grad_hidden[used].to(wide)
    hidden, *grads = activation.backward(gate, up, weights * grad_used)
    hidden = hidden.to(pre.dtype).to(wide)
    grad_weights = torch.zeros_like(plan.row_weights)
    grad_weights[ids, slots] = (grad_used * hidden).sum(dim=1)
    grad_pre = torch.zeros_like(pre)
    grad_pre[used] = torch.cat(grads, dim=1).to(grad_pre.dtype)
    weighted_hidden = torch.zeros_like(grad_hidden)
    weighted_hidden[used] = (weights * hidden).to(pre.dtype)
    return ActivationGradients(grad_pre, weighted_hidden, grad_weights)


def bias_backward(
    grad_pre: Tensor, grad_rows: Tensor, b2: Tensor | None, grad_row_weights: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Gradients of both biases, and what comes through b2 to the routing weights', in float32 or float64."""
    wide, experts = accumulator_dtype(grad_rows.dtype), plan.segment_counts.numel()
    b1_grad, b2_grad = (each.new_zeros(experts, each.shape[1]) for each in (grad_pre, grad_rows))
    for segment, expert in _nonempty(plan):
        ids, slots = plan.routed_row_ids[segment], plan.routed_slots[segment]
        rows, weights = grad_rows[segment].to(wide), plan.row_weights[ids, slots]
        b1_grad[expert] = grad_pre[segment].to(wide).sum(0).to(b1_grad.dtype)
        b2_grad[expert] = (weights[:, None] * rows).sum(0).to(b2_grad.dtype)
        if b2 is not None:
            grad_row_weights[ids, slots] += rows @ b2[expert].to(wide)
    return b1_grad, b2_grad


def wgrad(left: Tensor, right: Tensor, plan: Plan) -> Tensor:
    """Gradient ``(e, M', N')`` of a weight: the outer products of routed rows ``(Q, M')`` and ``(Q, N')``, added up."""
    out = left.new_zeros(plan.segment_counts.numel(), left.shape[1], right.shape[1])
    for segment, expert in _nonempty(plan):
        out[expert].addmm_(left[segment].T, right[segment])
    return out


def send_sums(y: Tensor, plan: Plan, workspace: Workspace, *, weighted: bool, row_grads: Tensor | None) -> None:
    """Reduce routed rows ``y (Q, D)`` to partial sums, send them home with ``row_grads (R, K)``, and raise flags."""
    rank, max_tokens, epoch = plan.layout.rank, plan.max_tokens, int(workspace.epoch)
    world_size = plan.layout.world_size
    chunks = max_tokens // COMBINE_CHUNK_ROWS
    counts = plan.recv_counts.tolist()
    counts[rank] = plan.num_tokens
    for source in _ring(rank, world_size):
        window = slice(source * max_tokens, source * max_tokens + counts[source])
        home = slice(rank * max_tokens, rank * max_tokens + counts[source])
        workspace.combine_rows.peers[source][home] = _partial_sums(y, plan, window, weighted)
        if row_grads is not None:
            workspace.combine_grads.peers[source][home, : row_grads.shape[1]] = row_grads[window]
        flags = workspace.combine_flags.peers[source]
        for chunk in range(-(-counts[source] // COMBINE_CHUNK_ROWS)):
            signal(flags, (rank * chunks + chunk) * CHUNK_FLAGS, epoch)


def push_rows(x: Tensor, plan: Plan, workspace: Workspace, rows: SymmTensor) -> None:
    """Copy this rank's rows into ``rows`` of every rank that needs them, its own among them, then raise chunk flags."""
    rank, max_tokens, epoch = plan.layout.rank, plan.max_tokens, int(workspace.epoch)
    chunks = max_tokens // CHUNK_ROWS
    counts = plan.send_counts.tolist()
    for step in range(1, plan.layout.world_size + 1):
        target = (rank - step) % plan.layout.world_size
        if target == rank:
            rows.local[plan.own_rows] = x  # the kernels of layer 0 read them from ``x``
            continue
        received = rows.peers[target][rank * max_tokens :]
        received[: counts[target]] = x[plan.send_token_ids[target, : counts[target]]]
        for chunk in range(-(-counts[target] // CHUNK_ROWS)):
            signal(workspace.recv_flags.peers[target], rank * chunks + chunk, epoch)


def _tile_runs(plan: Plan, workspace: Workspace) -> Iterator[tuple[slice, int]]:
    """(routed rows, local expert) of neighbouring tiles in schedule order, each phase once its rows have arrived."""
    layout, starts = plan.layout, plan.tile_starts.tolist()
    chunks = (plan.routed_row_ids[_used_rows(plan)] // CHUNK_ROWS).unique().tolist()
    per_source = plan.max_tokens // CHUNK_ROWS
    tiles = plan.tiles[: starts[-1]].tolist()
    for phase in range(layout.num_phases):
        for source in _ring(layout.rank, layout.world_size)[:-1] if phase else ():
            _wait_chunks(plan, workspace, [chunk for chunk in chunks if chunk // per_source == source])
        for expert, run in groupby(tiles[starts[phase] : starts[phase + 1]], key=lambda tile: tile[0]):
            entries = list(run)
            yield slice(entries[0][1], entries[-1][1] + entries[-1][2]), expert


def _nonempty(plan: Plan) -> Iterator[tuple[slice, int]]:
    """Routed rows and local expert of every segment that has rows."""
    starts, counts = plan.segment_starts.tolist(), plan.segment_counts.tolist()
    for index, count in enumerate(counts):
        if count:
            yield slice(starts[index], starts[index] + count), index


def _rows_of(rows: Tensor, row_ids: Tensor) -> Tensor:
    """``(Q, D)``: of the received rows ``(R, D)`` row ``row_ids[q]`` for each routed row q; others may be anything."""
    return rows[row_ids.clamp(min=0)]


def _used_rows(plan: Plan) -> Tensor:
    segments = [torch.arange(segment.start, segment.stop) for segment, _ in _nonempty(plan)]
    return torch.cat(segments) if segments else torch.empty(0, dtype=torch.int64)


def _grouped_mm(rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """``(Q, N)``: rows ``(Q, C)`` of each segment times its expert's ``(C, N)``."""
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for segment, expert in _nonempty(plan):
        torch.mm(rows[segment], weights[expert], out=out[segment])
    return out


def _partial_sums(y: Tensor, plan: Plan, window: slice, weighted: bool) -> Tensor:
    """Sum of each received row's routed rows, in slot order, in float32."""
    slots, weights = plan.row_slots[window], plan.row_weights[window]
    total = torch.zeros(slots.shape[0], y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for k in range(slots.shape[1]):
        hit = (slots[:, k] >= 0).nonzero().squeeze(1)
        part = y[slots[hit, k]].to(total.dtype)
        total.index_add_(0, hit, part * weights[hit, k, None] if weighted else part)
    return total.to(y.dtype)


def sum_arrived(dtype: torch.dtype, plan: Plan, workspace: Workspace, grads: Tensor | None) -> Tensor:
    """Add the partial sums up in rank order, as they arrive: ``(T, D)``; those of gradients into ``grads (T, K)``."""
    max_tokens, tokens = plan.max_tokens, plan.num_tokens
    chunks, received = max_tokens // COMBINE_CHUNK_ROWS, workspace.combine_rows.local
    total = torch.zeros(tokens, received.shape[1], dtype=torch.promote_types(dtype, torch.float32))
    for contributor in range(plan.layout.world_size):
        rows = plan.send_rows[:tokens, contributor]
        hit = (rows >= 0).nonzero().squeeze(1)
        if hit.numel() == 0:
            continue
        for chunk in range(int(rows.max()) // COMBINE_CHUNK_ROWS + 1):
            index = (contributor * chunks + chunk) * CHUNK_FLAGS
            _wait_flag(workspace, workspace.combine_flags.local, index, contributor, "layer 1 combine", chunk)
        slots = contributor * max_tokens + rows[hit]
        total.index_add_(0, hit, received[slots].to(total.dtype))
        if grads is not None:
            grads.index_add_(0, hit, workspace.combine_grads.local[slots, : grads.shape[1]])
    return total.to(dtype)


def _wait_chunks(plan: Plan, workspace: Workspace, chunks: Iterable[int]) -> None:
    """Wait for chunks of rows, numbered over all sources."""
    for index in chunks:
        source, chunk = divmod(index, plan.max_tokens // CHUNK_ROWS)
        _wait_flag(workspace, workspace.recv_flags.local, index, source, "layer 0 dispatch", chunk)


def _wait_flag(workspace: Workspace, flags: Tensor, index: int, peer: int, place: str, chunk: int) -> None:
    comm, place = workspace.comm, f"{place}, chunk {chunk}"
    whom: dict[str, Any] = dict(rank=comm.rank, peer=peer, place=place, timeout_s=comm.timeout_s)
    wait(flags, index, int(workspace.epoch), **whom, check=comm.board.check)


def _ring(rank: int, world_size: int) -> list[int]:
    """All ranks, the next one first, this one last."""
    return [(rank + step) % world_size for step in range(1, world_size + 1)]
