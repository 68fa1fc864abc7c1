"""Weight gradients: for every expert the sum over its routed rows of an outer product (a GEMM contracted over rows).

The rows of an expert are followed by padding, which may hold anything, NaN included. They are read through a *segment
descriptor* (``triton.tools.ragged_tma``): the copy engine itself fills what lies behind the end of the segment with
zeros, at no cost in the loop. Every output element is summed by one block in the order of the rows, so results are
bitwise reproducible.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from ..runtime.arguments import power_of_2, require_multiples_of_16, require_shapes
from .group_gemm import GemmConfig, dot_precision, num_blocks
from .tiles import GROUP_TILES, decode_tokens


@triton.jit
def group_gemm_wgrad_kernel(
    a_desc, b_desc, out_ptr, starts_ptr, counts_ptr, M, N, num_experts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent blocks over tiles of all experts; the operands come as segment descriptors."""
    num_rows = tl.cdiv(M, BLOCK_M)
    num_cols = tl.cdiv(N, BLOCK_N)
    for item in tl.range(tl.program_id(0), num_experts * num_rows * num_cols, tl.num_programs(0)):
        expert = item // (num_rows * num_cols)
        row, col = decode_tokens(item - expert * num_rows * num_cols, num_rows, num_cols, GROUP_TILES)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        start = tl.load(starts_ptr + expert)
        count = tl.load(counts_ptr + expert)
        for k in range(0, count, BLOCK_K):
            x = load_ragged(a_desc, start, count, [k, row * BLOCK_M])
            y = load_ragged(b_desc, start, count, [k, col * BLOCK_N])
            accumulator = tl.dot(x.T, y, accumulator, input_precision=PRECISION)
        # ---- epilogue
        ms = row * BLOCK_M + tl.arange(0, BLOCK_M)
        ns = col * BLOCK_N + tl.arange(0, BLOCK_N)
        target = out_ptr + expert.to(tl.int64) * M * N + ms.to(tl.int64)[:, None] * N + ns[None, :]
        tl.store(target, accumulator.to(out_ptr.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])


def group_gemm_wgrad(
    a: Tensor, b: Tensor, out: Tensor, segment_starts: Tensor, segment_counts: Tensor, *, config: GemmConfig
) -> None:
    """Sum of outer products over the routed rows q of each expert: ``out[expert] = sum_q a[q]^T b[q]``.

    Args:
        a: ``(Q, M')`` routed rows; M' a multiple of 16.
        b: ``(Q, N')`` routed rows; dtype of ``a``; N' a multiple of 16.
        out: ``(e, M', N')`` result, written (not added to), rounded once from float32; zeros for experts without rows.
        segment_starts: ``(e,)`` or ``(e + 1,)`` int32 first routed row of each expert.
        segment_counts: ``(e,)`` int32 routed rows of each expert.
        config: Tile shape and pipeline.

    Example:
        One expert, one segment of 2 rows, a ``[[1, 2], [3, 4], [nan, nan]]``, b ``[[20], [10], [nan]]`` (were such
        widths legal): out is ``[[[1*20 + 3*10], [2*20 + 4*10]]] = [[[50], [80]]]``.
    """
    num_experts, width_m, width_n = out.shape
    require_multiples_of_16(**{"columns of a": width_m, "columns of b": width_n})
    require_shapes(
        a=(a, (len(a), width_m)), b=(b, (len(a), width_n)), out=(out, (num_experts, width_m, width_n)),
        segment_counts=(segment_counts, (num_experts,)),
    )  # fmt: skip
    if a.shape[0] == 0:
        out.zero_()
        return
    block_m = min(config.block_m, power_of_2(width_m))
    block_n = min(config.block_n, power_of_2(width_n))
    max_items = num_experts * -(-width_m // block_m) * -(-width_n // block_n)
    group_gemm_wgrad_kernel[(num_blocks(a.device, max_items),)](
        create_ragged_descriptor(a, [config.block_k, block_m]), create_ragged_descriptor(b, [config.block_k, block_n]),
        out, segment_starts, segment_counts, width_m, width_n, num_experts,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=config.block_k, PRECISION=dot_precision(a.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
