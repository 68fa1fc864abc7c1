"""Data-parallel wrappers, reduced gradients, clipping and loss scaling for models whose experts are ``DTensor``s.

torch itself saves, steps and measures the experts of several ranks, but refuses a list of tensors and ``DTensor``s
("got mixed torch.Tensor and DTensor"). Where that comes up:

* ``torch.nn.utils.clip_grad_norm_``: ``comet.clip_grad_norm_``.
* ``torch.amp.GradScaler``: ``comet.GradScaler``.
* Optimizers with ``foreach`` or ``fused``: give the experts a parameter group of their own.
* ``AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))``: ``avg_fn=get_ema_avg_fn(decay)``.
* ``DistributedDataParallel``, and ``fully_shard`` over any mesh but ``group.mesh["data"]``: call ``exclude_experts``
  before either wraps the model.

torch reads a ``DTensor`` as this rank's part in ``.item()`` and ``bool``: ask for ``full_tensor()`` first. torch's
Adafactor does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from comet.comm.handshake import this_rank
from comet.config import require
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.moe import MoE

BUCKET_ELEMENTS = 2**24


def exclude_experts(model: nn.Module) -> set[nn.Parameter]:
    """Keep ``DistributedDataParallel`` and ``fully_shard`` from the expert weights; call it before either wraps.

    From then on a backward pass leaves gradients of the experts that are means over all ranks, as the wrapper's are;
    so it does in copies of the model. Calling it again changes nothing.

    Example: ``fully_shard(model, ignored_params=exclude_experts(model))``; or ``exclude_experts(model)``, then
    ``DistributedDataParallel(model)``, which finds their names in the model.

    Returns:
        The parameters that are sharded over an MoE group; none where a group is one rank.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MoE) and layer.group.mesh is not None]
    # In the layer, not a hook of its parameters, which copies, casts and load_state_dict(assign=True) would lose.
    for layer in layers:
        layer.grad_reduce = partial(_mean, layer.group)
    experts = {parameter for layer in layers for parameter in layer.expert_parameters()}
    names = [name for name, parameter in model.named_parameters() if parameter in experts]
    own = [f".{name}" for name in names]  # so DistributedDataParallel calls a parameter of the model itself
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names, *own}  # the caller's own stay
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return experts


@torch.no_grad()
def reduce_gradients(model: nn.Module, group: ExpertGroup) -> None:
    """Turn the gradients of each rank's loss into those of the mean of all losses, equal on all ranks (collective).

    Call it once a step, after the last backward pass and before clipping. Gradients of what all ranks hold (routers,
    shared experts, dense parameters) are averaged over all ranks. Gradients of experts hold the tokens of their MoE
    group already, and those of the other groups are added. Gradients that are averaged already are left alone: of
    experts after ``exclude_experts``, and of parameters that ``fully_shard`` sharded.
    """
    if group.world_size == 1:
        return
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    for name, each in model.named_modules():
        theirs = each.group.parallel if isinstance(each, MoE) and each.grad_reduce is None else group.parallel
        require(
            theirs.world_size == group.parallel.world_size,
            f"ep x tp={group.parallel.world_size} of the group must be the {theirs.world_size} of layer {name}: reduce "
            "the gradients of layers of other groups apart",
        )
    for name, parameter in model.named_parameters():
        layout = torch.strided if parameter.grad is None else parameter.grad.layout
        require(layout == torch.strided, f"layout={layout} of the gradient of {name} must be torch.strided")
    experts = {parameter: layer for layer in layers for parameter in layer.expert_parameters()}
    dense = [each for each in model.parameters() if each not in experts and not isinstance(each, DTensor)]
    summed = [each for each, layer in experts.items() if layer.grad_reduce is None]
    has_grad = [each.grad is not None for each in (*dense, *summed)]
    of_any = torch.tensor(has_grad, dtype=torch.int32, device=group.device)
    dist.all_reduce(of_any, dist.ReduceOp.MAX)
    for each, is_there in zip((*dense, *summed), of_any.tolist(), strict=True):
        if is_there and each.grad is None:
            each.grad = torch.zeros_like(each)
    for parameters, ranks in ((dense, None), (summed, group.expert_data_group)):
        gradients = [local(each.grad) for each in parameters if each.grad is not None]
        if ranks is None or group.data_parallel > 1:
            sum_over_ranks(gradients, ranks)
        for gradient in gradients:
            gradient.div_(group.world_size)


def sum_over_ranks(gradients: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Sum over the ranks of ``group``, in place, a bucket of up to ``BUCKET_ELEMENTS`` at a time (collective)."""
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


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:  # fmt: skip
    """Clip as ``torch.nn.utils.clip_grad_norm_``: tensors and ``DTensor`` of several meshes (collective).

    Args, result and error are torch's, equal on all ranks. Tensors that are no ``DTensor`` count as replicas.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [
        get_total_norm([each.grad for each in alike if each.grad is not None], norm_type, foreach=foreach)
        for alike in by_mesh.values()
    ]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    norm = get_total_norm(whole, norm_type, error_if_nonfinite)
    for alike in by_mesh.values():
        clip_grads_with_norm_(alike, max_norm, norm, foreach)
    return norm


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for an optimizer over tensors and ``DTensor``: all ranks take a step, or none.

    Example: ``scaler = comet.GradScaler(device)``, then on all ranks ``scaler.scale(loss).backward()``,
    ``scaler.step(optimizer)`` and ``scaler.update()``.
    """

    def _unscale_grads_(self, optimizer: Any, *given: Any) -> dict[torch.device, Tensor]:
        """Unscale this rank's parts, as torch does with tensors, and let all ranks know of the infinities of each."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        parts = [local(each).detach() for each in parameters]
        for part, parameter in zip(parts, parameters, strict=True):
            part.grad = local(parameter.grad)
        of_parts: Any = SimpleNamespace(param_groups=[{"params": parts}])
        found = super()._unscale_grads_(of_parts, *given)
        assert self._scale is not None, "torch has looked"
        found.setdefault(self._scale.device, torch.zeros_like(self._scale))  # no gradient may have reached this rank
        for infinities in found.values() if this_rank()[1] > 1 else ():
            dist.all_reduce(infinities, dist.ReduceOp.MAX)
        return found


def _mean(group: ExpertGroup, part: Tensor) -> Tensor:
    """A gradient summed over an MoE group's tokens as a mean over the ranks of the world (collective)."""
    mean = part / group.world_size
    if group.data_parallel > 1:
        dist.all_reduce(mean, group=group.expert_data_group)
    return mean
