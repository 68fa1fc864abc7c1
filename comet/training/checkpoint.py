"""Weights and optimizer moments to and from disk, through ``torch.distributed.checkpoint``.

Expert tensors are saved as shards of one global tensor (see ``comet.layer.sharding``), so a job with another EP, TP or
world size loads them. At the same world size and layout a resumed job goes on bit for bit: weights, moments and the
step are all its state, since batches and learning rates are functions of the step.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import AdamW

from comet.comm.handshake import PATIENCE, patience
from comet.config import require
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.models.gpt import GPT
from comet.training.checkpoint_files import Reader, Writer
from comet.training.checkpoint_folder import (
    KEPT,
    PARTIAL_SUFFIX,
    Checkpoint,
    choose_checkpoint,
    complete,
    folder_name,
    list_checkpoints,
    open_partial,
    partial_path,
    read_checkpoint,
    remove_checkpoint,
)
from comet.training.ranks import from_first_rank
from comet.training.saved_settings import SETTINGS_FILE, TOKENIZER_FILE, flat, to_yaml
from comet.utils.shared_file import naming, write_whole

MOMENTS = ("exp_avg", "exp_avg_sq")
# torch warns a single process that has no process group.
alone_on_purpose = partial(warnings.catch_warnings, action="ignore", category=UserWarning)


@dataclass
class Checkpointer:
    """Saves a model and its optimizer, and loads them; where files are written in the background, leaving it waits."""

    root: Path  # folder of the checkpoints, shared by all ranks
    model: GPT
    optimizer: AdamW
    group: ExpertGroup
    settings: Mapping[str, Any] = field(default_factory=dict)  # kept in every checkpoint
    text: str = ""  # fingerprint of the text that the run learns from
    layers: Mapping[str, Any] = field(default_factory=dict)  # device, path and split of its MoE layers
    tokenizer_json: str = ""  # kept in every checkpoint, too; bytes have none
    in_background: bool = False  # whether files are written in the background, from a copy in host memory
    path: Path | None = field(default=None, init=False)  # the last checkpoint that was saved or loaded
    _pending: tuple[Path, Future[Any]] | None = field(default=None, init=False)  # the save in the background
    _ranks: ProcessGroup | None = field(default=None, init=False)  # for collectives apart from those of training
    _stager: DefaultStager | None = field(default=None, init=False)  # keeps the memory of copies from save to save

    def __enter__(self) -> Self:
        if not self.in_background:
            return self
        on_gpu = self.group.device.type == "cuda"
        options = dict(use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu)
        self._stager = DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **options))
        if self.group.world_size > 1:
            self._ranks = dist.new_group(backend="gloo", timeout=PATIENCE)
        else:  # ``alone_on_purpose`` ends before torch's thread warns.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        return self

    def __exit__(self, *_: object) -> None:
        """Let the save that is under way end, even after an error of training."""
        if self._pending is not None:
            wait([self._pending[1]])
        if self._stager is not None:
            self._stager.close()
        if self._ranks is not None:
            dist.destroy_process_group(self._ranks)

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed; ``finish`` says why."""
        future = self._pending and self._pending[1]
        return bool(future and future.done() and future.exception())

    @patience()
    def save(self, step: int) -> Path:
        """Write a checkpoint of optimizer step ``step`` and return its folder (collective).

        It is complete when any rank returns, or, if files are written in the background, after ``finish``. If a file
        cannot be written, remove the others and raise ``ValueError``.
        """
        self.finish()
        tensors, part = self._tensors(), partial_path(self.root / folder_name(step))
        try:
            part = from_first_rank(partial(self._open, step))
            writer = Writer(part, partial(self._complete, part, step))
            if self.in_background:
                aside: dict[str, Any] = dict(process_group=self._ranks, async_stager=self._stager)
                saved: Any = dcp.async_save(tensors, storage_writer=writer, **aside)
                self._pending = part, saved
            else:
                with alone_on_purpose():
                    dcp.save(tensors, storage_writer=writer)
                self.path = part.with_suffix("")
        except (CheckpointException, OSError) as error:  # All ranks raise it.
            self._refuse(part, error)
        return part.with_suffix("")

    def finish(self) -> None:
        """Wait for the save that is under way; raise ``ValueError`` if it has failed (collective)."""
        if self._pending is None:
            return
        (part, saved), self._pending = self._pending, None
        try:
            saved.result()
        except (CheckpointException, OSError) as error:  # All ranks raise it.
            self._refuse(part, error)
        self.path = part.with_suffix("")

    def require_room(self, num_saves: int, *, overwrite: bool) -> None:
        """Raise ``ValueError`` unless the disk has room for the checkpoints of a run that saves so often (collective).

        Args:
            overwrite: Whether checkpoints that are there now will be removed first.
        """

        def check() -> None:
            there = list_checkpoints(self.root)[0]
            num_kept = 0 if overwrite else len(there)
            needed = min(num_saves, max(KEPT + 1 - num_kept, 1)) * num_bytes  # The oldest goes when the next is whole.
            removed = [*self.root.glob(f"step-*{PARTIAL_SUFFIX}"), *(found.path for found in there if overwrite)]
            freed = sum(file.stat().st_size for folder in removed for file in folder.glob("*"))
            free = shutil.disk_usage(self.root).free + freed
            rule = f"must have {needed:,} bytes free for checkpoints of {num_bytes:,}, {KEPT} of which are kept while"
            ways = "choose a folder on another disk, or a smaller model"
            require(
                needed <= free, f"output_dir={str(self.root)!r} {rule} another is written, but has {free:,}: {ways}"
            )

        num_bytes = sum(tensor.nbytes + 1024 for tensor in self._tensors().values())  # A record has a header.
        from_first_rank(check)

    def not_finite(self) -> list[str]:
        """Names of weights and moments that hold NaN or Inf on any rank (collective)."""
        tensors = {name: local(tensor) for name, tensor in self._tensors().items() if tensor.is_floating_point()}
        parts = [part if part.numel() else part.new_zeros(1) for part in tensors.values()]
        largest = torch.stack(torch._foreach_norm(parts, math.inf, torch.float32))
        bad = (~largest.isfinite()).int()
        if self.group.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        return [name for name, is_bad in zip(tensors, bad.tolist(), strict=True) if is_bad]

    def load(self, checkpoint: Checkpoint) -> int:
        """Read a checkpoint of any EP, TP and world size, and return its optimizer steps (collective)."""
        checkpoint.check_model(self.model.config)
        read_checkpoint(checkpoint.path)
        read_tensors(checkpoint.path, self._tensors())
        for state in self.optimizer.state.values():
            state["step"].fill_(float(checkpoint.step))
        self.path = checkpoint.path
        return checkpoint.step

    def _tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name, sharing memory with the model and the optimizer."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tensors = _model_tensors(self.model)
        for parameter, state in self.optimizer.state.items():
            name = names[id(parameter)]
            tensors.update({f"optimizer.{name}.{moment}": state[moment] for moment in MOMENTS})
        return tensors

    def _open(self, step: int) -> Path:
        part = open_partial(self.root, step)
        write_whole(part / SETTINGS_FILE, to_yaml(self.settings))
        if self.tokenizer_json:
            write_whole(part / TOKENIZER_FILE, self.tokenizer_json)
        return part

    def _complete(self, part: Path, step: int, checksums: Mapping[str, str]) -> Path:
        parallel = self.group.parallel
        layout = {"world_size": self.group.world_size, "ep": parallel.ep, "tp": parallel.tp}
        manifest = {"step": step, "layout": layout, "model": flat(asdict(self.model.config)), "text": self.text}
        manifest["layers"] = self.layers
        with naming(part):
            return complete(part, manifest, checksums)

    def _refuse(self, part: Path, error: CheckpointException | OSError) -> NoReturn:
        """Remove what was written and say why in one line (collective)."""
        path, (where, cause) = part.with_suffix(""), cause_of(error)
        num_bytes = sum(tensor.nbytes for tensor in self._tensors().values())

        def tidy_up() -> str:
            remove_checkpoint(part)
            whole = [str(found.path) for found in list_checkpoints(self.root)[0]]
            free = shutil.disk_usage(self.root).free
            return f"it needs {num_bytes:,} bytes, {free:,} are free; the last whole one is {[*whole, 'none'][0]}"

        facts = from_first_rank(tidy_up)
        if not isinstance(cause, OSError):
            raise RuntimeError(f"checkpoint {path} was not written: {where}{cause}") from cause
        raise ValueError(f"checkpoint {path} cannot be written: {cause.strerror}: {facts}") from cause


def load_weights(model: GPT, checkpoint: Checkpoint) -> None:
    """Read the weights of a checkpoint of any EP, TP and world size into a model, without the moments (collective)."""
    checkpoint.check_model(model.config)
    choose_checkpoint([checkpoint], [])
    read_tensors(checkpoint.path, _model_tensors(model))


def _model_tensors(model: GPT) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def read_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors of a checkpoint, by name, in place (collective)."""
    try:
        with alone_on_purpose(), patience():
            dcp.load(tensors, storage_reader=Reader(path))
    except CheckpointException as error:
        _, cause = cause_of(error)
        if isinstance(cause, ValueError):
            raise cause from error
        raise ValueError(f"checkpoint {path} cannot be read: {str(cause).splitlines()[0]}") from error


def read_whole(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read all tensors of a checkpoint whose names begin with ``prefix``, each whole (collective)."""
    kinds: Mapping[str, Any] = Reader(path).read_metadata().state_dict_metadata
    own = {name: kind for name, kind in kinds.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in own.items()}
    read_tensors(path, tensors)
    return tensors


def cause_of(error: CheckpointException | OSError) -> tuple[str, BaseException]:
    """Return the error that failed a save, after "rank 1: " where known; of several ranks the system's own error."""
    if isinstance(error, OSError):
        return "", error
    causes = [(f"rank {rank}: ", cause) for rank, (cause, _) in error.failures.items()]
    return next((each for each in causes if isinstance(each[1], OSError)), causes[0])
