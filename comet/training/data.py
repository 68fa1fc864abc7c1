"""Text as bytes: a training part, a held-out part, and batches that depend on (seed, step, rank) only.

No state is kept between steps, so a resumed job reads what the first one would have read, and jobs of equal world size
read the same batches whatever their EP and TP.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from comet.config import require
from comet.jobs.config import DataConfig

MAX_STDLIB_BYTES = 16 * 2**20
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """The bytes to learn from and those to be judged by."""

    train: Tensor  # (N,) uint8 on the CPU
    heldout: Tensor  # (H,) uint8 on the CPU
    source: str

    def digest(self) -> str:
        """A fingerprint of both parts, to compare ranks."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.heldout.numpy().tobytes())
        return digest.hexdigest()[:16]


def read_corpus(config: DataConfig, context: int) -> Corpus:
    """Read and split the text; each part must hold a sequence of ``context`` bytes and its next byte."""
    root = Path(sysconfig.get_path("stdlib")) if config.path is None else Path(config.path)
    files = _stdlib_files(root) if config.path is None else _files(root)
    source = "the Python standard library" if config.path is None else f"data.path={config.path!r}"
    texts = {name: _read(path, source) for name, path in files.items()}
    if config.path is not None:  # the default text keeps its few small copies, and runs that began with it go on
        texts = _without_copies(texts)
    total = sum(map(len, texts.values()))
    require(total > 0, f"{source} must hold text, but all its {len(files)} files together hold 0 bytes")
    train, heldout = split_heldout(texts, config.heldout_fraction)
    for part, text in (("training", train), ("held-out", heldout)):
        require(
            len(text) > context,
            f"{source} of {total} bytes leaves {len(text)} for the {part} part (heldout_fraction="
            f"{config.heldout_fraction}), which must be more than context={context}",
        )
    copies = len(files) - len(texts)
    told = f"{len(texts)} files" + (f"; copies left out: {copies}" if copies else "")
    return Corpus(train=_tensor(train), heldout=_tensor(heldout), source=f"{source} ({told})")


def _without_copies(texts: dict[str, bytes]) -> dict[str, bytes]:
    """The first file of each content: by a link or a copy, text that is held out would be learnt from, too."""
    names: dict[bytes, str] = {}
    for name, text in texts.items():
        names.setdefault(text, name)
    return {name: text for text, name in names.items()}


def split_heldout(texts: dict[str, bytes], fraction: float) -> tuple[bytes, bytes]:
    """Hold out whole files where they are small enough, otherwise the tail of all text.

    Files are taken in the order of their names' SHA-256 as long as they fit into ``fraction`` of all bytes. Where that
    gives less than half of it (one file, or a few large ones), the last bytes are held out instead.

    Example: ``{"a": b"0123456789"}`` with fraction 0.2 gives ``b"01234567"`` and ``b"89"``.
    """
    budget = int(fraction * sum(map(len, texts.values())))
    chosen: set[str] = set()
    used = 0
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if used + len(texts[name]) <= budget:
            chosen.add(name)
            used += len(texts[name])
    if 2 * used < budget:
        everything = b"".join(texts.values())
        return everything[: len(everything) - budget], everything[len(everything) - budget :]
    train = b"".join(text for name, text in texts.items() if name not in chosen)
    return train, b"".join(text for name, text in texts.items() if name in chosen)


def sample_batch(text: Tensor, *, batch_size: int, context: int, seed: int, step: int, rank: int) -> Tensor:
    """``(B, S + 1)`` int64, random sequences of ``text (N,)`` with their next bytes; a pure function."""
    key = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
    return _windows(text, starts, context)


def heldout_windows(text: Tensor, *, num_windows: int, context: int) -> Tensor:
    """Evenly spread sequences of ``text (H,)``, the same for every job.

    Example: 11 bytes, context 2, two windows: they start at 0 and 8, the last place that leaves a next byte.
    """
    num_windows = min(num_windows, (len(text) - 1) // context)
    starts = torch.arange(num_windows) * ((len(text) - 1 - context) // max(num_windows - 1, 1))
    return _windows(text, starts, context)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


def _read(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{source} must be readable, but {path} is not: {error.strerror}") from error


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _stdlib_files(root: Path) -> dict[str, Path]:
    """Sources of the standard library by relative name, sorted, as many as fit into ``MAX_STDLIB_BYTES``."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files: dict[str, Path] = {}
    room = MAX_STDLIB_BYTES
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in found):
        size = path.stat().st_size
        if size <= room:
            files[name] = path
            room -= size
    if not files:
        rule = "data.path must be given: this interpreter has no library sources"
        raise FileNotFoundError(errno.ENOENT, rule, str(root))
    return files


def _files(root: Path) -> dict[str, Path]:
    if root.is_file():
        return {root.name: root}
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "data.path must be an existing file or folder", str(root))
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in [*subfolders, *names] if not name.startswith(".")]
    links = [str(path) for path in found if path.is_symlink() and not path.is_file()]
    require(not links, f"data.path={str(root)!r} must hold no links but to files, unlike {', '.join(sorted(links))}")
    return {path.relative_to(root).as_posix(): path for path in sorted(found) if path.is_file()}


def _refuse(error: OSError) -> NoReturn:
    """A folder that cannot be read, whose text would be left out."""
    raise ValueError(f"data.path must be readable, but {error.filename} is not: {error.strerror}") from error
