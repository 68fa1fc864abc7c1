"""Dispatch and combine over symmetric memory: Comet's plan, its dispatch, and its combine, without its fused GEMMs.

Nothing waits for the device: received rows have static shapes, N = W * M row slots (M the group's maximum of tokens,
rounded up), of which the plan says on the device which are in use.

The fused layer's rows travel while its GEMMs run, so its two halves only go together: ``prepare`` makes the plan and
hands out a light handle, ``FusedExperts.apply`` runs layer 0 and layer 1, and ``finalize`` has nothing left to do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from comet.comm.base import require_memory
from comet.config import MoEConfig, OverlapConfig, resolve_kernels
from comet.errors import CapacityError
from comet.kernels.runtime.faults import ROWS_NEEDED
from comet.layer.group import ExpertGroup
from comet.layer.plan import Plan, check_tokens
from comet.layer.routed_experts import make_backend
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedRows,
    ContiguousRows,
    DelegateReduce,
    FusedHandle,
    PrepareFinalize,
    Received,
    Receiver,
    RoutedTokens,
    TopKReduce,
)


class OverBackend(PrepareFinalize):
    """A dispatch by the plan and the kernels of a ``Backend``; all such parts are made alike.

    Args:
        overlap: Split and order of the kernels' work; ``None``: ``default_overlap``. Where rows travel apart from the
            GEMMs, only ``comm_blocks`` is used.
    """

    default_overlap: OverlapConfig | None = OverlapConfig()  # None: what was measured

    def __init__(
        self,
        config: MoEConfig,
        group: ExpertGroup,
        *,
        overlap: OverlapConfig | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        require_memory(group.comm, type(self).__name__, "use AllToAll")
        group.check_same(config, overlap=overlap, use_kernels=use_kernels)
        kernels = resolve_kernels(group.device, use_kernels)
        self.backend = make_backend(config, group, overlap or self.default_overlap, use_kernels=kernels)
        self.layout, self.workspace, self.comm = self.backend.layout, group.workspace, group.comm
        self.side_stream = group.side_stream

    def _check(self, routed: RoutedTokens) -> None:
        check_tokens(routed.tokens, routed.top_k_ids, self.workspace)
        self.backend.check(routed.top_k_ids, routed.top_k_weights)


class SymmetricContiguous(OverBackend):
    """Received rows as they lie in symmetric memory, each token once per rank. Any EP x TP; unequal and zero tokens
    per rank; masked slots; a capacity factor.
    """

    activation_format = ActivationFormat.CONTIGUOUS

    def prepare_no_receive(self, routed: RoutedTokens) -> Receiver:
        """Start plan and rows: on a GPU they travel on a stream of their own while the caller goes on.

        Contiguous rows are a view of the pool, valid until the next dispatch.
        """
        self._check(routed)
        with self.comm.in_flight:
            arrive = self.side_stream.start(partial(self._bring, routed))

        def receive() -> Received:
            plan, tokens = arrive()
            return Received(rows=self._rows(plan, tokens), route=plan)

        return receive

    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """Reduce, send the sums home, and add those up in rank order; a delegated reduction is part of the combine."""
        plan = received.route
        is_delegated = isinstance(reduce, DelegateReduce)
        if is_delegated:
            assert not isinstance(received.rows, FusedHandle)
            outputs, row_slots = outputs.flatten(0, 1), received.rows.row_slots
        else:  # one partial sum per received row
            outputs = reduce.apply(outputs, received.rows)
            row_slots = torch.arange(outputs.shape[0], dtype=torch.int32, device=outputs.device)[:, None]
        plan = replace(plan, row_slots=row_slots)
        return self.backend.combine(outputs.contiguous(), plan, weighted=is_delegated)

    def _bring(self, routed: RoutedTokens) -> tuple[Plan, Tensor]:
        """Make the plan, and dispatch: the received rows are ``(R, D)``."""
        plan = self.backend.plan(routed.top_k_ids, routed.top_k_weights)
        return plan, self.backend.dispatch(routed.tokens.contiguous(), plan)

    def _rows(self, plan: Plan, tokens: Tensor) -> ContiguousRows | BatchedRows:
        return ContiguousRows(tokens=tokens, top_k_ids=local_experts(plan), top_k_weights=plan.row_weights)


class SymmetricBatched(SymmetricContiguous):
    """Received rows copied into one batch per local expert, with room for every row of every rank: B = W * M. Meant for
    few tokens. Any EP x TP; unequal and zero tokens per rank; masked slots; a capacity factor; K distinct experts per
    token.

    More than B rows for one expert, which only tokens that name it twice can cause, are a ``CapacityError``: on a CPU
    when they arrive, on a GPU of ``workspace.check``.
    """

    activation_format = ActivationFormat.BATCHED

    def _rows(self, plan: Plan, tokens: Tensor) -> BatchedRows:
        batch_rows = tokens.shape[0]
        self._check_room(plan, batch_rows)
        row_ids, row_slots = batch_table(plan, batch_rows)
        batches = tokens.index_select(0, row_ids.flatten()).view(*row_ids.shape, tokens.shape[1])
        counts = plan.segment_counts.clamp(
            max=batch_rows
        )  # rows that do not fit are an error, but only once the host looks
        return BatchedRows(tokens=batches, counts=counts, row_slots=row_slots, top_k_weights=plan.row_weights)

    def _check_room(self, plan: Plan, batch_rows: int) -> None:
        most = plan.segment_counts.max()
        fault = self.workspace.fault[ROWS_NEEDED]
        fault.copy_(most.where(most > batch_rows, fault))  # no waiting: the host reads it in workspace.check
        if most.device.type == "cpu" and int(most) > batch_rows:
            raise CapacityError(
                f"rank {self.layout.rank} got {int(most)} rows for one expert, more than the {batch_rows} of all "
                "ranks' tokens: a token names the same expert twice"
            )


class FusedPrepareFinalize(OverBackend):
    """The plan of the fused layer. Any EP x TP; unequal and zero tokens per rank; masked slots; a capacity factor."""

    activation_format = ActivationFormat.HANDLE
    default_overlap = None

    def prepare_no_receive(self, routed: RoutedTokens) -> Receiver:
        """Exchange ids and plan; no row travels yet."""
        self._check(routed)
        with self.comm.in_flight:
            plan = self.backend.plan(routed.top_k_ids, routed.top_k_weights)
        handle = FusedHandle(tokens=routed.tokens.contiguous(), plan=plan, backend=self.backend)
        return lambda: Received(rows=handle, route=None)

    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """The outputs: layer 1 has combined them."""
        return outputs


def local_experts(plan: Plan) -> Tensor:
    """``(R, K)`` int32 local expert of each slot of a received row; -1 where it is not computed here."""
    experts = torch.searchsorted(plan.segment_starts, plan.row_slots.clamp(min=0), right=True, out_int32=True) - 1
    return experts.masked_fill(plan.row_slots < 0, -1)


def batch_table(plan: Plan, batch_rows: int) -> tuple[Tensor, Tensor]:
    """Lay the plan's segments out in batches: row_ids ``(e, B)`` int64, received row of each batched row, 0 past the
    counts; and row_slots ``(N, K)`` int32 as in ``BatchedRows``, -1 of rows that their batch has no room for.

    Example: the plan of ``Backend.plan``'s example, batches of 4: routed rows 0, 16 and 17 are the batched rows 0, 4
    and 5, so row_ids is ``[[0, 0, 0, 0], [0, 1, 0, 0]]`` and row_slots ``[[4, 0], [5, -1], ...]``.
    """
    starts = plan.segment_starts[:-1].long()
    in_batch = torch.arange(batch_rows, device=starts.device)
    valid = in_batch < plan.segment_counts[:, None]
    routed = (starts[:, None] + in_batch).clamp(max=plan.routed_row_ids.numel() - 1)
    row_ids = plan.routed_row_ids[routed].long().where(valid, 0)
    experts = local_experts(plan)
    places = plan.row_slots - starts[experts.clamp(min=0).long()]
    fits = (experts >= 0) & (places < batch_rows)
    return row_ids, (places + experts * batch_rows).int().masked_fill(~fits, -1)
