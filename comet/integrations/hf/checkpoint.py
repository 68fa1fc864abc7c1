"""Which slices of a checkpoint's tensors make up one rank's experts; nothing is read before everything is checked.

Published checkpoints hold three matrices per expert (``experts.7.gate_proj.weight``, Mixtral: ``w1``, ``w3``, ``w2``),
others one tensor per layer for all experts (``experts.gate_up_proj``, ``experts.down_proj``). Both are understood.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comet.config import MoEConfig, require
from comet.integrations.hf.stored import BLOCK_FP8, DTYPES, SCALES, CopiedSlice, StoredTensor, several, some
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8_BLOCK

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(.+)$")
_ONE_EXPERT = re.compile(r"(\d+)\.(\w+)\.weight$")
PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_FUSED = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
ALL = slice(None)

# What a tensor holds: gate, up or down of one expert, or (expert None) gate_up_proj, down_proj or a bias of all.
Part = tuple[str, int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A slice of a stored tensor and the place in a shard where it belongs."""

    source: StoredTensor
    index: tuple[slice, ...]
    into: tuple[slice | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyShard:
    """One rank's part of a layer's experts, read when it is indexed, as transformers does with every lazy tensor."""

    # how the pieces lie: (e, 2, F/TP, D) or (e, D, F/TP); of biases without the last dimension
    buffer_shape: tuple[int, ...]
    shape: tuple[int, ...]  # of the finished shard: (e, 2F/TP, D) or (e, D, F/TP); of biases (e, 2F/TP) or (e, D)
    pieces: tuple[Piece, ...]  # what to read; together they fill the buffer

    @property
    def num_bytes(self) -> int:
        """What this rank reads of the checkpoint, in bytes."""
        return int(math.prod(self.shape) * self.pieces[0].source.number_bytes)

    def __getitem__(self, index: object) -> Tensor:
        assert index is Ellipsis, f"a shard is read whole, not {index}"
        sources = [piece.source for piece in self.pieces]
        dtype = next((source.read_as for source in sources if source.read_as), None) or sources[0].stored_as
        buffer = torch.empty(self.buffer_shape, dtype=dtype, device="cpu")
        for piece in self.pieces:
            buffer[piece.into] = piece.source[piece.index]
        return buffer.view(self.shape)

    def read_expert(self, expert: int, into: Tensor) -> None:
        """Read one of the rank's experts, one stored tensor after the other.

        Args:
            expert: In ``[0, e)``, counted from the rank's first.
        """
        buffer = into.view(self.buffer_shape[1:])
        for piece in self.pieces:
            (held, *place), (first, *others) = piece.into, piece.index
            if held == ALL:  # one tensor holds all experts
                own = slice(first.start + expert, first.start + expert + 1)
                buffer[tuple(place)] = piece.source[own, *others][0]
            elif held == expert:
                buffer[tuple(place)] = piece.source[piece.index]


def shard_checkpoint(
    tensors: dict[str, StoredTensor],
    modules: dict[int, str],
    moe: MoEConfig,
    layout: ExpertLayout,
    *,
    keep_fp8: bool = False,
) -> dict[str, Any]:
    """Replace the expert tensors of a checkpoint by one rank's shards of them.

    Args:
        tensors: Every tensor of the checkpoint by name.
        modules: Name of the experts module of each MoE layer.
        moe: D, F and E, and whether experts have biases.
        keep_fp8: Whether the shards are to be block FP8 as it is stored, F/TP a multiple of 128, and come with shards
            of the scales.

    Returns:
        The other tensors, lazy and under their names, and a ``LazyShard`` for every parameter of the modules.

    Raises:
        ValueError: If expert tensors are missing, superfluous, or of a wrong shape or dtype; all are named.
    """
    layers, surplus = _sort_by_layer(tensors, set(modules))
    problems = [f"surplus {some(surplus)}"] if surplus else []
    for layer in modules:
        problems += _layer_problems(layer, layers[layer], moe, keep_fp8)
    require(not problems, f"expert tensors of the checkpoint must be complete and no more: {several(problems)}")
    state: dict[str, Any] = {
        name: replace(tensor, lazy=CopiedSlice(tensor.lazy))
        for name, tensor in tensors.items()
        if ".experts." not in name
    }
    for layer, module in modules.items():
        found = layers[layer]
        state[f"{module}.gate_up_proj"] = _gate_up_shard(found, moe.ffn_size, layout, moe.hidden_size)
        state[f"{module}.down_proj"] = _down_shard(found, moe.hidden_size, moe.ffn_size, layout)
        if moe.expert_bias:
            b1, b2 = (found[bias, None] for bias in BIASES)
            state[f"{module}.{BIASES[0]}"] = _gate_up_shard({("gate_up_proj", None): b1}, moe.ffn_size, layout)
            state[f"{module}.{BIASES[1]}"] = _down_bias_shard(b2, moe.hidden_size, layout)
        if keep_fp8:
            scales = {part: tensor.scales for part, tensor in found.items() if tensor.scales is not None}
            deep, wide = -(-moe.hidden_size // FP8_BLOCK), moe.ffn_size // FP8_BLOCK
            state[f"{module}.gate_up_proj{SCALES}"] = _gate_up_shard(scales, wide, layout, deep)
            state[f"{module}.down_proj{SCALES}"] = _down_shard(scales, deep, wide, layout)
    return state


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
    if rest in _FUSED + BIASES:
        return rest, None
    match = _ONE_EXPERT.match(rest)
    return (PARTS[match[2]], int(match[1])) if match and match[2] in PARTS else None


def _layer_problems(layer: int, found: dict[Part, StoredTensor], moe: MoEConfig, keep_fp8: bool) -> list[str]:
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
        if moe.expert_bias:
            expected |= {
                (BIASES[0], None): (moe.num_experts, 2 * moe.ffn_size),
                (BIASES[1], None): (moe.num_experts, moe.hidden_size),
            }
    missing = [part if expert is None else f"expert {expert}'s {part}" for part, expert in expected.keys() - found]
    surplus = [found[part].name for part in found.keys() - expected]
    problems = [f"missing in layer {layer}: {some(missing)}"] if missing else []
    problems += [f"surplus {some(surplus)}"] if surplus else []
    for part in found.keys() & expected:
        name, shape = found[part].name, found[part].shape
        if shape != expected[part]:
            problems.append(f"{name} of shape {shape} must be {expected[part]}")
        problems += _dtype_problems(found[part], keep_fp8)
    return problems


def _dtype_problems(tensor: StoredTensor, keep_fp8: bool) -> list[str]:
    named = f"{tensor.name} of dtype {tensor.dtype} must be"
    if keep_fp8:
        return [] if tensor.scales is not None else [f"{named} {BLOCK_FP8} with scales to be kept as it is"]
    return [] if tensor.dtype in DTYPES or tensor.read_as is not None else [f"{named} one of {', '.join(DTYPES)}"]


def _gate_up_shard(found: dict[Part, StoredTensor], ffn_size: int, layout: ExpertLayout, *deep: int) -> LazyShard:
    """``(e, 2F/TP, D)``, or without a D in ``deep`` ``(e, 2F/TP)``."""
    experts, width = layout.experts_local, ffn_size // layout.tp
    first = layout.tp_rank * width
    fused = found.get(("gate_up_proj", None))
    if fused is not None:
        mine = slice(layout.first_expert, layout.first_expert + experts)
        pieces = [
            Piece(source=fused, index=(mine, slice(start, start + width)), into=(ALL, half))
            for half, start in enumerate((first, ffn_size + first))
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
        buffer_shape=(experts, 2, width, *deep),
        shape=(experts, 2 * width, *deep),
        pieces=tuple(pieces),
    )


def _down_shard(found: dict[Part, StoredTensor], hidden_size: int, ffn_size: int, layout: ExpertLayout) -> LazyShard:
    experts, width = layout.experts_local, ffn_size // layout.tp
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
    shape = (experts, hidden_size, width)
    return LazyShard(buffer_shape=shape, shape=shape, pieces=tuple(pieces))


def _down_bias_shard(bias: StoredTensor, hidden_size: int, layout: ExpertLayout) -> LazyShard:
    """Whole on every TP rank, the first of which adds it."""
    shape = (layout.experts_local, hidden_size)
    mine = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    return LazyShard(buffer_shape=shape, shape=shape, pieces=(Piece(source=bias, index=(mine,), into=(ALL,)),))
