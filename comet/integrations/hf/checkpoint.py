"""Which slices of a checkpoint's tensors make up one rank's experts; nothing is read before everything is checked.

Published checkpoints hold three matrices per expert (``experts.7.gate_proj.weight``, Mixtral: ``w1``, ``w3``, ``w2``),
others one tensor per layer for all experts (``experts.gate_up_proj``, ``experts.down_proj``). Both are understood.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet.config import MoEConfig, require
from comet.layout import ExpertLayout

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(.+)$")
_ONE_EXPERT = re.compile(r"(\d+)\.(\w+)\.weight$")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_FUSED = ("gate_up_proj", "down_proj")
ALL = slice(None)

# What a tensor holds: gate, up or down of one expert, or (expert None) gate_up_proj or down_proj of all.
Part = tuple[str, int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read.

    Args:
        name: As the file spells it.
        shape: Its full shape.
        dtype: As safetensors spells it, such as ``BF16``.
        lazy: Reads what it is indexed with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    lazy: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A slice of a stored tensor and the place in a shard where it belongs."""

    source: StoredTensor
    index: tuple[slice, ...]
    into: tuple[slice | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyShard:
    """One rank's part of a layer's experts, read when it is indexed, as transformers does with every lazy tensor.

    Args:
        buffer_shape: How the pieces lie: ``(e, 2, F/TP, D)`` or ``(e, D, F/TP)``.
        shape: Of the finished shard: ``(e, 2F/TP, D)`` or ``(e, D, F/TP)``.
        pieces: What to read; together they fill the buffer.
    """

    buffer_shape: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """What this rank reads of the checkpoint, in bytes."""
        return math.prod(self.shape) * DTYPES[self.pieces[0].source.dtype].itemsize

    def __getitem__(self, index: object) -> Tensor:
        assert index is Ellipsis, f"a shard is read whole, not {index}"
        buffer = torch.empty(self.buffer_shape, dtype=DTYPES[self.pieces[0].source.dtype], device="cpu")
        for piece in self.pieces:
            buffer[piece.into] = piece.source.lazy[piece.index]
        return buffer.view(self.shape)


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
    require(not lacking, f"checkpoint {folder} is damaged: {INDEX_FILE} promises {_some(lacking)}, the files lack them")
    return found


def shard_checkpoint(
    tensors: dict[str, StoredTensor], modules: dict[int, str], moe: MoEConfig, layout: ExpertLayout
) -> dict[str, Any]:
    """Replace the expert tensors of a checkpoint by one rank's shards of them.

    Args:
        tensors: Every tensor of the checkpoint by name.
        modules: Name of the experts module of each MoE layer.
        moe: D, F and E.
        layout: The rank's place.

    Returns:
        The other tensors, lazy and under their names, and a ``LazyShard`` for every parameter of the modules.

    Raises:
        ValueError: If expert tensors are missing, superfluous, or of a wrong shape or dtype; all are named.
    """
    layers, surplus = _sort_by_layer(tensors, set(modules))
    problems = [f"surplus {_some(surplus)}"] if surplus else []
    for layer in modules:
        problems += _layer_problems(layer, layers[layer], moe)
    require(not problems, f"expert tensors of the checkpoint must be complete and no more: {'; '.join(problems)}")
    state: dict[str, Any] = {name: tensor.lazy for name, tensor in tensors.items() if ".experts." not in name}
    for layer, module in modules.items():
        state[f"{module}.gate_up_proj"] = _gate_up_shard(layers[layer], moe, layout)
        state[f"{module}.down_proj"] = _down_shard(layers[layer], moe, layout)
    return state


def _promised_tensors(folder: Path) -> dict[str, str]:
    """File of every tensor the index lists; of the nameless tensor when there is only one file."""
    if (folder / INDEX_FILE).is_file():
        try:
            return dict(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"checkpoint {folder} is damaged: {INDEX_FILE} cannot be read ({error})") from error
    require((folder / SINGLE_FILE).is_file(), f"checkpoint {folder} must hold {SINGLE_FILE} or {INDEX_FILE}")
    return {"": SINGLE_FILE}


def _sort_by_layer(
    tensors: dict[str, StoredTensor], layers: set[int]
) -> tuple[dict[int, dict[Part, StoredTensor]], list[str]]:
    """The expert tensors of each layer by what they hold, and the names of those that fit nowhere."""
    found: dict[int, dict[Part, StoredTensor]] = {layer: {} for layer in layers}
    surplus = []
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        match = _EXPERTS.search(name)
        layer, part = (int(match[1]), _part(match[2])) if match else (-1, None)
        if part is None or layer not in found or part in found[layer]:
            surplus.append(name)
        else:
            found[layer][part] = tensor
    return found, surplus


def _part(rest: str) -> Part | None:
    """What ``7.up_proj.weight`` or ``gate_up_proj`` holds: ``("up", 7)``, ``("gate_up_proj", None)``."""
    if rest in _FUSED:
        return rest, None
    match = _ONE_EXPERT.match(rest)
    return (_PARTS[match[2]], int(match[1])) if match and match[2] in _PARTS else None


def _layer_problems(layer: int, found: dict[Part, StoredTensor], moe: MoEConfig) -> list[str]:
    """What is wrong with the expert tensors of a layer, in words; nothing for a sound one."""
    wide, deep = (moe.ffn_size, moe.hidden_size), (moe.hidden_size, moe.ffn_size)
    expected: dict[Part, tuple[int, ...]] = {
        (part, expert): deep if part == "down" else wide
        for expert in range(moe.num_experts)
        for part in ("gate", "up", "down")
    }
    if any(part in _FUSED for part, _ in found):
        expected = {
            ("gate_up_proj", None): (moe.num_experts, 2 * moe.ffn_size, moe.hidden_size),
            ("down_proj", None): (moe.num_experts, *deep),
        }
    missing = [part if expert is None else f"expert {expert}'s {part}" for part, expert in expected.keys() - found]
    surplus = [found[part].name for part in found.keys() - expected]
    problems = [f"missing in layer {layer}: {_some(missing)}"] if missing else []
    problems += [f"surplus {_some(surplus)}"] if surplus else []
    for part in found.keys() & expected:
        name, shape, dtype = found[part].name, found[part].shape, found[part].dtype
        if shape != expected[part]:
            problems.append(f"{name} of shape {shape} must be {expected[part]}")
        if dtype not in DTYPES:
            problems.append(f"{name} of dtype {dtype} must be one of {', '.join(DTYPES)}")
    return problems


def _gate_up_shard(found: dict[Part, StoredTensor], moe: MoEConfig, layout: ExpertLayout) -> LazyShard:
    experts, width = layout.experts_local, moe.ffn_size // layout.tp
    first = layout.tp_rank * width
    fused = found.get(("gate_up_proj", None))
    if fused is not None:
        mine = slice(layout.first_expert, layout.first_expert + experts)
        pieces = [
            Piece(source=fused, index=(mine, slice(start, start + width)), into=(ALL, half))
            for half, start in enumerate((first, moe.ffn_size + first))
        ]
    else:
        pieces = [
            Piece(
                source=found[part, layout.first_expert + local],
                index=(slice(first, first + width),),
                into=(local, half),
            )
            for local in range(experts)
            for half, part in enumerate(("gate", "up"))
        ]
    return LazyShard(
        buffer_shape=(experts, 2, width, moe.hidden_size),
        shape=(experts, 2 * width, moe.hidden_size),
        pieces=tuple(pieces),
    )


def _down_shard(found: dict[Part, StoredTensor], moe: MoEConfig, layout: ExpertLayout) -> LazyShard:
    experts, width = layout.experts_local, moe.ffn_size // layout.tp
    columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
    fused = found.get(("down_proj", None))
    if fused is not None:
        mine = slice(layout.first_expert, layout.first_expert + experts)
        pieces = [Piece(source=fused, index=(mine, ALL, columns), into=(ALL,))]
    else:
        pieces = [
            Piece(source=found["down", layout.first_expert + local], index=(ALL, columns), into=(local,))
            for local in range(experts)
        ]
    shape = (experts, moe.hidden_size, width)
    return LazyShard(buffer_shape=shape, shape=shape, pieces=tuple(pieces))


def _some(names: list[str]) -> str:
    """``a, b, c and 4 more``."""
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
