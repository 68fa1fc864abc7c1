"""The tensors of a checkpoint folder, listed without being read, and its block FP8, dequantised as it is read.

Block FP8 as DeepSeek-V3 publishes it is e4m3 elements, and for each tensor another one, with a scale per 128 x 128
block.
transformers is not asked to quantise or dequantise: its own way takes a GPU and splits no experts over ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.quantization.formats import FP8, FP8_BLOCK

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_FP8 = "F8_E4M3"
MXFP4 = "MXFP4"  # A tensor of this dtype is two in the files: blocks of codes, and scales.
SCALES = "_scale_inv"  # behind the name of a tensor in block FP8: what its elements are multiplied by
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_DTYPES = {**DTYPES, "F8_E8M0": torch.float8_e8m0fnu}
NAMED = 3  # tensors or problems that an error names; a checkpoint has ten thousands
ALL = slice(None)
# Tensors of all experts of a layer.
FUSED = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file, or what is made of one, not read; indexing it with ``...`` does, as transformers does."""

    name: str  # spelt as in the file
    shape: tuple[int, ...]
    dtype: str  # spelt as in safetensors, such as BF16; or MXFP4
    read: Callable[[Index], Tensor]  # what is at a slice, with start and stop, of each dimension
    scales: StoredTensor | None = None  # of a tensor in block FP8, once they are known to fit
    read_as: torch.dtype | None = None  # what reading turns quantised numbers into; None: it gives them as they are

    @property
    def stored_as(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.dtype == BLOCK_FP8 else SCALE_DTYPES[self.dtype]

    @property
    def is_narrow(self) -> bool:
        """Whether its elements are of eight bits or fewer, which mean nothing without scales."""
        return self.dtype.startswith(("F8_", "F6_", "F4")) or self.dtype in ("I8", "U8")

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self.read(tuple(slice(0, size) for size in self.shape))

    def of_expert(self, expert: int) -> StoredTensor:
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

    # For each expert the matrices that lie one below the other: gate and up, both in turn, or down.
    experts: tuple[tuple[StoredTensor, ...], ...]
    is_transposed: bool = False  # whether it is read as ``(e, D, 2F/TP)`` or ``(e, F/TP, D)``

    @property
    def shape(self) -> tuple[int, ...]:
        """``(e, 2F/TP, D)`` or ``(e, D, F/TP)``; of biases without the last dimension."""
        parts = self.experts[0]
        return len(self.experts), sum(part.shape[0] for part in parts), *parts[0].shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        sources = [part for parts in self.experts for part in parts]
        read_as = next((source.read_as for source in sources if source.read_as), None)
        return read_as or reduce(torch.promote_types, (source.stored_as for source in sources))

    def __getitem__(self, index: EllipsisType) -> Tensor:
        experts, *shape = self.shape
        whole = torch.empty(experts, *(shape[::-1] if self.is_transposed else shape), dtype=self.dtype, device="cpu")
        for expert, into in enumerate(whole):
            self.read_expert(expert, into.T if self.is_transposed else into)
        return whole

    def read_expert(self, expert: int, into: Tensor) -> None:
        """Read one of the rank's experts, counted from the rank's first, one stored tensor after the other."""
        parts = self.experts[expert]
        for part, rows in zip(parts, into.chunk(len(parts)), strict=True):
            rows.copy_(part[...])


def unchanged(path: Path) -> Callable[[], None]:
    """Return a check that raises ``ValueError`` once a file is gone or another one: what is mapped was not checked."""

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


def open_checkpoint(folder: Path, files: ExitStack, variant: str | None = None) -> dict[str, StoredTensor]:
    """List the tensors of a folder without reading them; ``ValueError`` if it is not complete.

    Leaving ``files`` raises ``ValueError`` if one of them has changed. ``variant=fp16`` reads
    ``model.fp16.safetensors``, or files that ``model.safetensors.index.fp16.json`` lists.
    """
    from safetensors import SafetensorError, safe_open

    single, index = (_of_variant(name, variant) for name in (SINGLE_FILE, INDEX_FILE))
    promised = _promised_tensors(folder, single, index)
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
                continue  # the index names the one of two files that counts
            lazy = handle.get_slice(name)
            shape, read = tuple(lazy.get_shape()), partial(_read, lazy, check)
            found[name] = StoredTensor(name=name, shape=shape, dtype=lazy.get_dtype(), read=read)
    lacking = sorted(name for name in promised if name and name not in found)
    require(not lacking, f"checkpoint {folder} is damaged: {index} promises {some(lacking)}, the files lack them")
    return found


def _of_variant(name: str, variant: str | None) -> str:
    """``model.fp16.safetensors`` for ``fp16``."""
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _promised_tensors(folder: Path, single: str, index: str) -> dict[str, str]:
    """File of every tensor the index lists; of the nameless tensor where all are in one file."""
    if (folder / single).is_file():
        return {"": single}  # transformers, too, takes an index next to it for that of a former model
    require((folder / index).is_file(), f"checkpoint {folder} must hold {single} or {index}")
    try:
        found = dict(json.loads((folder / index).read_bytes())["weight_map"])
        require(all(type(each) is str for each in found.values()), "weight_map must name a file for each tensor")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"checkpoint {folder} is damaged: {index} cannot be read ({error})") from error


def some(names: list[str]) -> str:
    """``a, b, c and 4 more``."""
    return several(sorted(names), ", ")


def several(problems: list[str], between: str = "; ") -> str:
    """The first three of them and how many more there are."""
    more = f" and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    return between.join(problems[:NAMED]) + more


# The only values Comet reads, and what a configuration that leaves a field out means.
_FIELDS: dict[str, tuple[Any, Any]] = {
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK], None),
    "fmt": ("e4m3", "e4m3"),
    "activation_scheme": ("dynamic", "dynamic"),
    "expert_dtype": ("fp8", "fp8"),
}
_RULE = (
    "only block FP8 is read (quant_method 'fp8', weight_block_size [128, 128], fmt 'e4m3', activation_scheme 'dynamic')"
    " beside float32, float16 and bfloat16; dequantise the checkpoint first"
)


def holds_block_fp8(config: Any, *, may_be_mxfp4: bool) -> bool:
    """Whether a configuration says that its checkpoint holds block FP8; gpt-oss's may be MXFP4, as its tensors tell."""
    found = getattr(config, "quantization_config", None)
    if may_be_mxfp4:
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        rule = "must be 'mxfp4': gpt-oss is read so, or in float32, float16 and bfloat16; dequantise the checkpoint"
        require(method in (None, "mxfp4"), f"quant_method={method!r} of quantization_config {rule} first")
    if found is None or may_be_mxfp4:
        return False
    require(isinstance(found, Mapping), f"quantization_config={found!r} must be a mapping: {_RULE}")
    method = found.get("quant_method")
    require(method == "fp8", f"quant_method={method!r} of quantization_config must be 'fp8': {_RULE}")
    for name, (wanted, default) in _FIELDS.items():
        value = found.get(name, default)
        value = list(value) if isinstance(value, tuple) else value
        require(value == wanted, f"{name}={value!r} of quantization_config must be {wanted!r}: {_RULE}")
    return True


def join_scales(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Give every block FP8 tensor its scales, which are no tensors of their own then; names all that do not fit."""
    joined, lacking, problems = {}, [], []
    for name, tensor in tensors.items():
        if name.endswith(SCALES):
            continue
        scales = tensors.get(name + SCALES)
        if tensor.dtype != BLOCK_FP8:
            joined[name] = tensor
            if tensor.is_narrow:
                problems.append(f"{name} of dtype {tensor.dtype} must be {BLOCK_FP8} or one of {', '.join(DTYPES)}")
            elif scales is not None:
                problems.append(f"{name} of dtype {tensor.dtype} must be {BLOCK_FP8} beside {scales.name}")
        elif scales is None:
            lacking.append(name + SCALES)
        else:
            problems += _scale_problems(tensor, scales)
            joined[name] = replace(tensor, scales=_checked(scales))
    stray = [name for name in tensors if name.endswith(SCALES) and name.removesuffix(SCALES) not in tensors]
    groups = [f"missing {some(lacking)}"] * bool(lacking) + [f"surplus {some(stray)}"] * bool(stray)
    groups += [several(problems)] * bool(problems)
    require(not groups, f"each {BLOCK_FP8} tensor of the checkpoint must have its scales: {'; '.join(groups)}")
    return joined


def dequantized(tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """The tensor, dequantised as it is read with all scales that the slice touches; itself if it is not block FP8."""
    scales = tensor.scales
    if scales is None:
        return tensor

    def read(index: Index) -> Tensor:
        *outer, rows, columns = index
        touched = (slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK)) for part in (rows, columns))
        return dequantize_slice(tensor.read(index), scales.read((*outer, *touched)), rows.start, columns.start, dtype)

    return replace(tensor, read=read, read_as=dtype)


def _checked(scales: StoredTensor) -> StoredTensor:
    """Scales that are read as float32, and refused if they are no number or negative."""

    def read(index: Index) -> Tensor:
        found = scales.read(index).float()
        is_bad = ~found.isfinite() | (found < 0)
        if is_bad.any():
            raise ValueError(f"{scales.name} holds {found[is_bad][0].item()}, must be finite and not negative")
        return found

    return replace(scales, read=read, read_as=torch.float32)


def dequantize_slice(elements: Tensor, scales: Tensor, first_row: int, first_column: int, dtype: torch.dtype) -> Tensor:
    """Element ``(..., N, K)`` times scale, where the slice may begin inside a block; ``scales`` are of all blocks it
    touches.

    Example: 3 rows from row 127 on, of two blocks with scales 2 and 10: row 127 is times 2, rows 128 and 129 times 10.
    """
    rows = (torch.arange(elements.shape[-2]) + first_row % FP8_BLOCK) // FP8_BLOCK
    shift = first_column % FP8_BLOCK
    if shift:
        outer, columns = elements.shape[:-1], elements.shape[-1]
        padded = elements.new_zeros(*outer, shift + columns)
        padded[..., shift:] = elements
        elements = padded
    values = FP8(elements=elements, scales=scales[..., rows, :], block_rows=1, trusted=True)
    return values.dequantize(dtype)[..., shift:]


def _scale_problems(tensor: StoredTensor, scales: StoredTensor) -> list[str]:
    """Say what is wrong with the scales of a tensor."""
    if len(tensor.shape) < 2:
        return [f"{tensor.name} of shape {tensor.shape} must have rows and columns"]
    *outer, rows, columns = tensor.shape
    ffn_size = rows // 2
    # Blocks of gate and of up by themselves may be as many as they have together, but other ones.
    if tensor.name.endswith(f".experts.{FUSED[0]}") and ffn_size % FP8_BLOCK > FP8_BLOCK // 2:
        return [
            f"{scales.name} of shape {scales.shape} may hold scales of gate and of up, or of both as one tensor, whose "
            f"blocks differ with ffn_size={ffn_size}: each expert's gate_proj and up_proj must have scales of its own"
        ]
    wanted = (*outer, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    problems = []
    if scales.shape != wanted:
        problems.append(f"{scales.name} of shape {scales.shape} must be {wanted} for a tensor of shape {tensor.shape}")
    if scales.dtype not in SCALE_DTYPES:
        problems.append(f"{scales.name} of dtype {scales.dtype} must be one of {', '.join(SCALE_DTYPES)}")
    return problems
