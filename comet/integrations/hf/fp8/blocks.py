"""Block FP8 as DeepSeek-V3 publishes it: e4m3 elements, and beside each tensor a scale per 128 x 128 block of it.

Nothing here asks transformers to quantise or dequantise: its own way takes a GPU and splits no experts over ranks.
"""

from __future__ import annotations

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
