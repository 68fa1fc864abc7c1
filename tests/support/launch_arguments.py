"""Arguments of launches that never run: what launchers look at, and tensors without meaning for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.kernels.runtime.arguments import Scaled, SymmBuffer, TileTable


def make_symm(world_size: int = 2, max_tokens: int = 128) -> SymmBuffer:
    numbers, pointers = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(world_size, dtype=torch.int64)
    return SymmBuffer(
        rows=numbers, row_pointers=pointers, flags=numbers, flag_pointers=pointers, epoch=numbers, fault=numbers,
        rank=0, max_tokens=max_tokens, timeout_ns=1,
    )  # fmt: skip


def make_table(block_rows: int = 128) -> TileTable:
    """With segments."""
    numbers = torch.zeros(4, dtype=torch.int32)
    return TileTable(
        tiles=numbers, num_tiles=numbers, row_ids=numbers, counters=numbers, block_rows=block_rows,
        segments=(numbers, numbers),
    )  # fmt: skip


def in_16_bits(*shape: int) -> Tensor:
    """Weights without memory."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def in_fp8(experts: int, rows: int, columns: int) -> Scaled:
    """The same, ``(e, N, K)`` in block FP8."""
    elements = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device="meta")
    return Scaled(elements=elements, scales=torch.empty(experts, rows // 128, columns // 128, device="meta"))
