"""Expert weights as ``DTensor`` parameters: what torch's own tools need to know of who holds what.

Each rank of an MoE group of several ranks holds a part of two global tensors, ``w1 (E, 2, F, D)`` and ``w2 (E, D, F)``:
``Shard(0)`` over EP and ``Shard(2)`` over TP; of biases ``b1 (E, 2, F)`` alike, ``b2 (E, D)`` ``Replicate()`` over TP.
As these, ``state_dict()`` saves and loads on any EP x TP, and a norm is that of all experts. Kernels get the local
part, which costs an attribute, and in training one autograd function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from comet.comm.collectives import wants_grad
from comet.config import ParallelConfig, require
from comet.utils.derivatives import first_only

GradReduce = Callable[[Tensor], Tensor]  # takes this rank's part of a gradient, and returns the sum

PLACEMENTS: dict[str, Placement] = {"ep": Shard(0), "tp": Shard(2)}


def make_mesh(
    parallel: ParallelConfig, device_type: str, process_group: ProcessGroup | None, same_shard: ProcessGroup | None
) -> DeviceMesh | None:
    """The world as a mesh of (MoE group ``data``, ``ep``, ``tp``) without those of ``ep`` and ``tp`` that are 1.

    Example: 4 ranks, EP = 2, TP = 1: ``[[0, 1], [2, 3]]`` of ``("data", "ep")``.
    """
    if process_group is None or same_shard is None or parallel.world_size == 1:
        return None
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(same_shard.size(), parallel.ep, parallel.tp)
    names: tuple[str, ...] = ("data", "ep", "tp")
    if parallel.ep == 1 or parallel.tp == 1:
        names, groups, ranks = ("data", "ep" if parallel.ep > 1 else "tp"), [process_group], ranks.flatten(1)
    else:
        # Not init_device_mesh: it splits NCCL's communicator of the world, which hangs once earlier parts were closed.
        axes = ranks.transpose(1, 2).flatten(0, 1), ranks.flatten(0, 1)
        groups = [dist.new_subgroups_by_enumeration(axis.tolist())[0] for axis in axes]
    return DeviceMesh.from_group([same_shard, *groups], device_type, mesh=ranks, mesh_dim_names=names)


def forget_meshes() -> None:
    """Let torch forget the operations on ``DTensor``s that it knows.

    It knows a mesh by its ranks, and would run an operation of the next group on process groups that are closed. The
    function it has for this imports the compiler.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in every torch
    if clear_native is not None:
        clear_native()


def expert_parameter(part: Tensor, mesh: DeviceMesh | None) -> nn.Parameter:
    """This rank's part as a parameter: of the global tensor, or the whole where ``mesh`` is ``None``.

    What has no axis for F, a tensor of two axes, is whole on all TP ranks.
    """
    if mesh is None:
        return nn.Parameter(part)
    names = mesh.mesh_dim_names
    assert names is not None
    placements = [Replicate() if name == "tp" and part.dim() < 3 else PLACEMENTS[name] for name in names[1:]]
    if part.device.type != mesh.device_type:  # experts in host memory: a DTensor on the mesh would move there
        mesh = DeviceMesh(part.device.type, mesh.mesh, mesh_dim_names=names, _init_backend=False)
    held: Any = DTensor.from_local(part, mesh[names[1:]], placements, run_check=False)
    parameter: Any = nn.Parameter(held)
    parameter._spec = held._spec  # see ``forget_meshes``: it might have the mesh of another group, which may be closed
    return cast(nn.Parameter, parameter)


def check_own_part(name: str, given: object, own: Tensor) -> None:
    """Raise ``ValueError`` for a part of ``own`` that another rank saved, which torch would load as this rank's."""
    if isinstance(given, DTensor) and isinstance(own, DTensor):
        theirs, mine = (tuple(each.device_mesh.get_coordinate() or ()) for each in (given, own))
        require(
            theirs == mine,
            f"{name} of the state holds the part at {theirs} of {own.device_mesh.mesh_dim_names}, must be this rank's, "
            f"at {mine}: save on every rank, with torch.distributed.checkpoint or to a file of its own",
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a ``DTensor``, which autograd does not see; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def move_part(parameter: nn.Parameter, part: Tensor) -> None:
    """Let a parameter hold this rank's part in other memory; it stays the same parameter, as optimizers know it."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = part
    else:
        parameter.data = part


def count_writes(detached: Tensor, own: Tensor) -> None:
    """Let torch count writes to the part of a detached ``DTensor`` as writes to the part of ``own``.

    ``dcp.load`` writes into such parts. torch's ``detach`` of a ``DTensor`` gives the part a counter of its own.
    """
    if isinstance(detached, DTensor) and detached is not own:
        detached._local_tensor = local(own).detach()


def version_of(tensor: Tensor) -> int:
    """Return how often torch counted a write to a tensor; 0 for one of inference mode, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def absent(weight: Tensor) -> Tensor:
    """Zeros, in no memory, in the place of a weight that is held elsewhere and in another form."""
    return weight.new_zeros(()).expand(weight.shape)


def require_held(*weights: Tensor) -> None:
    """Raise ``ValueError`` if ``absent`` made what this rank holds of a weight."""
    require(
        all(any(local(weight).stride()) for weight in weights),
        "expert_dtype of an engine has taken w1 and w2 out of this model, to hold them quantised: build the model "
        "again, or load it again, to save, copy or cast it, to make another engine or to compute with other experts",
    )


def local_weights(
    w1: Tensor, w2: Tensor, dtype: torch.dtype, reduce: GradReduce | None = None
) -> tuple[Tensor, Tensor]:
    """This rank's part of both weights, or of both biases, as the kernels take it, differentiably.

    Args:
        w1: ``(e, 2, F/TP, D)``, or ``b1 (e, 2, F/TP)``; or a ``DTensor`` of this local shape.
        w2: ``(e, D, F/TP)``, or ``b2 (e, D)``; or a ``DTensor`` of this local shape.
        dtype: Of the products.
        reduce: What gradients of ``DTensor``s go through.

    Returns:
        ``(e, 2F/TP, D)`` and ``(e, D, F/TP)``, or ``(e, 2F/TP)`` and ``(e, D)``, not copied where the type is theirs.
    """
    if not (isinstance(w1, DTensor) and isinstance(w2, DTensor)):
        return w1.to(dtype).flatten(1, 2), w2.to(dtype)
    if wants_grad(w1, w2):
        parts: tuple[Tensor, Tensor] = _LocalWeights.apply(w1, w2, dtype, reduce)
        return parts
    return w1._local_tensor.to(dtype).flatten(1, 2), w2._local_tensor.to(dtype)


def global_grad(part: Tensor | None, parameter: Tensor, reduce: GradReduce | None = None) -> Tensor | None:
    """A gradient of ``local(parameter)``, in any shape and type, as one of ``parameter``, behind ``reduce``.

    What TP ranks hold alike (b2) they have summed in other orders: they take the mean, and it stays alike (collective).
    """
    if part is None or not parameter.requires_grad:
        return None
    if not isinstance(parameter, DTensor):
        return part.view_as(parameter)
    mesh, tp = parameter.device_mesh, parameter.placements[-1]
    if tp.is_replicate():
        part = part / mesh.size(-1)
        dist.all_reduce(part, group=mesh.get_group(-1))
    part = part.to(parameter.dtype).reshape(parameter._local_tensor.shape)
    part = part if reduce is None else reduce(part)
    make: Callable[..., Tensor] = DTensor  # from_local takes tens of microseconds to find the same spec again
    return make(part.contiguous(), parameter._spec, requires_grad=False)


class _LocalWeights(torch.autograd.Function):
    """One function for both weights, with cast and shape: torch's own, one by one, take several times as long."""

    @staticmethod
    def forward(
        ctx: Any, w1: DTensor, w2: DTensor, dtype: torch.dtype, reduce: GradReduce | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.parameters, ctx.reduce = (w1, w2), reduce
        part1, part2 = w1._local_tensor, w2._local_tensor
        ctx.versions = [version_of(each) if each.dtype == dtype else None for each in ctx.parameters]
        # Tensors of their own: autograd marks what is returned.
        return part1.to(dtype).flatten(1, 2), part2.view(part2.shape) if part2.dtype == dtype else part2.to(dtype)

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for version, each in zip(ctx.versions, ctx.parameters, strict=True):
            # The path saved the part. Torch does not count what is written to the DTensor as a change of it.
            if version not in (None, version_of(each)):
                raise RuntimeError(
                    f"expert weights of shape {tuple(each.shape)} were modified by an inplace operation between "
                    "forward and backward pass: write to them behind all backward passes"
                )
        pairs = zip(grads, ctx.parameters, strict=True)
        return *(global_grad(grad, parameter, ctx.reduce) for grad, parameter in pairs), None, None
