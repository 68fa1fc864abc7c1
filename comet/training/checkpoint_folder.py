"""Checkpoint folders: names, the manifest that makes one complete, and the choice of the one to continue from.

``step-000200.tmp`` is being written. When all ranks are done, rank 0 adds the manifest ``comet.json`` with size and
checksum of every file and renames the folder to ``step-000200``. A kill at any moment therefore leaves either the old
state of affairs or the new one, and a file that was cut off or changed later is noticed before anything is read from
it. Files and folders that are not a checkpoint's own are left alone, whatever their names.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from comet.config import require
from comet.kernels.runtime.activation import SWIGLU
from comet.models.config import ModelConfig
from comet.training.saved_settings import SETTINGS_FILE, TOKENIZER_FILE, flat
from comet.utils.shared_file import write_whole

logger = logging.getLogger(__name__)

MANIFEST = "comet.json"
METADATA = ".metadata"  # torch.distributed.checkpoint writes it last
FORMAT = 2
KEPT = 2
PARTIAL_SUFFIX = ".tmp"
OWN_FOLDERS = re.compile(r"step-\d{6,}(-\d+)?(-replaced)?(\.tmp)?")
OWN_FILES = re.compile(
    rf"__\d+_\d+\.distcp|({re.escape(METADATA)}|{re.escape(MANIFEST)}|{re.escape(SETTINGS_FILE)}|{re.escape(TOKENIZER_FILE)})"
    r"(\.tmp)?"
)
# Values of these fields in checkpoints that are older than the fields.
FIELDS_SINCE: Mapping[str, Any] = {"moe.expert_bias": False, **flat(asdict(SWIGLU), "moe.activation.")}
FREE_FIELDS = frozenset(
    f"moe.{name}" for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate", "capacity_factor", "max_imbalance")
) | {"name"}


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk, and the fields of its manifest."""

    path: Path
    step: int
    model: Mapping[str, Any]  # fields of the model configuration, nested ones with dots
    saved_at: float  # unix time in seconds; later than that of every other checkpoint there
    layout: Mapping[str, int]  # world size, EP and TP it was saved at
    files: Mapping[str, Mapping[str, Any]]  # "bytes" of every file and its checksum "blake2b"
    text: str = ""  # fingerprint of the text it was trained on
    # Device, path and split of the layers that wrote it; empty in checkpoints of version 0.1.0.
    layers: Mapping[str, Any] = field(default_factory=dict)

    def check_model(self, config: ModelConfig) -> None:
        """Raise ``ValueError`` naming every field in which the checkpoint's model differs from ``config``."""
        wanted, there = flat(asdict(config)), {**FIELDS_SINCE, **self.model}
        names = sorted((wanted.keys() | there.keys()) - FREE_FIELDS)
        different = [
            f"{name}={there.get(name)!r} there but {wanted.get(name)!r} here"
            for name in names
            if there.get(name) != wanted.get(name)
        ]
        require(not different, f"checkpoint {self.path} must be of the same model, but has {', '.join(different)}")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_path(path: Path) -> Path:
    """Return the folder that a checkpoint is written into: ``step-000200`` gives ``step-000200.tmp``."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def names_checkpoint(path: Path) -> bool:
    """Whether a folder that the user names is meant as one checkpoint, not as a folder of checkpoints."""
    return path.name.startswith("step-") or (path / MANIFEST).exists()


def open_partial(root: Path, step: int) -> Path:
    """Make and return the folder to write a checkpoint into; a number keeps its name from that of a foreign file."""
    _remove_outdated(root, [])
    for count in itertools.count(1):
        path = root / (folder_name(step) if count == 1 else f"{folder_name(step)}-{count}")
        is_ours = not path.exists() or (path / MANIFEST).is_file()
        if is_ours and not partial_path(path).exists():
            break
    partial_path(path).mkdir(parents=True)
    return partial_path(path)


def remove_checkpoint(path: Path) -> None:
    """Remove the files of a checkpoint, and its folder unless it holds foreign files."""
    if not (OWN_FOLDERS.fullmatch(path.name) and path.is_dir()) or path.is_symlink():
        return
    for file in path.iterdir():
        if OWN_FILES.fullmatch(file.name):
            file.unlink()
    if not any(path.iterdir()):
        path.rmdir()


def complete(partial: Path, manifest: Mapping[str, Any], checksums: Mapping[str, str]) -> Path:
    """Add the manifest, rename the folder into place, return it and delete all but the newest two checkpoints."""
    root, path = partial.parent, partial.with_suffix("")
    others = [found for found in list_checkpoints(root)[0] if found.path != path]
    # The clock may have gone back since another checkpoint was saved.
    saved_at = max([time.time(), *(math.nextafter(found.saved_at, math.inf) for found in others)])
    own = [name for name in (METADATA, SETTINGS_FILE, TOKENIZER_FILE) if (partial / name).is_file()]
    checksums = {**checksums, **{name: checksum(partial / name) for name in own}}
    files = {name: {"bytes": (partial / name).stat().st_size, "blake2b": checksums[name]} for name in sorted(checksums)}
    record = {"format": FORMAT, "saved_at": saved_at, **manifest, "files": files}
    write_whole(partial / MANIFEST, json.dumps(record, indent=1))
    _sync_folder(partial)
    if path.exists():  # An earlier run in this folder wrote it; no job loads the new name.
        path.rename(partial_path(path.with_name(path.name + "-replaced")))
    partial.rename(path)
    _sync_folder(root)
    _remove_outdated(root, [found.path for found in others[KEPT - 1 :]])
    return path


def _remove_outdated(root: Path, outdated: list[Path]) -> None:
    """Remove these checkpoints and what killed jobs left; no run ends because something cannot be removed."""
    for path in [*root.glob(f"step-*{PARTIAL_SUFFIX}"), *outdated]:
        try:  # under a name that the next checkpoint removes, should this be killed
            remove_checkpoint(path if path.suffix else path.rename(partial_path(path)))
        except OSError as error:
            logger.warning("%s could not be removed, which the next checkpoint tries again: %s", path, error)


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint; raises ``ValueError`` if it is half-written, truncated, or its manifest cannot be read."""
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "a checkpoint must be an existing folder", str(path))
    require(
        path.suffix != PARTIAL_SUFFIX and (path / MANIFEST).is_file(),
        f"checkpoint {path} is half-written: it has no {MANIFEST} or still ends in {PARTIAL_SUFFIX}",
    )
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        ways = "Comet 0.1.0 resumes format 1 and saves format 2, and newer versions read theirs"
        require(manifest["format"] == FORMAT, f"format={manifest['format']} must be {FORMAT}: {ways}")
        found = Checkpoint(
            path, **{item.name: manifest[item.name] for item in fields(Checkpoint) if item.name in manifest}
        )
        sizes = [(path / name, entry["bytes"]) for name, entry in found.files.items()]
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error})") from error
    for file, size in sizes:
        actual = f"has {file.stat().st_size} bytes" if file.is_file() else "is gone"
        require(
            actual == f"has {size} bytes",
            f"checkpoint {path} is truncated: {file.name} {actual}, its manifest says {size} bytes",
        )
    return found


def list_checkpoints(root: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints of a folder, newest first, and why each other one was skipped."""
    found, skipped = [], []
    for path in sorted(root.glob("step-*")):
        if not (OWN_FOLDERS.fullmatch(path.name) and path.is_dir()):
            continue
        try:
            found.append(read_checkpoint(path))
        except (ValueError, FileNotFoundError) as error:  # a run that goes on removes its old ones
            skipped.append(str(error))
    return sorted(found, key=lambda item: (item.saved_at, item.step), reverse=True), skipped


def find_checkpoints(resume: str | None, output_dir: str) -> tuple[list[Checkpoint], list[str]]:
    """Return checkpoints to continue from, the best first (none: a new run), and why newer ones were skipped.

    Checksums are not looked at. ``auto`` does not start from nothing where all checkpoints that were complete once are
    broken.
    """
    if resume is None:
        return [], []
    root = Path(output_dir if resume == "auto" else resume)
    if resume == "auto":
        found, skipped = list_checkpoints(root)
        names = [manifest.parent.name for manifest in root.glob(f"step-*/{MANIFEST}")]
        were_whole = any(OWN_FOLDERS.fullmatch(name) and not name.endswith(PARTIAL_SUFFIX) for name in names)
        ways = "no checkpoint is whole, overwrite=true instead starts a new run"
        require(bool(found) or not were_whole, f"resume='auto' finds {'; '.join(skipped)}: {ways}")
        return found, skipped
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "resume must be 'auto', a checkpoint or a folder of checkpoints", resume)
    rule = "must be a run of comet train: train this folder of transformers by its Trainer with Comet's experts"
    require(not (root / "config.json").is_file(), f"resume={resume!r} {rule}, as docs/examples/trainer.py does")
    found, skipped = named_checkpoints("resume", resume)
    require(bool(found), f"resume={resume!r} must hold a complete checkpoint; {'; '.join(skipped) or 'it has none'}")
    return found, skipped


def named_checkpoints(setting: str, value: str) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoint that a setting names, or those of the folder that it names, as ``list_checkpoints``."""
    root = Path(value)
    if not names_checkpoint(root):
        return list_checkpoints(root)
    try:
        return [read_checkpoint(root)], []
    except ValueError as error:
        others = [str(other.path) for other in list_checkpoints(root.parent)[0]]
        hint = f"; complete is {others[0]}" if others else ""
        raise ValueError(f"{setting}={value!r}: {error}{hint}") from error


def choose_checkpoint(found: list[Checkpoint], skipped: list[str]) -> tuple[Checkpoint | None, list[str]]:
    """Return the first checkpoint whose files hold what was written, and why others were skipped (collective).

    Raise ``ValueError`` if there are checkpoints and none is intact; it names an intact one of the same folder.
    """
    from comet.training.ranks import from_first_rank  # needs torch, unlike all that the command line asks here

    for checkpoint in found:
        if not (damage := find_damage(checkpoint)):
            return checkpoint, skipped
        skipped = [*skipped, damage]
    if not found:
        return None, skipped
    others = from_first_rank(lambda: list_checkpoints(found[0].path.parent)[0])
    damaged = {each.path for each in found}
    intact = (str(other.path) for other in others if other.path not in damaged and not find_damage(other))
    raise ValueError(f"{'; '.join(skipped)}; {next(intact, 'no other checkpoint there')} is intact")


def find_damage(checkpoint: Checkpoint) -> str:
    """Return which files do not hold what was written; empty if all do. Each rank reads its share (collective)."""
    from comet.comm.handshake import patience, this_rank
    from comet.training.ranks import gather

    rank, world_size = this_rank()
    mine = sorted(checkpoint.files)[rank::world_size]
    with patience():
        bad = [name for name in mine if checksum(checkpoint.path / name) != checkpoint.files[name]["blake2b"]]
        names = [name for part in gather(bad) for name in part]
    if not names:
        return ""
    return (
        f"checkpoint {checkpoint.path} of step {checkpoint.step} is damaged: the bytes of {', '.join(names)} are not "
        f"those that were written (checksums in {MANIFEST})"
    )


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
