"""Scales of block FP8 that belong to all experts of a layer, as transformers writes them, beside experts one by one.

It holds ``gate_up_proj (E, 2F, D)`` with scales ``(E, ceil(2F/128), ceil(D/128))``: where F is no multiple of 128, gate
and up share a block. It splits the elements when it saves, but not the scales.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from comet.config import require
from comet.integrations.hf.checkpoint import PARTS
from comet.integrations.hf.stored import BLOCK_FP8, SCALES, StoredTensor
from comet.quantization.formats import FP8_BLOCK

GATE_UP = "gate_up_proj"
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")


def split_scales(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Give every expert its part of scales that lie in one tensor for all of them; reads nothing.

    Example: F = 192, so gate_up_proj of 384 rows has blocks 0, 1 and 2: gate has blocks 0 and 1, up begins at row 64 of
    block 1 and has blocks 1 and 2.

    Returns:
        The same, but scales that were split are replaced by those of each expert, under the names these have elsewhere.
    """
    found = dict(tensors)
    for fused, experts in _experts_by_fused(tensors).items():
        scales = tensors.get(fused + SCALES)
        is_needed = fused not in tensors and not any(tensor.name + SCALES in tensors for _, _, tensor in experts)
        if scales is None or not is_needed:
            continue
        del found[fused + SCALES]
        if not any(tensor.dtype == BLOCK_FP8 for _, _, tensor in experts):
            continue  # transformers quantises whole blocks only, and never reads the scales it writes for the rest
        _check_shape(fused, scales, experts)
        for expert, half, tensor in experts:
            rows = tensor.shape[0]
            blocks = range(half * rows // FP8_BLOCK, -(-(half + 1) * rows // FP8_BLOCK))
            found[tensor.name + SCALES] = StoredTensor(
                name=scales.name,
                shape=(len(blocks), scales.shape[2]),
                dtype=scales.dtype,
                lazy=ExpertRows(scales, expert, blocks),
                first_row=half * rows % FP8_BLOCK,
            )
    return found


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Reads some of the rows that are one expert's in a tensor of all experts."""

    tensor: StoredTensor
    expert: int
    rows: range

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part, *columns = index
        rows = self.rows[part]
        values: Tensor = self.tensor.lazy[self.expert : self.expert + 1, rows.start : rows.stop, *columns]
        return values[0]


def is_ambiguous(ffn_size: int) -> bool:
    """Whether gate and up have as many blocks by themselves as they have together, but other ones.

    Example: F = 224 has blocks of 128, 96, 128 and 96 rows, or of 128, 128, 128 and 64: four scales each.
    """
    return ffn_size % FP8_BLOCK > FP8_BLOCK // 2


def ambiguity(scales: StoredTensor, ffn_size: int) -> str:
    """What is wrong with scales of gate and up in one tensor, in words."""
    return (
        f"{scales.name} of shape {scales.shape} may hold scales of gate and of up, or of both as one tensor: with "
        f"ffn_size={ffn_size} their blocks differ, so each expert's gate_proj and up_proj must have scales of its own"
    )


def _experts_by_fused(tensors: dict[str, StoredTensor]) -> dict[str, list[tuple[int, int, StoredTensor]]]:
    """Expert, 1 for up, and tensor of all that one fused tensor would hold, by the name of that."""
    found: dict[str, list[tuple[int, int, StoredTensor]]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match and match[3] in PARTS and len(tensor.shape) == 2:
            part = PARTS[match[3]]
            fused = f"{match[1]}.{'down_proj' if part == 'down' else GATE_UP}"
            found.setdefault(fused, []).append((int(match[2]), int(part == "up"), tensor))
    return found


def _check_shape(fused: str, scales: StoredTensor, experts: list[tuple[int, int, StoredTensor]]) -> None:
    rows, columns = experts[0][2].shape
    is_gate_up = fused.endswith(GATE_UP)
    require(not (is_gate_up and is_ambiguous(rows)), ambiguity(scales, rows))
    count = 1 + max(expert for expert, _, _ in experts)
    wanted = count, -(-rows * (1 + is_gate_up) // FP8_BLOCK), -(-columns // FP8_BLOCK)
    require(scales.shape == wanted, f"{scales.name} of shape {scales.shape} must be {wanted} for {count} experts")
