"""The layer in plain torch over symmetric memory: the CPU path and the oracle of ``comet.layer.fused``.

The order of work is that of the kernels: local rows first, then each phase as its source ranks' rows arrive; partial
sums in slot order, final sums in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from comet.comm.base import SymmTensor
from comet.comm.collectives import accumulator_dtype, check_calls
from comet.comm.signals import signal
from comet.config import require
from comet.kernels.runtime.limits import CHUNK_FLAGS, CHUNK_ROWS, COMBINE_CHUNK_ROWS
from comet.layer.backend import ActivationGradients, Backend
from comet.layer.plan import Plan
from comet.layer.twin.plan import exchange_ids, plan_tensors, receive_ids, wait_flag
from comet.layer.workspace import Workspace
from comet.quantization.formats import FP8, quantize_rows
from comet.quantization.packed import pack, unpack
from comet.reference.layer import weighted_sum
from comet.utils.autocast import without_autocast


class Twin(Backend):
    """The layer in plain torch, on CPUs."""

    def _plan(self, ids: Tensor, weights: Tensor, *, trains: bool) -> Plan:
        layout, workspace, rules, device = self.layout, self.workspace, self.rules, self.workspace.comm.device
        require(device.type == "cpu", f"path='twin' needs a workspace on the CPU, this one is on {device}")
        exchange_ids(ids, weights, workspace, call=self.call(trains=trains))
        tensors = plan_tensors(*receive_ids(ids, layout, workspace), layout, rules)
        tensors["status"][3] = workspace.epoch
        num_tokens, max_tokens, block_rows = ids.shape[0], workspace.max_tokens, rules.block_rows
        plan = Plan(layout=layout, num_tokens=num_tokens, max_tokens=max_tokens, block_rows=block_rows, **tensors)
        if plan.status[2]:
            raise workspace.no_room(int(plan.status[0]))
        return plan

    def dispatch_gemm(
        self, x: Tensor, w1: Tensor | FP8, plan: Plan, b1: Tensor | None = None, *, save_pre_activation: bool
    ) -> tuple[Tensor | FP8, Tensor | None]:
        """Phase by phase; products of block FP8 are those of what it stands for, in float32."""
        workspace, received, in_fp8 = self.workspace, self.workspace.recv_rows, isinstance(w1, FP8)
        sent, hidden_size = x, x.shape[1]
        if isinstance(w1, FP8):
            sent, w1 = pack(quantize_rows(x, trusted=True), x.dtype), w1.dequantize()
            received = received.with_columns(sent.shape[1])
        push_rows(sent, plan, workspace, received)
        pre = w1.new_empty(plan.routed_row_ids.numel(), w1.shape[1])
        for rows, expert in _tile_runs(plan, workspace):
            arrived = received.local[plan.routed_row_ids[rows]]
            arrived = unpack(arrived, hidden_size).dequantize() if in_fp8 else arrived
            torch.mm(arrived, w1[expert].T, out=pre[rows])
            if b1 is not None:
                pre[rows] += b1[expert]
        hidden = self.settings.activation.forward(*pre.chunk(2, dim=1))
        if in_fp8:
            return quantize_rows(hidden, trusted=True), None
        return hidden, pre if save_pre_activation else None

    def gemm_combine(self, hidden: Tensor | FP8, w2: Tensor | FP8, plan: Plan, b2: Tensor | None = None) -> Tensor:
        """GEMM, of block FP8 in float32, then ``combine``."""
        rows, weights = (each.dequantize() if isinstance(each, FP8) else each for each in (hidden, w2))
        y = _grouped_mm(rows, weights.transpose(1, 2), plan)
        if b2 is not None:
            for segment, expert in _nonempty(plan):
                y[segment] += b2[expert]
        return self.combine(y.to(self.workspace.shape.dtype), plan, weighted=True)

    def barrier(self, plan: Plan) -> None:
        """Wait for the processes of all ranks."""
        workspace, comm, call = self.workspace, self.workspace.comm, self.call(trains=True)
        half = (int(workspace.epoch) + 1) & 1
        for calls in workspace.calls.peers:
            calls[half, comm.rank], calls[2 + half, comm.rank] = call, plan.status[3]
        comm.barrier()
        workspace.epoch += 1
        check_calls(workspace.calls.local[half].tolist(), numbers=workspace.calls.local[2 + half].tolist())

    def dispatch_dgrad(self, grad_output: Tensor, w2: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """``dispatch``, then GEMM."""
        grads = _rows_of(self.dispatch(grad_output, plan), plan.routed_row_ids)
        return grads, _grouped_mm(grads, w2, plan)

    def activation_backward(self, pre_activation: Tensor, grad_hidden: Tensor, plan: Plan) -> ActivationGradients:
        """In float32 (float64 stays float64); routed rows of no segment are 0."""
        wide, used = accumulator_dtype(pre_activation.dtype), _used_rows(plan)
        ids, slots = plan.routed_row_ids[used], plan.routed_slots[used]
        weights = plan.row_weights[ids, slots][:, None]
        gate, up = pre_activation[used].to(wide).chunk(2, dim=1)
        grad_used = grad_hidden[used].to(wide)
        hidden, *grads = self.settings.activation.backward(gate, up, weights * grad_used)
        hidden = hidden.to(pre_activation.dtype).to(wide)
        grad_weights = torch.zeros_like(plan.row_weights)
        grad_weights[ids, slots] = (grad_used * hidden).sum(dim=1)
        grad_pre = torch.zeros_like(pre_activation)
        grad_pre[used] = torch.cat(grads, dim=1).to(grad_pre.dtype)
        weighted_hidden = torch.zeros_like(grad_hidden)
        weighted_hidden[used] = (weights * hidden).to(weighted_hidden.dtype)
        return ActivationGradients(grad_pre, weighted_hidden, grad_weights)

    def bias_backward(
        self, grad_pre: Tensor, grad_rows: Tensor, b2: Tensor | None, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Expert by expert, in float32 (float64 stays float64)."""
        wide, experts = accumulator_dtype(grad_rows.dtype), plan.segment_counts.numel()
        b1_grad, b2_grad = (each.new_zeros(experts, each.shape[1]) for each in (grad_pre, grad_rows))
        for segment, expert in _nonempty(plan):
            ids, slots = plan.routed_row_ids[segment], plan.routed_slots[segment]
            rows, weights = grad_rows[segment].to(wide), plan.row_weights[ids, slots]
            b1_grad[expert] = grad_pre[segment].to(wide).sum(0).to(b1_grad.dtype)
            b2_grad[expert] = (weights[:, None] * rows).sum(0).to(b2_grad.dtype)
            if b2 is not None:
                with without_autocast(rows.device):
                    grad_row_weights[ids, slots] += rows @ b2[expert].to(wide)
        return b1_grad, b2_grad

    def dgrad_combine(
        self, grad_pre: Tensor, w1: Tensor, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """GEMM, then the combine."""
        send_sums(_grouped_mm(grad_pre, w1, plan), plan, self.workspace, weighted=False, row_grads=grad_row_weights)
        grads = torch.zeros(plan.num_tokens, plan.layout.top_k, dtype=torch.float32)
        return sum_arrived(grad_pre.dtype, plan, self.workspace, grads), grads

    def fc1_wgrad(self, grad_pre: Tensor, received: Tensor, plan: Plan) -> Tensor:
        """A product as that of w2."""
        return self.fc2_wgrad(grad_pre, self.routed_rows(received, plan), plan)

    def routed_rows(self, received: Tensor, plan: Plan) -> Tensor:
        """A copy."""
        return _rows_of(received, plan.routed_row_ids)

    def fc2_wgrad(self, grad_rows: Tensor, weighted_hidden: Tensor, plan: Plan) -> Tensor:
        """Expert by expert."""
        out = grad_rows.new_zeros(plan.segment_counts.numel(), grad_rows.shape[1], weighted_hidden.shape[1])
        for segment, expert in _nonempty(plan):
            out[expert].addmm_(grad_rows[segment].T, weighted_hidden[segment])
        return out

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
        weights = plan.row_weights[window] if weighted else None
        workspace.combine_rows.peers[source][home] = weighted_sum(y, plan.row_slots[window], weights)
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
            place = f"layer 1 combine, chunk {chunk}"
            wait_flag(workspace, workspace.combine_flags.local, index, int(workspace.epoch), contributor, place)
        slots = contributor * max_tokens + rows[hit]
        total.index_add_(0, hit, received[slots].to(total.dtype))
        if grads is not None:
            grads.index_add_(0, hit, workspace.combine_grads.local[slots, : grads.shape[1]])
    return total.to(dtype)


def _wait_chunks(plan: Plan, workspace: Workspace, chunks: Iterable[int]) -> None:
    """Wait for chunks of rows, numbered over all sources."""
    for index in chunks:
        source, chunk = divmod(index, plan.max_tokens // CHUNK_ROWS)
        place = f"layer 0 dispatch, chunk {chunk}"
        wait_flag(workspace, workspace.recv_flags.local, index, int(workspace.epoch), source, place)


def _ring(rank: int, world_size: int) -> list[int]:
    """All ranks, the next one first, this one last."""
    return [(rank + step) % world_size for step in range(1, world_size + 1)]
