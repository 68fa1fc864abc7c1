"""Grouped GEMM over the tile table: every tile of routed rows times the weight of its expert.

Compute only: the GEMM of the unfused path, of the input gradients and of the GEMM-only times. One launch of persistent
blocks; a block takes the work items (tile, column block) ``block, block + blocks, ...`` in grouped order. How many
there are is read on the device, so the host never waits for the plan.

Loads: weights come through a host tensor descriptor (TMA), which also fills the tails of N and K with zeros; rows come
through one as well, or, when gathered by index, as 16-byte ``cp.async``. Both are multi-buffered by the compiler.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..runtime.arguments import (
    TileTable,
    num_sms,
    power_of_2,
    require_multiples_of_16,
    require_shapes,
)
from .tiles import GROUP_TILES, decode_tokens

Layout = Literal["nk", "kn"]

INTERPRETED_BLOCKS = 3  # few, and more than one: the interpreter runs them one after the other


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """Tile shape and pipeline of a grouped GEMM."""

    # rows of an output tile of the weight gradient (``group_gemm`` takes the rows of the tile table)
    block_m: int = 128
    block_n: int = 256  # columns of an output tile
    block_k: int = 64  # contraction step
    num_stages: int = 4  # depth of the load pipeline
    num_warps: int = 8  # warps per block

    @classmethod
    def select(cls, dtype: torch.dtype) -> "GemmConfig":
        """The default for an element type; float32 has no tensor cores at full precision and takes small tiles."""
        if dtype == torch.float32:
            return cls(block_m=64, block_n=64, block_k=16, num_stages=3)
        return cls()


class GemmConstants(NamedTuple):
    """The constants for which the kernel is compiled."""

    gather: bool  # rows are gathered by index
    layout: Layout  # of b
    block_m: int
    block_n: int
    block_k: int
    even_k: bool  # block_k divides K
    precision: str  # ``input_precision`` of ``tl.dot``


@triton.jit(do_not_specialize_on_alignment=["num_tiles_ptr"])
def group_gemm_kernel(
    a, b_desc, out_ptr, tiles_ptr, num_tiles_ptr, row_ids_ptr, N, K, GEMM: tl.constexpr
):  # fmt: skip
    """Persistent blocks; ``a`` is a pointer where rows are gathered, else a descriptor of (block_m, block_k)."""
    BLOCK_M: tl.constexpr = GEMM.block_m
    BLOCK_N: tl.constexpr = GEMM.block_n
    BLOCK_K: tl.constexpr = GEMM.block_k
    num_tiles = tl.load(num_tiles_ptr)
    num_cols = tl.cdiv(N, BLOCK_N)
    in_tile = tl.arange(0, BLOCK_M)
    in_step = tl.arange(0, BLOCK_K)
    for item in tl.range(tl.program_id(0), num_tiles * num_cols, tl.num_programs(0)):
        tile, col = decode_tokens(item, num_tiles, num_cols, GROUP_TILES)
        expert = tl.load(tiles_ptr + tile * 4)
        first_row = tl.load(tiles_ptr + tile * 4 + 1)
        valid = in_tile < tl.load(tiles_ptr + tile * 4 + 2)
        first_col = col * BLOCK_N
        if GEMM.gather:
            # Rows past the end of the segment read row 0: cheaper than masking every load, and never stored.
            row_ids = tl.load(row_ids_ptr + first_row + in_tile, mask=valid, other=0)
            rows = a + row_ids.to(tl.int64)[:, None] * K + in_step[None, :]
        # ---- main loop
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if not GEMM.gather:
                x = a.load([first_row, k])
            elif GEMM.even_k:
                x = tl.load(rows + k)
            else:
                x = tl.load(rows + k, mask=(k + in_step < K)[None, :], other=0.0)
            if GEMM.layout == "nk":
                w = b_desc.load([expert, first_col, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = b_desc.load([expert, k, first_col]).reshape(BLOCK_K, BLOCK_N)
            accumulator = tl.dot(x, w, accumulator, input_precision=GEMM.precision)
        # ---- epilogue: only the first row needs 64 bits, offsets inside a tile do not
        cols = first_col + tl.arange(0, BLOCK_N)
        target = out_ptr + first_row.to(tl.int64) * N + in_tile[:, None] * N + cols[None, :]
        tl.store(target, accumulator.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (cols < N)[None, :])


def group_gemm(
    a: Tensor, b: Tensor, out: Tensor, table: TileTable, *, gather: bool, layout: Layout, config: GemmConfig
) -> None:
    """Multiply every routed row with the weight of its expert: ``out[q] = a[row] @ b[expert]``, row = q or row_ids[q].

    Args:
        a: ``(R, K)`` rows to gather, or ``(Q, K)`` routed rows; K a multiple of 16.
        b: ``(e, N, K)`` weights of layout ``nk`` (``out[q] = b[expert] @ a[row]``) or ``(e, K, N)`` of layout ``kn``;
            dtype of ``a``; N a multiple of 16.
        out: ``(Q, N)`` result, rounded once from float32; rows of no tile and the padding of tiles are left alone.
        table: Tiles; ``block_rows`` is the height of a GEMM tile.
        gather: Whether routed row q reads ``a[table.row_ids[q]]`` instead of ``a[q]``.
        layout: Layout of ``b``.
        config: Tile shape and pipeline.

    Example:
        One expert with b ``[[[10]]]`` (were K = N = 1 legal), one tile of 3 rows. Gathered with row_ids ``[1, 0, 1]``,
        a ``[[1], [2]]`` gives ``[[20], [10], [20]]``; in place, a ``[[1], [2], [3]]`` gives ``[[10], [20], [30]]``.
    """
    num_cols, depth = check_shapes(a, b, out, layout)
    if out.shape[0] == 0 or a.shape[0] == 0:
        return
    block_n = min(config.block_n, power_of_2(num_cols))
    block_k = min(config.block_k, power_of_2(depth))
    b_block = [1, block_n, block_k] if layout == "nk" else [1, block_k, block_n]
    max_items = table.tiles.shape[0] * -(-num_cols // block_n)
    constants = GemmConstants(
        gather, layout, table.block_rows, block_n, block_k, depth % block_k == 0, dot_precision(a.dtype),
    )  # fmt: skip
    group_gemm_kernel[(num_blocks(a.device, max_items),)](
        a if gather else TensorDescriptor.from_tensor(a, [table.block_rows, block_k]),
        TensorDescriptor.from_tensor(b, b_block),
        out, table.tiles, table.num_tiles, table.row_ids, num_cols, depth,
        GEMM=constants, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def group_gemm_torch(
    a: Tensor, b: Tensor, out: Tensor, table: TileTable, *, gather: bool, layout: Layout, config: GemmConfig
) -> None:
    """Torch twin of ``group_gemm``: one product per expert, accumulated in float32 (float64 stays float64)."""
    check_shapes(a, b, out, layout)
    rows, experts = valid_rows(table)
    sources = table.row_ids.long()[rows] if gather else rows
    wide = torch.promote_types(a.dtype, torch.float32)
    for expert in range(b.shape[0]):
        of_expert = experts == expert
        weight = b[expert].to(wide)
        product = a[sources[of_expert]].to(wide) @ (weight.T if layout == "nk" else weight)
        out[rows[of_expert]] = product.to(out.dtype)


def valid_rows(table: TileTable) -> tuple[Tensor, Tensor]:
    """Routed rows that are not padding, ``(V,)`` int64, and the local expert of each, ``(V,)`` int32, by tiles.

    Example:
        tiles ``[[0, 0, 2, 0], [3, 4, 1, 0]]`` give rows ``[0, 1, 4]`` and experts ``[0, 0, 3]``.
    """
    tiles = table.tiles[: int(table.num_tiles)]
    in_tile = torch.arange(table.block_rows, device=tiles.device)
    rows = tiles[:, 1:2].long() + in_tile
    valid = in_tile < tiles[:, 2:3]
    return rows[valid], tiles[:, :1].expand_as(valid)[valid]


def check_shapes(a: Tensor, b: Tensor, out: Tensor, layout: Layout) -> tuple[int, int]:
    """N and K of a grouped GEMM; raises ``ValueError`` unless the shapes fit together and are multiples of 16."""
    if layout not in ("nk", "kn"):
        raise ValueError(f"layout={layout!r} must be 'nk' or 'kn'")
    num_cols, depth = b.shape[1:] if layout == "nk" else (b.shape[2], b.shape[1])
    require_multiples_of_16(N=num_cols, K=depth)
    require_shapes(a=(a, (len(a), depth)), b=(b, tuple(b.shape)), out=(out, (len(out), num_cols)))
    return num_cols, depth


def dot_precision(dtype: torch.dtype) -> str:
    """``input_precision`` of ``tl.dot``: float32 operands are not rounded to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def num_blocks(device: torch.device, max_items: int, *, per_processor: int = 1) -> int:
    """Persistent blocks: so many per SM, but no more than there can be work items and at least one."""
    blocks = INTERPRETED_BLOCKS if triton.knobs.runtime.interpret else per_processor * num_sms(device)
    return max(1, min(blocks, max_items))
