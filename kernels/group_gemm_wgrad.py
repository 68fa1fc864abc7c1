"""Weight gradients: for every expert the sum over its routed rows of an outer product (a GEMM contracted over rows).

The rows of an expert lie in one segment per phase and are followed by padding, which may hold anything, NaN included.
Rows read in place go through a *segment descriptor* (``triton.tools.ragged_tma``): the copy engine itself fills what
lies behind the end of the segment with zeros, at no cost in the loop. Gathered rows are masked by ``cp.async``. Every
output element is summed by one block in the order of phases and rows, so results are bitwise reproducible.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from .aot_case import KernelCase
from .arguments import as_triton_dtype, power_of_2
from .group_gemm import GemmConfig, dot_precision, num_blocks
from .tiles import decode_tokens


@triton.jit
def group_gemm_wgrad_kernel(
    a, b, out_ptr, starts_ptr, counts_ptr, row_ids_ptr, M, N, num_experts, num_phases,
    GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See ``group_gemm_wgrad``; ``GATHER`` names the operand that is a pointer, the others are segment descriptors."""
    num_rows = tl.cdiv(M, BLOCK_M)
    num_cols = tl.cdiv(N, BLOCK_N)
    in_step = tl.arange(0, BLOCK_K)
    for item in tl.range(tl.program_id(0), num_experts * num_rows * num_cols, tl.num_programs(0)):
        expert = item // (num_rows * num_cols)
        row, col = decode_tokens(item - expert * num_rows * num_cols, num_rows, num_cols, GROUP_TILES)
        ms = row * BLOCK_M + tl.arange(0, BLOCK_M)
        ns = col * BLOCK_N + tl.arange(0, BLOCK_N)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for phase in range(num_phases):
            start = tl.load(starts_ptr + phase * num_experts + expert)
            count = tl.load(counts_ptr + phase * num_experts + expert)
            if GATHER != "none":
                # Indices run one step ahead: loaded in the step that uses them, they would cost a pipeline stage.
                row_ids = tl.load(row_ids_ptr + start + in_step, mask=in_step < count, other=0)
            for k in range(0, count, BLOCK_K):
                valid = (k + in_step < count)[:, None]
                if GATHER == "a":
                    a_rows = a + row_ids.to(tl.int64)[:, None] * M + ms[None, :]
                    x = tl.load(a_rows, mask=valid & (ms < M)[None, :], other=0.0)
                else:
                    x = load_ragged(a, start, count, [k, row * BLOCK_M])
                if GATHER == "b":
                    b_rows = b + row_ids.to(tl.int64)[:, None] * N + ns[None, :]
                    y = tl.load(b_rows, mask=valid & (ns < N)[None, :], other=0.0)
                else:
                    y = load_ragged(b, start, count, [k, col * BLOCK_N])
                if GATHER != "none":
                    ahead = k + BLOCK_K + in_step
                    row_ids = tl.load(row_ids_ptr + start + ahead, mask=ahead < count, other=0)
                accumulator = tl.dot(x.T, y, accumulator, input_precision=PRECISION)
        # ---- epilogue
        target = out_ptr + expert.to(tl.int64) * M * N + ms.to(tl.int64)[:, None] * N + ns[None, :]
        tl.store(target, accumulator.to(out_ptr.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])


def group_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    segment_starts: Tensor,
    segment_counts: Tensor,
    *,
    row_ids: Tensor | None,
    gather: Literal["a", "b", "none"],
    config: GemmConfig,
) -> None:
    """Sum of outer products over the routed rows q of each expert: ``out[expert] = sum_q a[q]^T b[q]``.

    Args:
        a: ``(Q, M')`` routed rows, or ``(R, M')`` with ``gather="a"``; M' a multiple of 16.
        b: ``(Q, N')`` routed rows, or ``(R, N')`` with ``gather="b"``; dtype of ``a``; N' a multiple of 16.
        out: ``(e, M', N')`` result, written (not added to), rounded once from float32; zeros for experts without rows.
        segment_starts: ``(P*e + 1,)`` or ``(P*e,)`` int32 first routed row of segment ``phase*e + expert``.
        segment_counts: ``(P*e,)`` int32 valid routed rows of each segment.
        row_ids: ``(Q,)`` int32: routed row q reads row ``row_ids[q]`` of the gathered operand; ``None`` for ``none``.
        gather: The operand read through ``row_ids``.
        config: Tile shape and pipeline.

    Raises:
        ValueError: If shapes do not fit together, M' or N' is not a multiple of 16, or ``row_ids`` is missing.

    Example:
        One expert, one segment of 2 rows, a ``[[1, 2], [3, 4], [nan, nan]]``, b ``[[10], [20]]`` gathered with row_ids
        ``[1, 0, -1]`` (were such widths legal): out is ``[[[1*20 + 3*10], [2*20 + 4*10]]] = [[[50], [80]]]``.
    """
    num_experts, num_phases = check_wgrad(a, b, out, segment_counts, row_ids, gather)
    width_m, width_n = out.shape[1:]
    if a.shape[0] == 0 or b.shape[0] == 0:
        out.zero_()
        return
    block_m = min(config.block_m, power_of_2(width_m))
    block_n = min(config.block_n, power_of_2(width_n))
    max_items = num_experts * -(-width_m // block_m) * -(-width_n // block_n)
    group_gemm_wgrad_kernel[(num_blocks(a.device, config, max_items),)](
        a if gather == "a" else create_ragged_descriptor(a, [config.block_k, block_m]),
        b if gather == "b" else create_ragged_descriptor(b, [config.block_k, block_n]),
        out, segment_starts, segment_counts, segment_counts if row_ids is None else row_ids,
        width_m, width_n, num_experts, num_phases,
        GATHER=gather, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=config.block_k, GROUP_TILES=config.group_tiles,
        PRECISION=dot_precision(a.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def group_gemm_wgrad_torch(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    segment_starts: Tensor,
    segment_counts: Tensor,
    *,
    row_ids: Tensor | None,
    gather: Literal["a", "b", "none"],
    config: GemmConfig,
) -> None:
    """Torch twin of ``group_gemm_wgrad``: one product per expert over the rows of all its segments."""
    num_experts, num_phases = check_wgrad(a, b, out, segment_counts, row_ids, gather)
    starts, counts = segment_starts.tolist(), segment_counts.tolist()
    wide = torch.promote_types(a.dtype, torch.float32)
    for expert in range(num_experts):
        segments = range(expert, num_phases * num_experts, num_experts)
        runs = [torch.arange(starts[s], starts[s] + counts[s], device=a.device) for s in segments]
        rows = torch.cat(runs)
        gathered = rows if row_ids is None else row_ids.long()[rows]
        left = a[gathered if gather == "a" else rows].to(wide)
        right = b[gathered if gather == "b" else rows].to(wide)
        out[expert] = (left.T @ right).to(out.dtype)


def check_wgrad(
    a: Tensor, b: Tensor, out: Tensor, segment_counts: Tensor, row_ids: Tensor | None, gather: str
) -> tuple[int, int]:
    """Experts and phases; raises ``ValueError`` unless the arguments fit together."""
    num_experts, width_m, width_n = out.shape
    if gather not in ("a", "b", "none"):
        raise ValueError(f"gather={gather!r} must be 'a', 'b' or 'none'")
    if (row_ids is None) != (gather == "none"):
        raise ValueError(f"row_ids must be given exactly when an operand is gathered, gather={gather!r}")
    if (a.shape[1], b.shape[1]) != (width_m, width_n):
        raise ValueError(
            f"out of shape {tuple(out.shape)} must be (experts, columns of a, columns of b) = "
            f"({num_experts}, {a.shape[1]}, {b.shape[1]})"
        )
    for name, value in (("columns of a", width_m), ("columns of b", width_n)):
        if value <= 0 or value % 16:
            raise ValueError(f"{name}={value} must be a positive multiple of 16")
    if segment_counts.numel() % num_experts:
        raise ValueError(
            f"segment_counts has {segment_counts.numel()} entries, must be phases times experts={num_experts}"
        )
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be contiguous, has strides {tensor.stride()}")
    return num_experts, segment_counts.numel() // num_experts


def aot_cases() -> list[KernelCase]:
    """Either operand gathered (w2's and w1's gradient), or none; float32 as the oracle runs it."""
    cases = [_aot_case(torch.bfloat16, gather, GemmConfig()) for gather in ("a", "b", "none")]
    return [*cases, _aot_case(torch.float32, "b", GemmConfig.select(torch.float32))]


def _aot_case(dtype: torch.dtype, gather: Literal["a", "b", "none"], config: GemmConfig) -> KernelCase:
    element = as_triton_dtype(dtype)
    a_type = f"tensordesc<{element}[1, 1, {config.block_k}, {config.block_m}]>"
    b_type = f"tensordesc<{element}[1, 1, {config.block_k}, {config.block_n}]>"
    tensor_cores = {"wgmma"} if dtype != torch.float32 else set()
    return KernelCase(
        name=f"{element} gathers {gather}",
        fn=group_gemm_wgrad_kernel,
        signature={
            "a": f"*{element}" if gather == "a" else a_type, "b": f"*{element}" if gather == "b" else b_type,
            "out_ptr": f"*{element}", "starts_ptr": "*i32", "counts_ptr": "*i32", "row_ids_ptr": "*i32",
            "M": "i32", "N": "i32", "num_experts": "i32", "num_phases": "i32",
        },
        constexprs={
            "GATHER": gather, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
            "GROUP_TILES": config.group_tiles, "PRECISION": dot_precision(dtype),
        },
        unaligned=frozenset({"num_experts", "num_phases"}),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        expects=frozenset({"wide_loads", "wide_stores"} | tensor_cores),
    )  # fmt: skip
