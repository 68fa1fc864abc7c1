"""The forward and the backward pass of a training step: kernel by kernel, or both replayed from one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comet.graphs import GraphMode, Replayed
from comet.models.gpt import GPT, next_token_loss
from comet.paths import CollectivePath


class Passes:
    """Fills the gradients of a model's parameters.

    Routing may change from step to step, and parameters may change in place. Gradients that are replayed stay where the
    graph leaves them: the next call overwrites them. What both passes need stays the graph's memory between calls.

    Args:
        model: Its MoE group's ranks must call this equally often, with batches of one shape.
        cuda_graph: Whether both passes are replayed; see ``Replayed``.

    Raises:
        ValueError: If a graph is insisted on and there can be none.
    """

    def __init__(self, model: GPT, *, cuda_graph: GraphMode = "auto") -> None:
        self.model = model
        self._parameters = list(model.parameters())
        self._workspaces = {layer.group.workspace for layer in model.moe_layers()}
        self._batch = torch.empty(0)
        self._replayed = Replayed(
            self._run, model.rotary.device, "training steps", cuda_graph=cuda_graph, obstacle=path_obstacle(model)
        )

    @property
    def why_eager(self) -> str:
        """Why the last step was launched kernel by kernel; empty if it was replayed from a graph."""
        return self._replayed.why_eager

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Run both passes (collective).

        Args:
            batch: ``(B, S + 1)`` int64 tokens, each of which but the first is predicted from those before it.

        Returns:
            ``()`` float32, the mean loss in nats, and ``(L, E)`` float32, the experts' load; the next call may
            overwrite them.

        Raises:
            ValueError: If a graph is insisted on and the passes cannot be captured.
            RuntimeError: If a group of the model has been closed.
        """
        for workspace in self._workspaces:
            workspace.join_stream()
        if self._batch.shape != batch.shape:
            assert self._batch.numel() == 0, f"batches of {self._batch.shape} and {batch.shape}: a graph has one shape"
            self._batch = torch.empty_like(batch)
        self._batch.copy_(batch)
        loss, expert_load, gradients = self._replayed()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss, expert_load

    def _run(self) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        output = self.model(self._batch[:, :-1])
        loss = next_token_loss(output.logits, self._batch[:, 1:])
        gradients = torch.autograd.grad(loss + output.router_loss, self._parameters, allow_unused=True)
        return loss.detach(), output.expert_load, gradients


def path_obstacle(model: GPT) -> str:
    """Why a step of the model must not be captured; empty for paths that ask the host for nothing."""
    asks = any(isinstance(layer.experts, CollectivePath) for layer in model.moe_layers())
    return "the collectives of its MoE layers wait for counts on the host" if asks else ""
