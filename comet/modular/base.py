"""What the parts of this package share: the experts' common part, and what is left to do after them.

A reduction makes one row per received row of the experts' outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.collectives import accumulator_dtype
from comet.config import MoEConfig, check_kernel_dtype, resolve_kernels
from comet.layer.group import ExpertGroup
from comet.modular.interfaces import ActivationFormat, BatchedRows, ContiguousRows, Problem, Rows, TopKReduce
from comet.quantization.formats import WEIGHT_TYPES, Weight


class NoOpReduce:
    """The experts have weighted and summed: outputs are ``(N, D)``."""

    formats = frozenset(ActivationFormat)

    def apply(self, outputs: Tensor, rows: Rows) -> Tensor:
        """The outputs themselves."""
        return outputs


class ContiguousReduce:
    """Outputs are ``(N, K, D)``, one per slot of a received row."""

    formats = frozenset({ActivationFormat.CONTIGUOUS})

    def apply(self, outputs: Tensor, rows: Rows) -> Tensor:
        """Weighted sum over the slots."""
        assert isinstance(rows, ContiguousRows), "the composer pairs ContiguousReduce with contiguous rows"
        return weighted_sum(outputs.flatten(0, 1), slot_rows(rows.top_k_ids), rows.top_k_weights)


class BatchedReduce:
    """Outputs are ``(e, B, D)``, one per batched row."""

    formats = frozenset({ActivationFormat.BATCHED})

    def apply(self, outputs: Tensor, rows: Rows) -> Tensor:
        """Weighted sum over the batched rows of each received row."""
        assert isinstance(rows, BatchedRows), "the composer pairs BatchedReduce with batched rows"
        return weighted_sum(outputs.flatten(0, 1), rows.row_slots, rows.top_k_weights)


class DelegateReduce:
    """Outputs are as for ``ContiguousReduce`` or ``BatchedReduce``; ``finalize`` reduces them in its own way."""

    formats = frozenset({ActivationFormat.CONTIGUOUS, ActivationFormat.BATCHED})

    def apply(self, outputs: Tensor, rows: Rows) -> Tensor:
        """Never: this reduction is the prepare/finalize's own."""
        raise NotImplementedError("DelegateReduce leaves the reduction to finalize(); use resolve(reduce, rows) there")


def resolve(reduce: TopKReduce, rows: Rows) -> TopKReduce:
    """``reduce``, or for ``DelegateReduce`` the reduction of the rows' format."""
    if not isinstance(reduce, DelegateReduce):
        return reduce
    return ContiguousReduce() if isinstance(rows, ContiguousRows) else BatchedReduce()


def slot_rows(top_k_ids: Tensor) -> Tensor:
    """Number every slot ``n * K + k``, -1 where its id is: ids ``[[0, 2], [-1, 1]]`` give ``[[0, 1], [-1, 3]]``."""
    numbers = torch.arange(top_k_ids.numel(), dtype=torch.int32, device=top_k_ids.device).view(top_k_ids.shape)
    return numbers.masked_fill(top_k_ids < 0, -1)


def weighted_sum(outputs: Tensor, row_slots: Tensor, weights: Tensor) -> Tensor:
    """Add up weighted outputs in slot order, in float32, rounded once.

    Example: outputs ``[[1], [10], [nan]]``, row_slots ``[[1, 0], [-1, 0]]``, weights ``[[0.5, 2], [nan, 3]]`` give
    ``[[7], [3]]``.

    Args:
        row_slots: ``(N, K)`` int32 rows of ``outputs``; -1 contributes nothing.
        weights: ``(N, K)`` float32 (float64 for float64 outputs).
    """
    wide = accumulator_dtype(outputs.dtype)
    total = torch.zeros(row_slots.shape[0], outputs.shape[1], dtype=wide, device=outputs.device)
    for slots, slot_weights in zip(row_slots.unbind(1), weights.unbind(1), strict=True):
        part = outputs.index_select(0, slots.clamp(min=0)).to(wide) * slot_weights[:, None].to(wide)
        # Not a product with 0: what is nowhere may be NaN.
        total += part.where(slots[:, None] >= 0, 0.0)
    return total.to(outputs.dtype)


Regions = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ExpertsBase:
    """The part of ``Experts`` that does not depend on how they compute; all parts are made alike.

    Args:
        reduce: What is left to ``finalize``, one of ``reductions``; ``None``: the first of them.
    """

    reductions: tuple[type[TopKReduce], ...]
    takes_fp8 = False
    weight_types: frozenset[type[Weight]] = frozenset(WEIGHT_TYPES)

    def __init__(self, config: MoEConfig, group: ExpertGroup, *, reduce: TopKReduce | None = None) -> None:
        self.layout = group.layout(config)
        self.activation = config.activation
        self.reduce = reduce or self.reductions[0]()


class KernelExperts(ExpertsBase):
    """Experts whose work Triton kernels can do.

    Args:
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: ExpertGroup,
        *,
        reduce: TopKReduce | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        super().__init__(config, group, reduce=reduce)
        self.device = group.device
        self.use_kernels = resolve_kernels(group.device, use_kernels)
        if self.use_kernels:
            check_kernel_dtype(group.workspace.shape.dtype, group.device)


def weight_regions(problem: Problem) -> Regions:
    """Room for the weights where they have to be dequantised, none for plain ones."""
    if problem.weight_type is Tensor:
        return {}
    num_experts, hidden_size, ffn_size = problem.num_experts, problem.hidden_size, problem.ffn_size
    return {
        "w1": ((num_experts, 2 * ffn_size, hidden_size), problem.dtype),
        "w2": ((num_experts, hidden_size, ffn_size), problem.dtype),
    }


def plain(values: Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """A tensor as it is, anything quantised in ``dtype``, in the memory of ``out`` if there is any."""
    return values if isinstance(values, Tensor) else values.dequantize(dtype, out=out)
