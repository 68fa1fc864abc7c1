"""One optimizer step of a sharded model and what it measured: both passes, gradients over the ranks, AdamW.

The forward and the backward pass run kernel by kernel, or both are replayed from one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from comet.jobs.config import TrainConfig
from comet.layer.backend import expert_capacity
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.models.gpt import GPT, next_token_loss
from comet.training.data import Starts, Text, random_starts, sample_batch
from comet.training.optimizer import ScaledAdamW, learning_rate, sum_gradients
from comet.training.tokens import Tokens
from comet.utils.graphs import Replayed


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Measurements of one step over all ranks; on the device, so that taking them does not wait."""

    loss: Tensor  # () float32: mean loss in nats per byte or token
    grad_norm: Tensor  # () float32: global gradient norm before clipping
    expert_load: Tensor  # (L, E) float32: routed rows per MoE layer and expert, those that were dropped included
    dropped_rows: Tensor  # () float32: routed rows of all layers beyond the experts' capacity; 0 if nothing is dropped
    told_to_stop: Tensor  # () float32: ranks that had a request to stop when they began the step


class TrainStep:
    """Runs optimizer steps; its only state is that of the model and the optimizer.

    A step has ``gradient_accumulation_steps`` passes, whose gradients are summed before the ranks' are. Routing may
    change from pass to pass, and parameters may change in place. Gradients that are replayed stay where the graph
    leaves them: the next pass overwrites them. What both passes need stays the graph's memory between steps.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: ScaledAdamW,
        group: ExpertGroup,
        text: Text | Tokens | Tensor,
        config: TrainConfig,
        starts: Starts = random_starts,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.text, self.starts = text, starts
        self.config = config
        self.num_passes = config.gradient_accumulation_steps
        self.capacity = expert_capacity(model.config.moe, group)
        self._parameters = list(model.parameters())
        device = model.rotary.device
        self._batch = torch.empty(config.batch_size, model.config.context + 1, dtype=torch.int64, device=device)
        asks = any(layer.experts.waits_for_counts for layer in model.moe_layers())
        obstacle = "the collectives of its MoE layers wait for counts on the host" if asks else ""
        if isinstance(model, FSDPModule):
            obstacle = "train.fsdp gathers parameters while a pass runs"
        self._passes = Replayed(self._run, device, "training steps", cuda_graph=config.cuda_graph, obstacle=obstacle)

    @property
    def tokens_per_step(self) -> int:
        return self.group.world_size * self.num_passes * self.config.batch_size * self.model.config.context

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why the last step was launched kernel by kernel; empty if it was replayed from a CUDA graph."""
        return self._passes.graph_fallback_reason

    def __call__(self, step: int, *, told_to_stop: bool = False) -> StepMetrics:
        """Take optimizer step ``step``, counted from 0, and sum over the ranks which of them stop (collective)."""
        loss, dropped_rows, told, expert_load = self._backward(step, told_to_stop)
        grad_norm = sum_gradients(self.model, self.group) / self.num_passes
        self.optimizer.clip(grad_norm, self.config.grad_clip, num_summed=self.group.world_size * self.num_passes)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate(step, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for layer, load in zip(self.model.moe_layers(), expert_load, strict=True):
            if layer.config.balance == "bias":
                layer.router.update_bias(load)
        return StepMetrics(loss, grad_norm, expert_load, dropped_rows, told)

    def _backward(self, step: int, told_to_stop: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fill the gradients; return the mean loss, and of all ranks dropped rows, requests to stop, and load."""
        settings, rank = self.config, self.group.world_rank
        sizes = {"batch_size": self.num_passes * settings.batch_size, "context": self.model.config.context}
        place = {"seed": settings.seed, "step": step, "rank": rank, "ranks": self.group.world_size}
        batches = sample_batch(self.text, **sizes, **place, starts=self.starts).split(settings.batch_size)
        measured = torch.stack([self._pass(batch, index) for index, batch in enumerate(batches)]).sum(0)
        sums = torch.cat([measured.new_full((1,), float(told_to_stop)), measured])
        if self.group.world_size > 1:
            dist.all_reduce(sums)
        num_losses, shape = self.group.world_size * self.num_passes, (-1, self.model.config.moe.num_experts)
        return sums[1] / num_losses, sums[2], sums[0], sums[3:].view(shape)

    def _pass(self, batch: Tensor, index: int) -> Tensor:
        """Add the gradients of ``batch``; return this rank's mean loss and dropped rows, then the load of experts."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(index == self.num_passes - 1)
        self.group.workspace.join_stream()
        # A copy from memory that is not pinned would wait for a GPU.
        self._batch.copy_(batch.pin_memory() if self._batch.is_cuda else batch, non_blocking=True)
        loss, expert_load, gradients = self._passes()
        if index and gradients:
            sums = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_add_(sums, [local(gradient) for gradient in gradients])
        elif gradients:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                # The next pass may overwrite its gradients.
                parameter.grad = gradient if self.num_passes == 1 else gradient.clone()
        dropped_rows = loss.new_zeros(())
        if self.capacity is not None:  # All ranks of a group count a share of what an expert drops.
            load = expert_load.clone()
            if self.group.process_group is not None:
                dist.all_reduce(load, group=self.group.process_group)
            dropped_rows = (load - self.capacity).clamp(min=0).sum() / self.group.parallel.world_size
        return torch.cat([loss.view(1), dropped_rows.view(1), expert_load.flatten()])

    def _run(self) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Both passes: mean loss, the experts' load ``(L, E)``, and gradients, which the next call may overwrite.

        ``fully_shard`` itself adds gradients to those that the parameters have; then none are returned.
        """
        output = self.model(self._batch[:, :-1])
        loss = next_token_loss(output.logits, self._batch[:, 1:])
        gradients: Sequence[Tensor] = ()
        if isinstance(self.model, FSDPModule):
            (loss + output.router_loss).backward()
        else:
            gradients = torch.autograd.grad(loss + output.router_loss, self._parameters, materialize_grads=True)
        return loss.detach(), output.expert_load, gradients


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, make torch choose reproducible algorithms (attention's backward has others); restored on leaving."""
    if device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill_before = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # costs a write of every new tensor and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill_before
