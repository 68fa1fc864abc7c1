"""The tensors of a checkpoint folder, listed without being read."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.quantization.formats import MX_BLOCK

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_FP8 = "F8_E4M3"
MXFP4 = "MXFP4"  # of a tensor whose numbers are two in the files: blocks of codes, and scales
SCALES = "_scale_inv"  # behind the name of a tensor in block FP8: what its elements are multiplied by
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_DTYPES = {**DTYPES, "F8_E8M0": torch.float8_e8m0fnu}
NAMED = 3  # tensors or problems that an error names; a checkpoint has ten thousands


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read."""

    name: str  # as the file spells it
    shape: tuple[int, ...]  # its full shape
    dtype: str  # as safetensors spells it, such as BF16; or MXFP4
    lazy: Any  # reads what it is indexed with, an ellipsis or a tuple of slices; so does this object
    scales: StoredTensor | None = None  # of a tensor in block FP8, once they are known to fit
    read_as: torch.dtype | None = None  # what lazy turns quantised numbers into; None: it gives them as they are stored
    first_row: int = 0  # of scales: row of their first block at which their tensor begins

    @property
    def stored_as(self) -> torch.dtype:
        """The torch type of ``dtype``, one of those that are supported."""
        return torch.float8_e4m3fn if self.dtype == BLOCK_FP8 else SCALE_DTYPES[self.dtype]

    @property
    def number_bytes(self) -> float:
        """Of one of its numbers in the file."""
        return 0.5 + 1 / MX_BLOCK if self.dtype == MXFP4 else self.stored_as.itemsize

    @property
    def is_narrow(self) -> bool:
        """Whether its elements are of eight bits or fewer, which mean nothing without scales."""
        return self.dtype.startswith(("F8_", "F6_", "F4")) or self.dtype in ("I8", "U8")

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        values: Tensor = self.lazy[index]
        return values


@dataclass(frozen=True, slots=True)
class UnchangedFile:
    """A file as it was when it was opened."""

    path: Path  # of the file
    seen: tuple[int, int, int]  # its number, size in bytes, and time of the last change in nanoseconds

    @classmethod
    def of(cls, path: Path) -> UnchangedFile:
        """As it is now; raises ``OSError`` if it is gone."""
        return cls(path, _identity(path))

    def check(self) -> None:
        """Raise ``ValueError`` if the file is gone or another one: what is mapped may no longer be what was checked."""
        try:
            is_same = _identity(self.path) == self.seen
        except OSError:
            is_same = False
        require(is_same, f"{self.path} must stay as it was when it was opened: it changed or is gone; load it anew")


def _identity(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class CheckedSlice:
    """Slices of a tensor in a file that has not changed."""

    lazy: Any
    file: UnchangedFile

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        self.file.check()  # behind a cut file's new end, reading mapped memory would end the process
        values: Tensor = self.lazy[index]
        return values


@dataclass(frozen=True, slots=True)
class CopiedSlice:
    """Copies of slices, for weights that stay on the CPU.

    What is read otherwise is the mapped file, and changes or ends with it; and as it begins at any byte, products with
    it may round otherwise than with a copy.
    """

    lazy: Any

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        values: Tensor = self.lazy[index]
        return values.clone()


def open_checkpoint(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """List the tensors of a checkpoint without reading them.

    Args:
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files it names.
        files: Keeps the files open; leaving it raises ``ValueError`` if one of them has changed.

    Raises:
        ValueError: If a file is missing or damaged, or lacks a tensor that the index promises.
    """
    from safetensors import SafetensorError, safe_open

    promised = _promised_tensors(folder)
    found = {}
    for file in sorted(set(promised.values())):
        require((folder / file).is_file(), f"checkpoint {folder} must hold {file}: it is gone")
        opened = UnchangedFile.of(folder / file)
        files.callback(opened.check)  # once more, after the last read
        try:
            handle = files.enter_context(safe_open(folder / file, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"checkpoint {folder} is damaged: {file} cannot be read ({error})") from error
        for name in handle.keys():  # noqa: SIM118 - the handle is no dict
            lazy = handle.get_slice(name)
            shape, dtype = tuple(lazy.get_shape()), lazy.get_dtype()
            found[name] = StoredTensor(name=name, shape=shape, dtype=dtype, lazy=CheckedSlice(lazy, opened))
    lacking = sorted(name for name in promised if name and name not in found)
    require(not lacking, f"checkpoint {folder} is damaged: {INDEX_FILE} promises {some(lacking)}, the files lack them")
    return found


def _promised_tensors(folder: Path) -> dict[str, str]:
    """File of every tensor the index lists; of the nameless tensor when there is only one file."""
    if (folder / INDEX_FILE).is_file():
        try:
            return dict(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"checkpoint {folder} is damaged: {INDEX_FILE} cannot be read ({error})") from error
    require((folder / SINGLE_FILE).is_file(), f"checkpoint {folder} must hold {SINGLE_FILE} or {INDEX_FILE}")
    return {"": SINGLE_FILE}


def some(names: list[str]) -> str:
    """``a, b, c and 4 more``."""
    return several(sorted(names), ", ")


def several(problems: list[str], between: str = "; ") -> str:
    """The first three of them and how many more there are."""
    more = f" and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    return between.join(problems[:NAMED]) + more
