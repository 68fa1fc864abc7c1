"""What torch's data-parallel wrappers, clipping and optimizers need beside parameters that are ``DTensor``s.

What torch does by itself: checkpoints, optimizers and norms of the experts are right; a list that mixes them with
tensors, as in a ``foreach`` optimizer or in ``torch.nn.utils.clip_grad_norm_``, is refused (for optimizers, give the
experts a parameter group of their own), and so are they by ``DistributedDataParallel`` and by ``fully_shard`` over any
mesh but ``group.mesh["data"]``, over which it shards a layer further. What torch reads of a ``DTensor`` as a
number, by ``.item()`` or ``bool``, is of this rank's part: ask for ``full_tensor()`` first. Adafactor does not.
``torch.amp.GradScaler`` takes the placements of the first gradient of its list for all of them, so a sharded parameter
(``w1``) has to come before ``b2``, which TP ranks replicate: else one of them may step where another does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from comet.layer.group import ExpertGroup
from comet.moe import MoE


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
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, of tensors and ``DTensor``s of several meshes (collective).

    Args:
        parameters: One, or several in the same order on all ranks; those without a gradient are passed over. Tensors
            that are no ``DTensor`` count as replicas.
        max_norm: Longer gradients are scaled to it.

    Returns:
        ``()``: the 2-norm of all gradients before, equal on all ranks.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [get_total_norm([each.grad for each in alike if each.grad is not None]) for alike in by_mesh.values()]
    norm = get_total_norm([each.full_tensor() if isinstance(each, DTensor) else each for each in norms])
    for alike in by_mesh.values():
        clip_grads_with_norm_(alike, max_norm, norm)
    return norm


def _mean(group: ExpertGroup, part: Tensor) -> Tensor:
    """A gradient summed over an MoE group's tokens as a mean over the ranks of the world (collective)."""
    mean = part / group.world_size
    if group.data_parallel > 1:
        dist.all_reduce(mean, group=group.expert_data_group)
    return mean
