"""What the fused kernels are handed: tensors, integers and pointer tables, grouped by meaning.

Letters as in ``comet.plan``: W ranks, M tokens at most per rank, R = W*M received-row slots, Q routed rows, K, D, F,
C = M / 128 chunks of rows, P phases.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .recorder import Recorder

# Rows that share an arrival flag, and flags per chunk of the combine; comet.layout holds the same values.
CHUNK_ROWS = 128
MAX_PANELS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Symmetric rows with their arrival flags, as one rank sees them.

    Args:
        rows: ``(R, D)`` this rank's copy; source s writes rows s*M + i.
        row_pointers: ``(W,)`` int64 address of every rank's ``rows``.
        flags: ``(W, C)`` or ``(W, C, 16)`` int32 this rank's copy; the slot [s, c] is written by source s.
        flag_pointers: ``(W,)`` int64 address of every rank's ``flags``.
        epoch: ``(1,)`` int32; flags that carry at least this epoch have arrived.
        fault: ``(8,)`` int64 record of a spin that met its deadline.
        rank: This rank.
        max_tokens: M.
        timeout_ns: Deadline of every spin.
        recorder: Where the launch writes what its blocks do and when, or ``None``.
    """

    rows: Tensor
    row_pointers: Tensor
    flags: Tensor
    flag_pointers: Tensor
    epoch: Tensor
    fault: Tensor
    rank: int
    max_tokens: int
    timeout_ns: int
    recorder: Recorder | None = None

    @property
    def world_size(self) -> int:
        """W."""
        return self.row_pointers.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTable:
    """The routed rows in GEMM tiles (see ``comet.plan.Plan`` for the fields).

    Args:
        tiles: ``(max_tiles, 4)`` int32: local expert, first routed row, valid rows, phase.
        num_tiles: ``(1,)`` int32.
        row_ids: ``(Q,)`` int32 received row of each routed row.
        counters: ``(32,)`` int32 zeros: tickets and panel counters, used up by one launch.
        block_rows: Rows of a tile.
    """

    tiles: Tensor
    num_tiles: Tensor
    row_ids: Tensor
    counters: Tensor
    block_rows: int


def as_triton_dtype(dtype: torch.dtype) -> str:
    """Triton's short name of a torch element type, for signatures: ``bf16``, ``fp16`` or ``fp32``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
