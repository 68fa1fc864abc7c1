"""Block FP8 as DeepSeek-V3 publishes it: e4m3 elements, and beside each tensor a scale per 128 x 128 block of it.

transformers splits the elements of experts when it saves, but not the scales: it holds ``gate_up_proj (E, 2F, D)`` with
scales ``(E, ceil(2F/128), ceil(D/128))``, so where F is no multiple of 128, gate and up share a block.

Nothing here asks transformers to quantise or dequantise: its own way takes a GPU and splits no experts over ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.integrations.hf.stored import (
    BLOCK_FP8,
    DTYPES,
    FUSED,
    PARTS,
    SCALE_DTYPES,
    SCALES,
    Index,
    StoredTensor,
    several,
    some,
)
from comet.quantization.formats import FP8, FP8_BLOCK

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
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")


def is_block_fp8(config: Any) -> bool:
    """Whether a model's configuration says that its checkpoint holds block FP8; if not, it is not quantised at all."""
    found = getattr(config, "quantization_config", None)
    if found is None:
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
    """Give every block FP8 tensor its scales, which are no tensors of their own then; reads nothing.

    Raises:
        ValueError: If scales are missing, of a wrong shape or dtype, or belong to nothing, or a tensor is of another
            eight-bit type; all are named.
    """
    tensors = _split_scales(tensors)
    joined, lacking, problems = {}, [], []
    for name, tensor in tensors.items():
        if name.endswith(SCALES):
            continue
        scales = tensors.get(name + SCALES)
        if tensor.dtype != BLOCK_FP8:
            joined[name] = tensor
            if tensor.is_narrow:
                problems.append(f"{name} of dtype {tensor.dtype} must be {BLOCK_FP8} or one of {', '.join(DTYPES)}")
            elif scales is not None and not _is_left_wide(tensor):
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


def check_wide(tensors: dict[str, StoredTensor]) -> None:
    """Raise ``ValueError`` if tensors beside the experts are narrow, in a checkpoint that says nothing of scales."""
    narrow = [f"{name} of dtype {tensor.dtype}" for name, tensor in tensors.items() if tensor.is_narrow]
    require(
        not narrow,
        f"{some(narrow)} must be one of {', '.join(DTYPES)}: config.json has no quantization_config that explains them",
    )


def dequantized(tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """The same tensor, but dequantised to ``dtype`` as it is read; itself if it is not block FP8.

    Example: columns 100 to 299 of a ``(256, 300)`` tensor begin inside block 0 of its ``(2, 3)`` scales; all of these
    are read with them.
    """
    scales = tensor.scales
    if scales is None:
        return tensor

    def read(index: Index) -> Tensor:
        *outer, rows, columns = index
        first, stop = (end + scales.first_row for end in (rows.start, rows.stop))
        ends = (first, stop), (columns.start, columns.stop)
        touched = (slice(low // FP8_BLOCK, -(-high // FP8_BLOCK)) for low, high in ends)
        return dequantize_slice(tensor.read(index), scales.read((*outer, *touched)), first, columns.start, dtype)

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
    """Element times scale, where the slice may begin inside a block.

    Example: 3 rows from row 127 on, of two blocks with scales 2 and 10: row 127 is times 2, rows 128 and 129 times 10.

    Args:
        elements: ``(..., N, K)`` float8_e4m3fn.
        scales: Of all blocks that the slice touches, float32, finite and not negative.
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
    """What is wrong with the scales of a tensor, in words."""
    if len(tensor.shape) < 2:
        return [f"{tensor.name} of shape {tensor.shape} must have rows and columns"]
    *outer, rows, columns = tensor.shape
    if tensor.name.endswith(f".experts.{FUSED[0]}") and _is_ambiguous(rows // 2):
        return [_ambiguity(scales, rows // 2)]
    wanted = (*outer, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    problems = []
    if scales.shape != wanted:
        problems.append(f"{scales.name} of shape {scales.shape} must be {wanted} for a tensor of shape {tensor.shape}")
    if scales.dtype not in SCALE_DTYPES:
        problems.append(f"{scales.name} of dtype {scales.dtype} must be one of {', '.join(SCALE_DTYPES)}")
    return problems


def _is_left_wide(tensor: StoredTensor) -> bool:
    """Whether transformers quantises no such tensor, but writes scales for it that it never reads."""
    return len(tensor.shape) >= 2 and any(size % FP8_BLOCK for size in tensor.shape[-2:])


def _split_scales(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Give every expert its part of scales that lie in one tensor for all of them; reads nothing.

    Example: F = 192, so gate_up_proj of 384 rows has blocks 0, 1 and 2: gate has blocks 0 and 1, up begins at row 64 of
    block 1 and has blocks 1 and 2.
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
            own = scales.of_expert(expert).part(slice(blocks.start, blocks.stop))
            found[tensor.name + SCALES] = replace(own, first_row=half * rows % FP8_BLOCK)
    return found


def _is_ambiguous(ffn_size: int) -> bool:
    """Whether gate and up have as many blocks by themselves as they have together, but other ones.

    Example: F = 224 has blocks of 128, 96, 128 and 96 rows, or of 128, 128, 128 and 64: four scales each.
    """
    return ffn_size % FP8_BLOCK > FP8_BLOCK // 2


def _ambiguity(scales: StoredTensor, ffn_size: int) -> str:
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
            fused = f"{match[1]}.{'down_proj' if part == 'down' else FUSED[0]}"
            found.setdefault(fused, []).append((int(match[2]), int(part == "up"), tensor))
    return found


def _check_shape(fused: str, scales: StoredTensor, experts: list[tuple[int, int, StoredTensor]]) -> None:
    rows, columns = experts[0][2].shape
    is_gate_up = fused.endswith(FUSED[0])
    require(not (is_gate_up and _is_ambiguous(rows)), _ambiguity(scales, rows))
    count = 1 + max(expert for expert, _, _ in experts)
    wanted = count, -(-rows * (1 + is_gate_up) // FP8_BLOCK), -(-columns // FP8_BLOCK)
    require(scales.shape == wanted, f"{scales.name} of shape {scales.shape} must be {wanted} for {count} experts")
