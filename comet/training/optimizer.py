"""AdamW over sharded models: parameters shared out, gradients summed over the ranks, their norm, the learning rate.

The objective is the mean over all ranks of each rank's mean loss. A backward pass leaves dense gradients of this
rank's tokens, but expert gradients already summed over the tokens of the MoE group (see ``comet.moe.MoE``). Hence
dense gradients are summed over the world, expert gradients over the ranks that hold the same shard, and both are
divided by the world size, by the optimizer as it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from comet.data_parallel import sum_over_ranks
from comet.jobs.config import TrainConfig
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.models.gpt import GPT

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class ScaledAdamW(AdamW):
    """AdamW whose kernel averages and clips: it divides the gradients by ``grad_scale`` and stores the quotients."""

    grad_scale: Tensor | None = None  # torch's fused kernels divide by it
    found_inf: Tensor | None = None

    def clip(self, norm: Tensor, max_norm: float, *, num_summed: int) -> None:
        """Let the next step take the mean of so many summed gradients, shortened where it is longer than allowed.

        Example: norm 4, at most 1, of 2 ranks: the sums are divided by ``2 * (4 + 1e-6) / 1``; at most 8: by 2.
        """
        self.grad_scale = num_summed * ((norm + 1e-6) / max_norm).clamp(min=1.0)

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.grad_scale = None
        return found


def shard_dense(model: GPT, group: ExpertGroup) -> None:
    """Share out all parameters but the experts among all ranks; a backward pass sums their gradients (collective).

    Parameters stay float32. Matrices of attention and the head, which are multiplied in the dtype of the model, are
    gathered in this dtype. Their gradients are summed in float32.
    """
    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(world, group.device.type)
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    attention, experts = [block.attention for block in model.blocks], set(model.expert_parameters())
    for module in (*attention, model.head):
        fully_shard(module, mesh=mesh, mp_policy=cast)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=whole, ignored_params=experts)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor


def make_optimizer(model: GPT, config: TrainConfig) -> ScaledAdamW:
    """AdamW whose weight decay applies to matrices only; the learning rate is set before every step.

    The moments exist from the start, as zeros, so that a checkpoint can be loaded into them.
    """
    dense = model.dense_parameters()
    matrices, biases = model.expert_matrices(), model.expert_biases()
    groups = [
        {"params": [p for p in dense if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in dense if p.dim() <= 1], "weight_decay": 0.0},
        # Apart: torch's fused kernels take tensors or DTensors, not both.
        {"params": matrices, "weight_decay": config.weight_decay},
        *([{"params": biases, "weight_decay": 0.0}] if biases else []),
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
    """
    warmup_steps = config.num_warmup_steps
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(config.steps - 1 - warmup_steps, 1)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


@torch.no_grad()
def sum_gradients(model: GPT, group: ExpertGroup) -> Tensor:
    """Sum gradients over the ranks, in place, and return the norm of the global objective's gradient (collective).

    In the norm dense parameters count once, and expert parameters once per shard: their squares are summed over the
    world and divided by the number of ranks that hold a part alike. Every rank gets the same bits.
    """
    dense, experts = _gradients(model.dense_parameters()), _gradients(model.expert_parameters())
    is_sharded = isinstance(model, FSDPModule)
    if group.world_size > 1 and not is_sharded:
        sum_over_ranks(dense, None)
    if group.data_parallel > 1:
        sum_over_ranks(experts, group.expert_data_group)
    dense_square = _square_sum(dense, group.device)
    if is_sharded:
        dist.all_reduce(dense_square)
    alike = [each for each in experts if each.dim() == 2]  # b2, which the TP ranks of a shard hold alike
    expert_square = _square_sum([each for each in experts if each.dim() > 2], group.device)
    if alike:
        expert_square = expert_square + _square_sum(alike, group.device) / group.parallel.tp
    if group.world_size > 1:
        dist.all_reduce(expert_square)
        expert_square = expert_square / group.data_parallel
    return (dense_square + expert_square).sqrt() / group.world_size


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts. A gradient that no token touched is zero: all ranks send the same buckets."""
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
