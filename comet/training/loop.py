"""One optimizer step of a sharded model and what it measured: both passes, gradients over the ranks, AdamW.

The objective is the mean over all ranks of each rank's mean loss. A backward pass leaves dense gradients of this
rank's tokens, but expert gradients already summed over the tokens of the MoE group (see ``comet.moe.MoE``). Hence
dense gradients are summed over the world, expert gradients over the ranks that hold the same shard, and both are
divided by the world size, by the optimizer as it reads them.

The forward and the backward pass run kernel by kernel, or both are replayed from one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

from comet.jobs.config import TrainConfig
from comet.layer.group import ExpertGroup
from comet.layer.paths import CollectivePath, expert_capacity
from comet.layer.sharding import local
from comet.models.gpt import GPT, next_token_loss
from comet.training.data import sample_batch
from comet.utils.graphs import GraphMode, Replayed

BETAS = (0.9, 0.95)
EPSILON = 1e-8
BUCKET_ELEMENTS = 2**24


class ScaledAdamW(AdamW):
    """AdamW whose kernel divides the gradients by ``grad_scale`` and stores the quotients.

    So averaging and clipping need no pass over the gradients of their own.
    """

    grad_scale: Tensor | None = None  # what torch's fused kernels divide by
    found_inf: Tensor | None = None

    def clip(self, norm: Tensor, max_norm: float, *, num_summed: int) -> None:
        """Let the next step take the mean of so many summed gradients, shortened where it is longer than allowed.

        Example: norm 4, at most 1, of 2 ranks: the sums are divided by ``2 * (4 + 1e-6) / 1``; at most 8: by 2.

        Args:
            norm: ``()`` float32, of the mean.
            max_norm: Largest norm to keep.
            num_summed: Ranks.
        """
        self.grad_scale = num_summed * ((norm + 1e-6) / max_norm).clamp(min=1.0)

    def step(self, closure: Any = None) -> Any:
        """Take the step; the next one is not scaled unless ``clip`` says so again."""
        found = super().step(closure)
        self.grad_scale = None
        return found


def make_optimizer(model: GPT, config: TrainConfig) -> ScaledAdamW:
    """AdamW whose weight decay applies to matrices only; the learning rate is set before every step.

    The moments exist from the start, as zeros, so that a checkpoint can be loaded into them.
    """
    dense = model.dense_parameters()
    groups = [
        {"params": [p for p in dense if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in dense if p.dim() <= 1], "weight_decay": 0.0},
        # Apart: torch's fused kernels take tensors or DTensors, not both.
        {"params": model.expert_parameters(), "weight_decay": config.weight_decay},
    ]
    optimizer = ScaledAdamW(groups, lr=config.lr, betas=BETAS, eps=EPSILON, fused=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up to ``lr``, then a cosine down to ``min_lr_ratio * lr`` at the last step.

    Example: lr 1.0, min_lr_ratio 0.5, 2 warm-up steps of 5: 0.5, 1.0, 1.0, 0.75, 0.5 for steps 0 to 4.

    Args:
        step: Of this update, counted from 0.
        config: Read for ``lr``, ``min_lr_ratio``, the steps of warm-up and ``steps``.

    Returns:
        The learning rate of the step.
    """
    warmup_steps = config.num_warmup_steps
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(config.steps - 1 - warmup_steps, 1)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def sum_gradients(model: GPT, group: ExpertGroup) -> None:
    """Sum the gradients of a backward pass over the ranks, in place (collective).

    Divided by the world size they are those of the global objective, see ``ScaledAdamW``.
    """
    dense, experts = _gradients(model.dense_parameters()), _gradients(model.expert_parameters())
    if group.world_size > 1:
        _all_reduce(dense, None)
        if group.data_parallel > 1:
            _all_reduce(experts, group.expert_data_group)


@torch.no_grad()
def global_norm(model: GPT, group: ExpertGroup) -> Tensor:
    """The norm of the gradient of the global objective (collective).

    Dense parameters count once, expert parameters once per shard: their squares are summed over the world and divided
    by the number of MoE groups. Every rank gets the same bits, so replicated parameters stay equal.

    Args:
        model: Its gradients are summed.
        group: The ranks.

    Returns:
        ``()`` float32; no synchronisation with the device.
    """
    dense, experts = _gradients(model.dense_parameters()), _gradients(model.expert_parameters())
    device = group.device
    expert_square = _square_sum(experts, device)
    if group.world_size > 1:
        dist.all_reduce(expert_square)
        expert_square = expert_square / group.data_parallel
    return (_square_sum(dense, device) + expert_square).sqrt() / group.world_size


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's, in parameter order; one that no token touched is zero, so that all ranks send the same buckets."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))
    return gradients


def _square_sum(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, torch.float32)).square().sum()


def _all_reduce(gradients: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Sum over the ranks of ``group``, a bucket of up to ``BUCKET_ELEMENTS`` at a time."""
    bucket: list[Tensor] = []
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        full = sum(member.numel() for member in bucket) >= BUCKET_ELEMENTS
        if full or index == len(gradients) - 1:
            flat = torch.cat([member.flatten() for member in bucket])
            dist.all_reduce(flat, group=group)
            parts = flat.split([member.numel() for member in bucket])
            torch._foreach_copy_(bucket, [part.view_as(member) for part, member in zip(parts, bucket, strict=True)])
            bucket = []


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


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Measurements of one step over all ranks; on the device, so that taking them does not wait.

    Args:
        loss: ``()`` float32: mean loss in nats per byte.
        grad_norm: ``()`` float32: global gradient norm before clipping.
        expert_load: ``(L, E)`` float32: routed rows per MoE layer and expert, those that were dropped included.
        dropped_rows: ``()`` float32: routed rows of all layers beyond the experts' capacity; 0 if nothing is dropped.
        told_to_stop: ``()`` float32: ranks that had been told to stop when they began the step.
    """

    loss: Tensor
    grad_norm: Tensor
    expert_load: Tensor
    dropped_rows: Tensor
    told_to_stop: Tensor


class Trainer:
    """Runs optimizer steps; its only state is that of the model and the optimizer.

    Args:
        model: The model.
        optimizer: From ``make_optimizer``.
        group: The ranks.
        text: ``(N,)`` uint8, the training part.
        config: Batches, learning rate, clipping, and whether steps are replayed from a CUDA graph.
    """

    def __init__(
        self, model: GPT, optimizer: ScaledAdamW, group: ExpertGroup, text: Tensor, config: TrainConfig
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.text = text
        self.config = config
        self.capacity = expert_capacity(model.config.moe, group)
        self.passes = Passes(model, cuda_graph=config.cuda_graph)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        return self.group.world_size * self.config.batch_size * self.model.config.context

    @property
    def why_eager(self) -> str:
        """Why the last step was launched kernel by kernel; empty if it was replayed from a CUDA graph."""
        return self.passes.why_eager

    def step(self, step: int, *, told_to_stop: bool = False) -> StepMetrics:
        """Take optimizer step ``step``, counted from 0, and let the ranks know who was told to stop (collective)."""
        loss, dropped_rows, told, expert_load = self._backward(step, told_to_stop)
        sum_gradients(self.model, self.group)
        grad_norm = global_norm(self.model, self.group)
        self.optimizer.clip(grad_norm, self.config.grad_clip, num_summed=self.group.world_size)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate(step, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for layer, load in zip(self.model.moe_layers(), expert_load, strict=True):
            if layer.config.balance == "bias":
                layer.router.update_bias(load)
        return StepMetrics(loss, grad_norm, expert_load, dropped_rows, told)

    def _backward(self, step: int, told_to_stop: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fill the gradients; return the mean loss, and of all ranks dropped rows, those told to stop, and load."""
        batch = sample_batch(
            self.text,
            batch_size=self.config.batch_size,
            context=self.model.config.context,
            seed=self.config.seed,
            step=step,
            rank=self.group.world_rank,
        )
        loss, expert_load = self.passes(send(batch, self.group.device))
        dropped_rows = count_dropped_rows(expert_load, self.capacity, self.group)
        told = loss.new_full((1,), float(told_to_stop))
        sums = torch.cat([loss.view(1), dropped_rows.view(1), told, expert_load.flatten()])
        if self.group.world_size > 1:
            dist.all_reduce(sums)
        return sums[0] / self.group.world_size, sums[1], sums[2], sums[3:].view_as(expert_load)


def send(batch: Tensor, device: torch.device) -> Tensor:
    """A batch on the device; the host does not wait for a GPU, as it would to copy memory that is not pinned."""
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch


def count_dropped_rows(expert_load: Tensor, capacity: int | None, group: ExpertGroup) -> Tensor:
    """Routed rows beyond the capacity of their expert (collective).

    Args:
        expert_load: ``(L, E)`` float32: routed rows of this rank's tokens per MoE layer and expert.
        capacity: Rows an expert keeps of those its MoE group routes to it; ``None``: all.
        group: The ranks.

    Returns:
        ``()`` float32: this rank's share, an equal part of what its MoE group drops; the shares of all ranks add up.

    Example: capacity 3, two ranks with loads ``[[2, 1]]`` and ``[[3, 1]]``: expert 0 drops 2 rows, the share is 1.
    """
    if capacity is None:
        return expert_load.new_zeros(())
    load = expert_load.clone()
    if group.process_group is not None:
        dist.all_reduce(load, group=group.process_group)
    return (load - capacity).clamp(min=0).sum() / group.parallel.world_size


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
