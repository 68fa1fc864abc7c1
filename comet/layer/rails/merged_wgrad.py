"""Weight gradients of several runs of a layer, as one product over the rows of all of them.

A run's gradient of the weights is as large as the weights, and to add up one for each run takes longer than the rest of
a backward pass over nodes. So the rows of each expert are moved behind each other, run by run, and multiplied once.

Example: two runs with two experts, segments of 2 and 1 rows that begin at 0 and 4, and of 1 and 3 rows at 0 and 4: the
merged segments begin at 0 and 3, the rows of the first run go to 0, 1 and 3, those of the second to 2, 4, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from comet.layer.backend import Backend
from comet.layer.plan import Plan


class RunOperands(NamedTuple):
    """The tensors that weight gradients of a run are made of, with a row for each of its routed rows."""

    grad_pre: Tensor  # (Q, 2F)
    rows: Tensor  # (Q, D) tokens
    grad_rows: Tensor  # (Q, D)
    weighted_hidden: Tensor  # (Q, F)


class MergedWgrad:
    """Takes the operands of one run after the other, and makes the gradients of w1 and w2 at the end.

    Args:
        plans: Of all runs, in their order.
    """

    def __init__(self, backend: Backend, plans: Sequence[Plan]) -> None:
        self._backend, self._plans = backend, plans
        counts = torch.stack([plan.segment_counts for plan in plans])  # (runs, e)
        self._starts = torch.nn.functional.pad(counts.sum(0).cumsum(0), (1, 0)).to(torch.int32)
        self._counts, self._before = counts.sum(0).to(torch.int32), counts.cumsum(0) - counts
        self._num_rows = sum(plan.routed_row_ids.numel() for plan in plans)
        self._merged: list[Tensor] = []
        self._num_runs = 0

    def add(self, operands: RunOperands) -> None:
        """Copy the rows of the next run to their places; rows of no expert go to a row that is never read."""
        run, self._num_runs = self._num_runs, self._num_runs + 1
        plan = self._plans[run]
        rows = torch.arange(len(operands.rows), dtype=torch.int32, device=operands.rows.device)
        experts = (torch.searchsorted(plan.segment_starts, rows, right=True) - 1).clamp_(0, len(self._counts) - 1)
        offsets = rows - plan.segment_starts[experts]
        exists = offsets < plan.segment_counts[experts]
        places = torch.where(exists, self._starts[experts] + self._before[run][experts] + offsets, self._num_rows)
        if not self._merged:
            self._merged = [each.new_empty(self._num_rows + 1, each.shape[1]) for each in operands]
        for merged, part in zip(self._merged, operands, strict=True):
            merged.index_copy_(0, places, part)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of w1 ``(e, 2F, D)`` and w2 ``(e, D, F)``."""
        grad_pre, rows, grad_rows, weighted_hidden = (each[:-1] for each in self._merged)
        plan = replace(self._plans[0], segment_starts=self._starts, segment_counts=self._counts)
        of_w1, of_w2 = (replace(plan, counters=torch.zeros_like(plan.counters)) for _ in range(2))
        product = self._backend.fc2_wgrad
        return product(grad_pre, rows, of_w1), product(grad_rows, weighted_hidden, of_w2)


def merged_bytes(plans: Sequence[Plan], w1: Tensor, w2: Tensor) -> int:
    """Bytes of the rows of all runs; 100 rows, D=64 and F=32 in float32: 100 * (64 + 64 + 64 + 32) * 4 = 89600."""
    columns = w1.shape[1] + w1.shape[2] + w2.shape[1] + w2.shape[2]
    return sum(plan.routed_row_ids.numel() for plan in plans) * columns * w1.element_size()
