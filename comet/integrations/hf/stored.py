"""The tensors of a checkpoint folder, listed without being read."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from comet.config import require

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_FP8 = "F8_E4M3"
SCALES = "_scale_inv"  # behind the name of a tensor in block FP8: what its elements are multiplied by
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_DTYPES = {**DTYPES, "F8_E8M0": torch.float8_e8m0fnu}
NAMED = 3  # tensors or problems that an error names; a checkpoint has ten thousands


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read.

    Args:
        name: As the file spells it.
        shape: Its full shape.
        dtype: As safetensors spells it, such as ``BF16``.
        lazy: Reads what it is indexed with, an ellipsis or a tuple of slices; so does this object.
        scales: Of a tensor in block FP8, once they are known to fit.
        read_as: What ``lazy`` turns the numbers of block FP8 into; ``None``: it gives them as they are stored.
        first_row: Of scales: row of their first block at which their tensor begins.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    lazy: Any
    scales: StoredTensor | None = None
    read_as: torch.dtype | None = None
    first_row: int = 0

    @property
    def stored_as(self) -> torch.dtype:
        """The torch type of ``dtype``, one of those that are supported."""
        return torch.float8_e4m3fn if self.dtype == BLOCK_FP8 else SCALE_DTYPES[self.dtype]

    @property
    def is_narrow(self) -> bool:
        """Whether its elements are of eight bits or fewer, which mean nothing without scales."""
        return self.dtype.startswith(("F8_", "F6_", "F4")) or self.dtype in ("I8", "U8")

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        values: Tensor = self.lazy[index]
        return values


def open_checkpoint(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """List the tensors of a checkpoint without reading them.

    Args:
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files it names.
        files: Keeps the files open.

    Returns:
        Every tensor by name.

    Raises:
        ValueError: If a file is missing or damaged, or lacks a tensor that the index promises.
    """
    from safetensors import SafetensorError, safe_open

    promised = _promised_tensors(folder)
    found = {}
    for file in sorted(set(promised.values())):
        require((folder / file).is_file(), f"checkpoint {folder} must hold {file}: it is gone")
        try:
            handle = files.enter_context(safe_open(folder / file, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"checkpoint {folder} is damaged: {file} cannot be read ({error})") from error
        for name in handle.keys():  # noqa: SIM118 - the handle is no dict
            lazy = handle.get_slice(name)
            found[name] = StoredTensor(name=name, shape=tuple(lazy.get_shape()), dtype=lazy.get_dtype(), lazy=lazy)
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
