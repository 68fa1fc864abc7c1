"""The forward and the backward pass of a training step: kernel by kernel, or both replayed from one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from comet.graphs import capture, device_obstacle, first_line, release_random_numbers
from comet.models.gpt import GPT, next_token_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Replay:
    """Both passes: ``run`` reads ``batch`` and leaves the rest where it is."""

    batch: Tensor
    run: Callable[[], None]
    loss: Tensor
    expert_load: Tensor
    gradients: Sequence[Tensor | None]


class Passes:
    """Fills the gradients of a model's parameters.

    A step of few tokens takes a GPU less time than the host takes to launch its kernels. With ``graphs`` the first
    batch runs as it stands; the second captures both passes, which computes nothing, and is replayed, as are all later
    ones. So ranks run every kernel equally often, whether they replay it or not. Routing may change from step to step,
    and parameters may change in place. Gradients stay where the graph leaves them: the next call overwrites them, and
    they take memory during the forward pass, too, which those of a step as it stands do not.

    Where the passes cannot be captured (on a CPU; the plain path, which asks the GPU for counts) they run as they
    stand, and ``why_eager`` says why; a capture that fails is logged.

    Args:
        model: Its MoE group's ranks must call this equally often, with batches of one shape.
        graphs: Whether to replay.
    """

    def __init__(self, model: GPT, *, graphs: bool) -> None:
        self.model = model
        self.graphs = graphs
        device = model.rotary.device
        self.why_eager = device_obstacle(device) if graphs else ""
        self._parameters = list(model.parameters())
        self._stream = torch.cuda.Stream(device) if graphs and device.type == "cuda" else None
        self._kept: list[torch.cuda.CUDAGraph] = []
        self._has_run = False
        self._replay: _Replay | None = None

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Run both passes (collective).

        Args:
            batch: ``(B, S + 1)`` int64 tokens, each of which but the first is predicted from those before it.

        Returns:
            ``()`` float32, the mean loss in nats, and ``(L, E)`` float32, the experts' load; the next call may
            overwrite them.
        """
        if self._wants_replay() and self._has_run and self._replay is None:
            self._replay = self._capture(batch)
        self._has_run = True
        if self._replay is None:
            loss, expert_load, gradients = self._run(batch)
        else:
            self._replay.batch.copy_(batch)
            self._replay.run()
            loss, expert_load, gradients = self._replay.loss, self._replay.expert_load, self._replay.gradients
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss, expert_load

    def _wants_replay(self) -> bool:
        return self.graphs and not self.why_eager

    def _run(self, batch: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        output = self.model(batch[:, :-1])
        loss = next_token_loss(output.logits, batch[:, 1:])
        gradients = torch.autograd.grad(loss + output.router_loss, self._parameters, allow_unused=True)
        return loss.detach(), output.expert_load, gradients

    def _capture(self, batch: Tensor) -> _Replay | None:
        own = batch.clone()
        try:
            run, (loss, expert_load, gradients) = capture(partial(self._run, own), self._stream, self._kept)
        except RuntimeError as error:  # what torch raises for a call that a capture does not permit
            release_random_numbers(batch.device)
            self.why_eager = f"the step cannot be captured: {first_line(error)}"
            logger.warning("steps are launched kernel by kernel: %s", self.why_eager)
            return None
        return _Replay(own, run, loss, expert_load, gradients)
