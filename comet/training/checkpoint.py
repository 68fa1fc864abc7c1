"""Weights and optimizer moments to and from disk, through ``torch.distributed.checkpoint``.

Expert tensors are saved as shards of one global tensor (see ``comet.sharding``), so a job with another EP, TP or world
size loads them. At the same world size a resumed job goes on bit for bit: weights, moments and
the step are all its state, since batches and learning rates are functions of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import AdamW

from comet.comm.deadline import meet, patience
from comet.group import ExpertGroup
from comet.models.gpt import GPT
from comet.training.checkpoint_folder import (
    Checkpoint,
    complete,
    folder_name,
    open_partial,
    partial_path,
    read_checkpoint,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpointer:
    """Saves a model and its optimizer, and loads them.

    Args:
        root: Folder of the checkpoints, shared by all ranks.
        model: Saved and loaded in place.
        optimizer: From ``make_optimizer``.
        group: The ranks; collective.
    """

    def __init__(self, root: Path, model: GPT, optimizer: AdamW, group: ExpertGroup) -> None:
        self.root = root
        self.model = model
        self.optimizer = optimizer
        self.group = group

    def save(self, step: int) -> Path:
        """Write a checkpoint (collective).

        Args:
            step: Optimizer steps taken.

        Returns:
            Its folder; it exists, complete, when any rank returns.
        """
        is_writer = self.group.world_rank == 0
        path = self.root / folder_name(step)
        partial = partial_path(path)
        if is_writer:
            open_partial(path)
        meet(self.group.device)
        writer = dcp.FileSystemWriter(partial, sync_files=True)
        with _alone_on_purpose():
            dcp.save(self._tensors(), storage_writer=writer, no_dist=not dist.is_initialized())
        if is_writer:
            parallel = self.group.parallel
            layout = {"world_size": self.group.world_size, "ep": parallel.ep, "tp": parallel.tp}
            complete(partial, step=step, config=self.model.config, layout=layout)
        meet(self.group.device)
        return path

    def load(self, checkpoint: Checkpoint) -> int:
        """Read a checkpoint of any EP, TP and world size into the model and the optimizer (collective).

        Args:
            checkpoint: From ``choose_checkpoint``.

        Returns:
            Optimizer steps taken.

        Raises:
            ValueError: If it is of another model, or was damaged since it was chosen.
        """
        checkpoint.check_model(self.model.config)
        read_checkpoint(checkpoint.path)
        _read(checkpoint.path, self._tensors())
        for state in self.optimizer.state.values():
            state["step"].fill_(float(checkpoint.step))
        return checkpoint.step

    def _tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name, sharing memory with the model and the optimizer."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tensors = _model_tensors(self.model)
        for parameter, state in self.optimizer.state.items():
            name = names[id(parameter)]
            tensors.update({f"optimizer.{name}.{moment}": state[moment] for moment in MOMENTS})
        return tensors


def load_weights(model: GPT, checkpoint: Checkpoint) -> None:
    """Read the weights of a checkpoint of any EP, TP and world size, without the moments (collective).

    Args:
        model: Filled in place.
        checkpoint: Complete, as ``choose_checkpoint`` returns it.

    Raises:
        ValueError: If the checkpoint is of another model.
    """
    checkpoint.check_model(model.config)
    _read(checkpoint.path, _model_tensors(model))


def _model_tensors(model: GPT) -> dict[str, Tensor]:
    """All weights and buffers by their names in a checkpoint, sharing memory with the model."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def _read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from a checkpoint, in place."""
    with _alone_on_purpose():
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Be patient, and silence the warning that a single process without a process group gets."""
    with patience(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
