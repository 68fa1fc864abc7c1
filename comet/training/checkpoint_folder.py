"""Checkpoint folders: names, the manifest that makes one complete, and the choice of the one to continue from.

``step-000200.tmp`` is being written. When all ranks are done, rank 0 adds the manifest ``comet.json`` with the size of
every file and renames the folder to ``step-000200``. A kill at any moment therefore leaves either the old state of
affairs or the new one, and a file that was cut off later is noticed before anything is read from it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comet.config import require
from comet.models.config import ModelConfig

MANIFEST = "comet.json"
FORMAT = 1
KEPT = 2
PARTIAL_SUFFIX = ".tmp"
FREE_FIELDS = frozenset({"name", "moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_rate", "moe.capacity_factor"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Args:
        path: Its folder.
        step: Optimizer steps taken.
        model: Fields of the model configuration, nested ones with dots.
        saved_at: Unix time in seconds.
        layout: World size, EP and TP it was saved at.
    """

    path: Path
    step: int
    model: Mapping[str, Any]
    saved_at: float
    layout: Mapping[str, int]

    def check_model(self, config: ModelConfig) -> None:
        """Raise ``ValueError`` naming every field in which the checkpoint's model differs from ``config``."""
        wanted = model_fields(config)
        names = sorted((wanted.keys() | self.model.keys()) - FREE_FIELDS)
        different = [
            f"{name}={self.model.get(name)!r} there but {wanted.get(name)!r} here"
            for name in names
            if self.model.get(name) != wanted.get(name)
        ]
        require(not different, f"checkpoint {self.path} must be of the same model, but has {', '.join(different)}")


def model_fields(config: ModelConfig) -> dict[str, Any]:
    """The configuration as one flat dictionary, ``moe.top_k`` and so on."""
    fields: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            fields.update({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            fields[name] = value
    return fields


def folder_name(step: int) -> str:
    """``folder_name(200) == "step-000200"``."""
    return f"step-{step:06d}"


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it is complete: ``step-000200`` becomes ``step-000200.tmp``."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def open_partial(path: Path) -> None:
    """Make the folder to write the checkpoint ``path`` into, removing what killed jobs left beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"step-*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)
    partial_path(path).mkdir()


def complete(partial: Path, *, step: int, config: ModelConfig, layout: Mapping[str, int]) -> Checkpoint:
    """Add the manifest, rename the folder into place and delete all but the newest two checkpoints.

    Args:
        partial: From ``open_partial``, with the files of all ranks.
        step: Optimizer steps taken.
        config: Of the model.
        layout: World size, EP and TP.

    Returns:
        The checkpoint.
    """
    root, final = partial.parent, partial.with_suffix("")
    others = [found.path for found in list_checkpoints(root)[0] if found.path != final]
    outdated = others[KEPT - 1 :]
    manifest = {
        "format": FORMAT,
        "step": step,
        "saved_at": time.time(),
        "layout": dict(layout),
        "model": model_fields(config),
        "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
    }
    with (partial / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    replaced = partial_path(final.with_name(final.name + "-replaced"))
    if final.exists():  # of an earlier run in this folder; out of the way under a name that nobody loads
        final.rename(replaced)
        outdated.append(replaced)
    partial.rename(final)
    _sync_folder(root)
    for old in outdated:
        shutil.rmtree(old)
    return read_checkpoint(final)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Args:
        path: Its folder.

    Returns:
        The checkpoint; every file is present in full length.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it is half-written, truncated, or its manifest cannot be read.
    """
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "a checkpoint must be an existing folder", str(path))
    require(
        path.suffix != PARTIAL_SUFFIX and (path / MANIFEST).is_file(),
        f"checkpoint {path} is half-written: it has no {MANIFEST} or still ends in {PARTIAL_SUFFIX}",
    )
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = dict(manifest["files"])
        found = Checkpoint(
            path=path,
            step=int(manifest["step"]),
            model=dict(manifest["model"]),
            saved_at=float(manifest["saved_at"]),
            layout=dict(manifest["layout"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error})") from error
    require(
        manifest["format"] == FORMAT, f"checkpoint {path} has format={manifest['format']}, this version reads {FORMAT}"
    )
    for name, size in files.items():
        file = path / name
        actual = f"has {file.stat().st_size} bytes" if file.is_file() else "is gone"
        require(
            actual == f"has {size} bytes",
            f"checkpoint {path} is truncated: {name} {actual}, its manifest says {size} bytes",
        )
    return found


def list_checkpoints(root: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints of a folder, newest first, and why each other one was skipped."""
    found, skipped = [], []
    for path in sorted(root.glob("step-*")):
        try:
            found.append(read_checkpoint(path))
        except ValueError as error:
            skipped.append(str(error))
    return sorted(found, key=lambda item: (item.saved_at, item.step), reverse=True), skipped


def choose_checkpoint(resume: str | None, output_dir: str) -> tuple[Checkpoint | None, list[str]]:
    """What to continue from.

    Args:
        resume: ``None``; ``auto``; a checkpoint; or a folder of checkpoints, of which the newest complete one is taken.
        output_dir: Where ``auto`` looks.

    Returns:
        The checkpoint, ``None`` to start anew, and why newer ones were skipped.

    Raises:
        FileNotFoundError: If ``resume`` names nothing.
        ValueError: If the checkpoint is broken, or the folder holds no complete one.
    """
    if resume is None:
        return None, []
    if resume == "auto":
        found, skipped = list_checkpoints(Path(output_dir))
        return (found[0] if found else None), skipped
    root = Path(resume)
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "resume must be 'auto', a checkpoint or a folder of checkpoints", resume)
    if root.name.startswith("step-") or (root / MANIFEST).exists():
        try:
            return read_checkpoint(root), []
        except ValueError as error:
            others = [str(other.path) for other in list_checkpoints(root.parent)[0]]
            hint = f"; complete is {others[0]}" if others else ""
            raise ValueError(f"resume={resume!r}: {error}{hint}") from error
    found, skipped = list_checkpoints(root)
    require(bool(found), f"resume={resume!r} must hold a complete checkpoint; {'; '.join(skipped) or 'it has none'}")
    return found[0], skipped


def _sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
