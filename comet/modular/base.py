"""What the experts of this package share."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.config import MoEConfig, check_kernel_dtype, resolve_kernels
from comet.group import ExpertGroup
from comet.modular.interfaces import Problem, TopKReduce
from comet.quantize import WEIGHT_TYPES, Weight

Regions = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ExpertsBase:
    """The part of ``Experts`` that does not depend on how they compute; all parts are made alike.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: What is left to ``finalize``; ``None``: the first of ``reductions``.
    """

    reductions: tuple[type[TopKReduce], ...]
    takes_fp8 = False
    weight_types: frozenset[type[Weight]] = frozenset(WEIGHT_TYPES)

    def __init__(self, config: MoEConfig, group: ExpertGroup, *, reduce: TopKReduce | None = None) -> None:
        self.layout = group.layout(config)
        self.reduce = reduce or self.reductions[0]()


class KernelExperts(ExpertsBase):
    """Experts whose work Triton kernels can do.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: What is left to ``finalize``; ``None``: the first of ``reductions``.
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
