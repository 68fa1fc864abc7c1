"""The tensors of a checkpoint folder, listed without being read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from comet.config import require

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_FP8 = "F8_E4M3"
MXFP4 = "MXFP4"  # of a tensor whose numbers are two in the files: blocks of codes, and scales
SCALES = "_scale_inv"  # behind the name of a tensor in block FP8: what its elements are multiplied by
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_DTYPES = {**DTYPES, "F8_E8M0": torch.float8_e8m0fnu}
NAMED = 3  # tensors or problems that an error names; a checkpoint has ten thousands
ALL = slice(None)
# What a matrix of one expert is, by its name in published checkpoints.
PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
# Tensors of all experts of a layer.
FUSED = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file, or what is made of one, not read; indexing it with ``...`` does, as transformers does."""

    name: str  # as the file spells it
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it, such as BF16; or MXFP4
    read: Callable[[Index], Tensor]  # what is at a slice, with start and stop, of each dimension
    scales: StoredTensor | None = None  # of a tensor in block FP8, once they are known to fit
    read_as: torch.dtype | None = None  # what reading turns quantised numbers into; None: it gives them as they are

    @property
    def stored_as(self) -> torch.dtype:
        """The torch type of ``dtype``, one of those that are supported."""
        return torch.float8_e4m3fn if self.dtype == BLOCK_FP8 else SCALE_DTYPES[self.dtype]

    @property
    def is_narrow(self) -> bool:
        """Whether its elements are of eight bits or fewer, which mean nothing without scales."""
        return self.dtype.startswith(("F8_", "F6_", "F4")) or self.dtype in ("I8", "U8")

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self.read(tuple(slice(0, size) for size in self.shape))

    def of_expert(self, expert: int) -> StoredTensor:
        """What a tensor of all experts holds of one."""
        own = slice(expert, expert + 1)
        return replace(self, shape=self.shape[1:], read=lambda index: self.read((own, *index))[0])

    def part(self, *places: slice) -> StoredTensor:
        """Slices of the first dimensions: ``part(ALL, slice(5, 9))`` are four columns."""
        spans = [range(size) for size in self.shape]
        spans[: len(places)] = [span[place] for span, place in zip(spans, places, strict=False)]

        def read(index: Index) -> Tensor:
            inner = [span[part] for span, part in zip(spans, index, strict=True)]
            return self.read(tuple(slice(span.start, span.stop) for span in inner))

        return replace(self, shape=tuple(map(len, spans)), read=read)

    def copied(self) -> StoredTensor:
        """One whose weights stay on the CPU as copies.

        What is read otherwise is the mapped file, and changes or ends with it; and as it begins at any byte, products
        with it may round otherwise than with a copy.
        """
        return replace(self, read=lambda index: self.read(index).clone())


@dataclass(frozen=True, slots=True)
class LazyShard:
    """One rank's part of a layer's experts, read when it is indexed, as transformers does with every lazy tensor."""

    experts: tuple[tuple[StoredTensor, ...], ...]  # what lies one below the other in each: gate and up, or down

    @property
    def shape(self) -> tuple[int, ...]:
        """``(e, 2F/TP, D)`` or ``(e, D, F/TP)``; of biases without the last dimension."""
        parts = self.experts[0]
        return len(self.experts), sum(part.shape[0] for part in parts), *parts[0].shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """What it is read as."""
        sources = [part for parts in self.experts for part in parts]
        return next((source.read_as for source in sources if source.read_as), None) or sources[0].stored_as

    def __getitem__(self, index: EllipsisType) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for expert, into in enumerate(whole):
            self.read_expert(expert, into)
        return whole

    def read_expert(self, expert: int, into: Tensor) -> None:
        """Read one of the rank's experts, counted from the rank's first, one stored tensor after the other."""
        parts = self.experts[expert]
        for part, rows in zip(parts, into.chunk(len(parts)), strict=True):
            rows.copy_(part[...])


def unchanged(path: Path) -> Callable[[], None]:
    """What raises ``ValueError`` once a file is gone or another one: what is mapped may not be what was checked."""

    def identity() -> tuple[int, int, int]:
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    seen = identity()

    def check() -> None:
        try:
            is_same = identity() == seen
        except OSError:
            is_same = False
        require(is_same, f"{path} must stay as it was when it was opened: it changed or is gone; load it anew")

    return check


def _read(lazy: Any, check: Callable[[], None], index: Index) -> Tensor:
    check()  # behind a cut file's new end, reading mapped memory would end the process
    values: Tensor = lazy[index or ...]  # a number has no dimension to slice
    return values


def open_checkpoint(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """List the tensors of a folder without reading them; ``ValueError`` if it is not complete.

    Args:
        files: Keeps the files open; leaving it raises ``ValueError`` if one of them has changed.
    """
    from safetensors import SafetensorError, safe_open

    promised = _promised_tensors(folder)
    found = {}
    for file in sorted(set(promised.values())):
        require((folder / file).is_file(), f"checkpoint {folder} must hold {file}: it is gone")
        check = unchanged(folder / file)
        files.callback(check)  # once more, after the last read
        try:
            handle = files.enter_context(safe_open(folder / file, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"checkpoint {folder} is damaged: {file} cannot be read ({error})") from error
        for name in handle.keys():  # noqa: SIM118 - the handle is no dict
            if name in found and promised.get(name) != file:
                continue  # of two files the one that the index names counts
            lazy = handle.get_slice(name)
            shape, read = tuple(lazy.get_shape()), partial(_read, lazy, check)
            found[name] = StoredTensor(name=name, shape=shape, dtype=lazy.get_dtype(), read=read)
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
