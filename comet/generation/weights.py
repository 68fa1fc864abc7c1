"""The weights of a checkpoint without the optimizer's moments, onto any EP, TP and world size."""

from __future__ import annotations

import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from comet.group import ExpertGroup
from comet.models.gpt import GPT
from comet.training.checkpoint import EXPERT_DIM, FFN_DIM
from comet.training.checkpoint_folder import Checkpoint


def load_weights(model: GPT, checkpoint: Checkpoint, group: ExpertGroup) -> None:
    """Read a checkpoint into a model in place (collective); each rank reads its own part of the experts.

    Args:
        model: Of the checkpoint's shape.
        checkpoint: Complete, as ``find_source`` returns it.
        group: The model's ranks.

    Raises:
        ValueError: If the checkpoint is of another model.
    """
    checkpoint.check_model(model.config)
    reader = dcp.FileSystemReader(checkpoint.path)
    with warnings.catch_warnings():  # a process alone on purpose
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(_shards(model, group), storage_reader=reader, no_dist=not dist.is_initialized())


def _shards(model: GPT, group: ExpertGroup) -> dict[str, Tensor]:
    """The model's tensors by their names in a checkpoint, experts as parts of the global tensor."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if group.parallel.world_size == 1:
        return tensors
    shape = (group.data_parallel, group.parallel.ep, group.parallel.tp)
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("data", "ep", "tp"))
    placements = [Replicate(), Shard(EXPERT_DIM), Shard(FFN_DIM)]
    experts = {id(parameter) for parameter in model.expert_parameters()}
    names = [f"model.{name}" for name, parameter in model.named_parameters() if id(parameter) in experts]
    sharded = {name: DTensor.from_local(tensors[name], mesh, placements, run_check=False) for name in names}
    return {**tensors, **sharded}
