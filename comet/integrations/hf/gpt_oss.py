"""gpt-oss in transformers: a clamped SwiGLU, biases on both projections, and weights that are laid out otherwise.

Its experts hold ``gate_up_proj (E, D, 2F)``, whose columns are gate and up in turn, and ``down_proj (E, F, D)``. They
keep these names, shapes and values, so that adapters, checkpoints and refits mean what they say. Only the order in
memory changes: Comet reads ``(E, 2F, D)``, rows of gate and up in turn, and ``(E, D, F)``, of which the parameters are
transposed views.

Published folders hold MXFP4, which is not transposed: ``gate_up_proj_blocks (E, 2F, D / 32, 16)``, two codes a byte,
and ``gate_up_proj_scales (E, 2F, D / 32)``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.integrations.hf.stored import BIASES, FUSED, MXFP4, Index, StoredTensor
from comet.layout import ExpertLayout
from comet.quantization import formats
from comet.quantization.formats import MX_BLOCK
from comet.utils.graphs import is_capturing

_TRAINED = "_comet_trained_"  # with a name, marks whether its gradients came in the stock order of memory
_CAPTURED = "_comet_captured"  # marks experts that a CUDA graph reads where they are
logger = logging.getLogger(__name__)


def read_turned(tensors: dict[str, StoredTensor], dtype: torch.dtype, *, gate_first: bool) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with those of experts as ``(E, N, K)``, as other families have them.

    Rows of gate and up stay in turn, or ``gate_first`` as in other families.
    """
    found = dict(tensors)
    ordered = _gate_first if gate_first else lambda tensor: tensor
    for name in tensors:
        if ".experts." not in name:
            continue
        stem = name.removesuffix("_blocks")
        if name.endswith("_blocks") and f"{stem}_scales" in tensors:
            found[stem] = _dequantised(ordered(found.pop(name)), ordered(found.pop(f"{stem}_scales")), dtype)
        elif name.endswith(FUSED) and len(found[name].shape) == 3:
            found[name] = ordered(_turned(found[name]))
        elif name.endswith(BIASES):
            found[name] = ordered(found[name])
    return found


def _turned(tensor: StoredTensor) -> StoredTensor:
    """``(E, N, K)`` of a tensor ``(E, K, N)``."""
    num_experts, columns, rows = tensor.shape

    def read(index: Index) -> Tensor:
        experts, rows, columns = index
        return tensor.read((experts, columns, rows)).transpose(1, 2)

    return replace(tensor, shape=(num_experts, rows, columns), read=read)


def _gate_first(tensor: StoredTensor) -> StoredTensor:
    """Rows of gate, or of up behind them, of a tensor ``(E, 2F, ...)`` of both in turn; any other is as it was.

    Example (F = 3): rows 4 and 5, the last two of up, are rows 3 and 5 of the tensor.
    """
    if "gate_up_proj" not in tensor.name:
        return tensor

    def read(index: Index) -> Tensor:
        experts, rows, *others = index
        half, first = divmod(rows.start, tensor.shape[1] // 2)
        pairs = slice(2 * first, 2 * (first + rows.stop - rows.start))
        return tensor.read((experts, pairs, *others))[:, half::2]

    return replace(tensor, read=read)


def _dequantised(blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """``(E, N, K)`` numbers of MXFP4, of which slices may begin inside a block."""
    for tensor, shape in ((blocks, (*scales.shape, MX_BLOCK // 2)), (scales, scales.shape)):
        fits, rule = tensor.dtype == "U8" and tensor.shape == shape and len(scales.shape) == 3, f"U8 of {shape}"
        layout = "MXFP4 has blocks (E, N, K / 32, 16) and scales (E, N, K / 32)"
        require(fits, f"{tensor.name} {tensor.dtype} of shape {tensor.shape} must be {rule}: {layout}")

    def read(index: Index) -> Tensor:
        experts, rows, columns = index
        touched = slice(columns.start // MX_BLOCK, -(-columns.stop // MX_BLOCK))
        elements = blocks.read((experts, rows, touched, slice(0, MX_BLOCK // 2))).flatten(2)
        try:
            packed = formats.MXFP4(elements=elements, scales=scales.read((experts, rows, touched)).contiguous())
        except ValueError as error:
            raise ValueError(f"{scales.name}: {error}") from error
        first = columns.start - MX_BLOCK * touched.start
        return packed.dequantize(dtype)[..., first : first + columns.stop - columns.start]

    shape = (*scales.shape[:2], MX_BLOCK * scales.shape[2])
    return replace(blocks, shape=shape, dtype=MXFP4, read=read, read_as=dtype)


def is_step(tokens: Tensor, most_tokens: int) -> bool:
    """Whether kernels decode ``(T, D)``, which read contiguous rows of weights; on a CPU none do."""
    return not tokens.is_cpu and len(tokens) <= most_tokens


def turned(experts: Any, *, in_step: bool) -> list[Tensor]:
    """Return w1 ``(e, 2F, D)``, gate and up in turn, and w2 ``(e, D, F)`` of experts, differentiably.

    They are views of the parameters, so that every write to a parameter counts at once. A decode step needs contiguous
    rows: the first one moves the parameters in memory, and the first call that trains moves them back, so that an
    optimizer never sees other strides. Names, shapes and values stay. A step copies the rows of weights that must not
    move: adapters compute them at each call, or others know their place in memory.

    Args:
        in_step: Whether rows must be contiguous, but for gradients.
    """
    found = []
    for name in FUSED:
        weight = getattr(experts, name)
        learns = torch.is_grad_enabled() and weight.requires_grad
        is_own, marks = weight is experts._parameters.get(name), vars(experts)
        if is_own and (learns or in_step):
            _move(weight, marks, in_rows=not (learns and marks.get(_TRAINED + name, True)))
        rows = weight.transpose(1, 2)
        if is_own and learns:
            rows.register_hook(partial(_note_training, name, weight, marks))
        found.append(rows.contiguous() if in_step and not learns else rows)
    return found


def _move(weight: Tensor, marks: dict[str, Any], *, in_rows: bool) -> None:
    """Order the memory of a parameter ``(E, K, N)`` as ``(E, N, K)``, or as it was, unless others know it."""
    if is_capturing(weight.device):
        marks[_CAPTURED] = True
    if (weight.transpose(1, 2) if in_rows else weight).is_contiguous():
        return
    # More users of the memory than of a tensor that is alone: a state has it, or the weight is a view.
    is_known = _num_users(weight) > _num_users(torch.empty(1)) or (weight.is_cpu and weight.is_shared())
    if is_known or _CAPTURED in marks or weight.grad is not None:
        if in_rows:
            _warn_of_copies()
        return
    with torch.inference_mode(weight.is_inference()):
        data = weight.data
        weight.data = data.transpose(1, 2).contiguous().transpose(1, 2) if in_rows else data.contiguous()


def _note_training(name: str, weight: Tensor, marks: dict[str, Any], _: Tensor) -> None:
    """Refuse gradients in another order than before: fused optimizers read their state in the order of memory."""
    is_stock = weight.is_contiguous()
    same, moved = marks.setdefault(_TRAINED + name, is_stock) == is_stock, "since a decode step moved it"
    users = f"a state_dict or another tensor has its memory, or a CUDA graph reads it, {moved}: drop these"
    require(same, f"{name} of gpt-oss must lie in memory as it was trained before, but {users} before training goes on")


def _num_users(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _warn_of_copies() -> None:
    logger.warning(
        "decode steps copy experts of gpt-oss at each call, for they must not move: a state_dict or another tensor has "
        "their memory, a CUDA graph reads it, or they have gradients; drop these, and steps read experts where they are"
    )


def part_of(experts: Any, layout: ExpertLayout) -> list[Tensor]:
    """Return one rank's part of ``gate_up_proj``, ``down_proj`` and their biases."""
    width = experts.down_proj.shape[1] // layout.tp
    held = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    rows = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
    pairs = slice(2 * rows.start, 2 * rows.stop)
    # b2 is whole on each TP rank.
    biases = experts.gate_up_proj_bias[held, pairs], experts.down_proj_bias[held]
    return [experts.gate_up_proj[held, :, pairs], experts.down_proj[held, rows], *biases]
