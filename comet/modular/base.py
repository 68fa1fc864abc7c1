"""What the experts of this package share."""

from __future__ import annotations

from comet.config import MoEConfig
from comet.group import ExpertGroup
from comet.modular.interfaces import TopKReduce


class ExpertsBase:
    """The part of ``Experts`` that does not depend on how they compute.

    Args:
        config: Shape of the layer.
        group: The ranks.
        reduce: What is left to ``finalize``; ``None``: the first of ``reductions``.
    """

    reductions: tuple[type[TopKReduce], ...]
    takes_fp8 = False

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
        self.use_kernels = group.device.type == "cuda" if use_kernels is None else use_kernels
