"""An MoE layer for inference that the host launches as one CUDA graph instead of kernel by kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.graphs import capture, device_obstacle, first_line, release_random_numbers, run_beside
from comet.moe import MoE
from comet.router_losses import RouterStats

logger = logging.getLogger(__name__)

Output = tuple[Tensor, RouterStats]


@dataclass(frozen=True, slots=True)
class _Replay:
    """A captured call: ``run`` reads ``tokens (T, D)`` and leaves its result in ``output``."""

    tokens: Tensor
    run: Callable[[], None]
    output: Output


class GraphedMoE:
    """The forward pass of a layer, replayed from a CUDA graph for each number of tokens.

    Few tokens take a layer less time than the host takes to launch its kernels. The first call with a number of tokens
    runs as it stands; the second captures the layer, which computes nothing, and replays it. So every call runs the
    layer exactly once, and ranks may meet with different numbers of tokens. Routing may change from call to call. All
    graphs share one memory of intermediate results.

    On a CPU, where the layer cannot be captured (the plain path asks the GPU for counts) and for more different numbers
    of tokens than ``max_graphs``, calls run the layer as it stands; the reason is logged once.

    Args:
        layer: The layer. Its parameters may change in place but not be replaced.
        max_graphs: Numbers of tokens that are captured, at least 1.

    Raises:
        ValueError: If ``max_graphs`` is less than 1.
    """

    def __init__(self, layer: MoE, *, max_graphs: int = 16) -> None:
        require(max_graphs >= 1, f"max_graphs={max_graphs} must be at least 1")
        self.layer = layer
        self.max_graphs = max_graphs
        device = layer.group.device
        self._reason = device_obstacle(device)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._replays: dict[int, _Replay | None] = {}
        self._is_full = False

    @property
    def why_eager(self) -> str:
        """Why calls run the layer as it stands; empty while graphs are replayed."""
        return self._reason

    def __call__(self, x: Tensor) -> Output:
        """Run the layer; see ``MoE.forward``.

        Args:
            x: ``(..., D)`` this rank's tokens.

        Returns:
            ``(..., D)`` and the router's statistics, which no later call overwrites.

        Raises:
            ValueError: If gradients are on, or the tokens do not fit the layer.
            RuntimeError: If the layer's group has been closed.
        """
        require(not torch.is_grad_enabled(), "grad_enabled=True must be False: call the layer under torch.no_grad()")
        self.layer.group.comm.require_open()
        tokens = self.layer.tokens_of(x)
        replay = self._replay_of(tokens)
        if replay is None:
            eager = partial(self.layer, x)
            return eager() if self._stream is None else run_beside(eager, self._stream)
        replay.tokens.copy_(tokens)
        replay.run()
        output, stats = replay.output
        return output.clone().view_as(x), RouterStats(*(value.clone() for value in stats))

    def _replay_of(self, tokens: Tensor) -> _Replay | None:
        """The graph of so many tokens, captured at their second call; ``None`` runs the layer as it stands."""
        number = tokens.shape[0]
        if self._reason:
            return None
        if number not in self._replays:
            if len(self._replays) < self.max_graphs:
                self._replays[number] = None
            elif not self._is_full:
                self._is_full = True
                logger.warning("no graph for %d tokens: max_graphs=%d others came first", number, self.max_graphs)
            return None
        if self._replays[number] is None:
            self._replays[number] = self._capture(tokens)
        return self._replays[number]

    def _capture(self, tokens: Tensor) -> _Replay | None:
        own = torch.empty_like(tokens)
        try:
            run, output = capture(partial(self.layer, own), self._stream, self._graphs, self._pool)
        except RuntimeError as error:  # what torch raises for a call that a capture does not permit
            release_random_numbers(tokens.device)
            self._reason = f"the layer cannot be captured: {first_line(error)}"
            logger.warning("the layer is launched kernel by kernel: %s", self._reason)
            return None
        return _Replay(own, run, output)
