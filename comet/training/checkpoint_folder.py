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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comet.config import require
from comet.kernels.runtime.activation import SWIGLU
from comet.models.config import ModelConfig
from comet.training.saved_settings import SETTINGS_FILE, flat

logger = logging.getLogger(__name__)

MANIFEST = "comet.json"
FORMATS = (1, 2)  # 1 had sizes only
KEPT = 2
PARTIAL_SUFFIX = ".tmp"
OWN_FOLDERS = re.compile(r"step-\d{6,}(-\d+)?(-replaced)?(\.tmp)?")
OWN_FILES = re.compile(
    rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{re.escape(MANIFEST)}|{re.escape(SETTINGS_FILE)}(\.tmp)?"
)
# Values of these fields in checkpoints that are older than the fields.
FIELDS_SINCE: Mapping[str, Any] = {"moe.expert_bias": False, **flat(asdict(SWIGLU), "moe.activation.")}
FREE_FIELDS = frozenset(
    f"moe.{name}" for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate", "capacity_factor", "max_imbalance")
) | {"name"}


def checksum(path: Path) -> str:
    """A fingerprint of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    model: Mapping[str, Any]  # fields of the model configuration, nested ones with dots
    saved_at: float  # unix time in seconds; later than that of every other checkpoint there
    layout: Mapping[str, int]  # world size, EP and TP it was saved at
    checksums: Mapping[str, str]  # by file name; none in a checkpoint of format 1
    text: str  # fingerprint of the text it was trained on; empty in a checkpoint of format 1
    layers: Mapping[str, Any]  # device, path and split of the layers that wrote it; empty in those of older versions

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
    """``folder_name(200) == "step-000200"``."""
    return f"step-{step:06d}"


def partial_path(path: Path) -> Path:
    """Return the folder that a checkpoint is written into: ``step-000200`` gives ``step-000200.tmp``."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def names_checkpoint(path: Path) -> bool:
    """Whether a folder that the user names is meant as one checkpoint, not as a folder of checkpoints."""
    return path.name.startswith("step-") or (path / MANIFEST).exists()


def open_partial(root: Path, step: int) -> Path:
    """Make the folder to write a checkpoint into, removing what killed jobs left there, and return where it will
    be when it is complete; another name where a foreign file has the usual one.
    """
    for leftover in root.glob(f"step-*{PARTIAL_SUFFIX}"):
        with _left_to_the_next_save(leftover):
            remove_checkpoint(leftover)
    names = itertools.chain([folder_name(step)], (f"{folder_name(step)}-{count}" for count in itertools.count(2)))
    for path in map(root.joinpath, names):
        is_ours = not path.exists() or (path / MANIFEST).is_file()
        if is_ours and not partial_path(path).exists():
            break
    partial_path(path).mkdir(parents=True)
    return path


def remove_checkpoint(path: Path) -> None:
    """Remove the files of a checkpoint, and its folder unless it holds foreign files."""
    if not (OWN_FOLDERS.fullmatch(path.name) and path.is_dir()) or path.is_symlink():
        return
    for file in path.iterdir():
        if OWN_FILES.fullmatch(file.name):
            file.unlink()
    if not any(path.iterdir()):
        path.rmdir()


def complete(path: Path, manifest: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Add the manifest, rename the folder into place and delete all but the newest two checkpoints."""
    root, partial = path.parent, partial_path(path)
    others = [found for found in list_checkpoints(root)[0] if found.path != path]
    outdated = [found.path for found in others[KEPT - 1 :]]
    saved_at = max(
        [time.time(), *(math.nextafter(found.saved_at, math.inf) for found in others)]
    )  # clocks go backwards
    checksums = {**checksums, SETTINGS_FILE: checksum(partial / SETTINGS_FILE)}
    files = {name: {"bytes": (partial / name).stat().st_size, "blake2b": checksums[name]} for name in sorted(checksums)}
    with (partial / MANIFEST).open("w") as file:
        json.dump({"format": FORMATS[-1], "saved_at": saved_at, **manifest, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    replaced = partial_path(path.with_name(path.name + "-replaced"))
    if path.exists():  # An earlier run in this folder wrote it; no job loads the new name.
        path.rename(replaced)
        outdated.append(replaced)
    partial.rename(path)
    _sync_folder(root)
    for old in outdated:  # under a name that the next checkpoint clears away, should this be killed
        with _left_to_the_next_save(old):
            remove_checkpoint(old if old == replaced else old.rename(partial_path(old)))


@contextmanager
def _left_to_the_next_save(path: Path) -> Iterator[None]:
    """Log an error of the system: no run ends because what it does not need could not be removed."""
    try:
        yield
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
        known = manifest["format"] in FORMATS
        require(known, f"format={manifest['format']} must be one of {', '.join(map(str, FORMATS))}: a newer version's")
        entries = {
            name: entry if isinstance(entry, dict) else {"bytes": entry} for name, entry in manifest["files"].items()
        }
        found = Checkpoint(
            path=path,
            step=int(manifest["step"]),
            model=dict(manifest["model"]),
            saved_at=float(manifest["saved_at"]),
            layout=dict(manifest["layout"]),
            checksums={name: entry["blake2b"] for name, entry in entries.items() if "blake2b" in entry},
            text=str(manifest.get("text", "")),
            layers=dict(manifest.get("layers", {})),
        )
        sizes = {name: entry["bytes"] for name, entry in entries.items()}
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error})") from error
    for name, size in sizes.items():
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
        if not (OWN_FOLDERS.fullmatch(path.name) and path.is_dir()):
            continue
        try:
            found.append(read_checkpoint(path))
        except (ValueError, FileNotFoundError) as error:  # a run that goes on removes its old ones
            skipped.append(str(error))
    return sorted(found, key=lambda item: (item.saved_at, item.step), reverse=True), skipped


def _was_whole(path: Path) -> bool:
    return bool(OWN_FOLDERS.fullmatch(path.name)) and path.suffix != PARTIAL_SUFFIX and (path / MANIFEST).is_file()


def find_checkpoints(resume: str | None, output_dir: str) -> tuple[list[Checkpoint], list[str]]:
    """Checkpoints to continue from, the best first (none: a new run), and why newer ones were skipped; checksums are
    not looked at. ``auto`` does not start from nothing where all checkpoints that were complete once are broken.
    """
    if resume is None:
        return [], []
    root = Path(output_dir if resume == "auto" else resume)
    if resume == "auto":
        found, skipped = list_checkpoints(root)
        were_whole = [path for path in root.glob("step-*") if _was_whole(path)]
        lost = f"resume='auto' finds {'; '.join(skipped)}: no checkpoint is whole, overwrite=true instead starts anew"
        require(bool(found) or not were_whole, lost)
        return found, skipped
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "resume must be 'auto', a checkpoint or a folder of checkpoints", resume)
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
    """The first checkpoint whose files hold what was written, and why others were skipped (collective)."""
    for checkpoint in found:
        if not (damage := find_damage(checkpoint)):
            return checkpoint, skipped
        skipped = [*skipped, damage]
    if len(found) == 1:
        require_intact(found[0])
    require(not found, "; ".join(skipped))
    return None, skipped


def require_intact(checkpoint: Checkpoint) -> None:
    """Raise ``ValueError`` if a file does not hold what was written, naming the newest checkpoint that is intact
    (collective).
    """
    from comet.training.ranks import from_first_rank  # needs torch, unlike all that the command line asks here

    if not (damage := find_damage(checkpoint)):
        return
    others = from_first_rank(lambda: list_checkpoints(checkpoint.path.parent)[0])
    intact = (str(other.path) for other in others if other.path != checkpoint.path and not find_damage(other))
    raise ValueError(f"{damage}; {next(intact, 'no other checkpoint beside it')} is intact")


def find_damage(checkpoint: Checkpoint) -> str:
    """Which file does not hold what was written, empty if all do; each rank reads its share of them (collective)."""
    from comet.comm.handshake import patience, this_rank
    from comet.training.ranks import gather

    rank, world_size = this_rank()
    mine = sorted(checkpoint.checksums.items())[rank::world_size]
    with patience():
        bad = [name for name, written in mine if checksum(checkpoint.path / name) != written]
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
