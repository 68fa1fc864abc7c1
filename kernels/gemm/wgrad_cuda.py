"""Weight gradients in CUDA C++ (``cuda/wgrad.cu``): what ``group_gemm_wgrad`` does, bit for bit.

What it has and its Triton twin cannot have: a warp that only loads, and is ahead in the next tiles, and two warpgroups
of which one stores its half of a tile while the other multiplies. A tile's contraction is as long as an expert has
rows, often a thousand: its end, where Triton's tensor cores idle, comes every ten microseconds. Of an expert's last
rows only steps of 16 are multiplied, not of 64.

Blocks take the next tile when they are ready, and none waits for another.
"""

import functools

import torch
from torch import Tensor

from ..runtime.arguments import num_sms
from ..runtime.case import CudaCase
from ..runtime.cuda_source import (
    INT32,
    MATH_WARPS,
    POINTER,
    SWIZZLE_BYTES,
    CudaSource,
    DeviceStruct,
    TensorMap,
    element_of,
    fields,
    padded,
    storage_bytes,
)
from ..runtime.nvrtc import SEGMENT_ROWS, CudaKernel, is_available, load_source, segment_map, tensor_map

TILE_BYTES = 32  # size of ``WgradTile`` in ``wgrad.cuh``
TILE_SLOTS = 16  # a tile may have no more than a stage, and slots are more than these
LINE_COLS = SWIZZLE_BYTES // 2  # columns of a line
A_COLS = 128  # columns of a of a tile
B_COLS = 256  # and of b: what one instruction multiplies
ROW_STEP = 16  # rows that an instruction multiplies
TICKETS = 2  # where its counter is among a launch's, behind those of communication and of tiles
BOX_ROWS = 16  # rows of a result that a warp stores at once
# As measured best on an H200 (benchmarks/results/backward_kernels.md).
DEPTH = 32  # rows of a stage
NUM_STAGES = 8
LEAD = 3  # stages that the first warpgroup is ahead of the second
STAGED_BOXES = 2  # boxes of 16 rows and 64 columns that a warp stages; one item has four


class WgradProblem(DeviceStruct):
    """The segments of rows, and the sizes of both operands."""

    _fields_ = (*fields(POINTER, "starts counts"), *fields(INT32, "experts a_cols b_cols"))


class WgradArgs(DeviceStruct):
    """The kernel's arguments."""

    _fields_ = padded(
        *fields(TensorMap, "a_map b_map out_map"), *fields(WgradProblem, "problem"), *fields(POINTER, "counter")
    )


def shared_bytes() -> int:
    """Dynamic shared memory of a block: alignment, stages with three barriers each, staging, tiles.

    Example:
        1024 + 8 * (24576 + 24) + 8 * 2 * 2048 + 16 * (32 + 16) = 231360.
    """
    stage = DEPTH * (A_COLS + B_COLS) // LINE_COLS * SWIZZLE_BYTES
    staging = MATH_WARPS * STAGED_BOXES * BOX_ROWS * SWIZZLE_BYTES
    return storage_bytes(NUM_STAGES, stage, staging, TILE_BYTES, TILE_SLOTS) + 8 * NUM_STAGES


def num_tiles(experts: int, a_cols: int, b_cols: int) -> int:
    """Tiles of a launch.

    Example:
        Experts of 130 and 256 columns: 2 * 1 each; two experts of 1024 and 2048: 2 * 8 * 8 = 128.
    """
    return experts * -(-a_cols // A_COLS) * -(-b_cols // B_COLS)


def runs_cuda(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the kernel in CUDA C++ takes a launch, which it does wherever it can run."""
    return (
        a.element_size() == 2
        and a.dtype == b.dtype == out.dtype
        and all(map(_has_map, (a, b, out)))
        and (a.shape[1], b.shape[1]) == out.shape[1:]
        and is_available(a.device)
    )


def _has_map(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and tensor.shape[-1] % ROW_STEP == 0 and tensor.is_contiguous()


def group_gemm_wgrad_cuda(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    segment_starts: Tensor,
    segment_counts: Tensor,
    ticket: Tensor,
    *,
    max_blocks: int | None = None,
) -> None:
    """Launch ``group_gemm_wgrad`` in CUDA C++, for bfloat16 or float16 and at least one row.

    Args:
        ticket: int32; the first element counts tiles and must be 0.
        max_blocks: Most blocks; ``None``: one per SM.
    """
    kernel = _kernel(a.dtype, torch.cuda.current_device())
    box = DEPTH, LINE_COLS
    maps = dict(
        a_map=segment_map(a, box), b_map=segment_map(b, box), out_map=tensor_map(out, (1, BOX_ROWS, LINE_COLS))
    )  # fmt: skip
    num_blocks = min(num_sms(a.device), num_tiles(*out.shape))
    num_blocks = num_blocks if max_blocks is None else min(num_blocks, max_blocks)
    experts, a_cols, b_cols = out.shape
    problem = WgradProblem.of(
        starts=segment_starts, counts=segment_counts, experts=experts, a_cols=a_cols, b_cols=b_cols
    )  # fmt: skip
    kernel.launch(num_blocks, [WgradArgs.of(**maps, problem=problem, counter=ticket)])


@functools.cache
def _kernel(dtype: torch.dtype, device: int) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_source(source(dtype))


def source(dtype: torch.dtype) -> CudaSource:
    """The source of the kernel of an element type."""
    element = element_of(dtype)
    return CudaSource(
        template="wgrad",
        entry=f"wgrad_{element.lower()}",
        arguments=dict(args=WgradArgs),
        types=dict(Element=element),
        constants=dict(
            NUM_STAGES=NUM_STAGES, BLOCK_K=DEPTH, LEAD=LEAD, STAGED_BOXES=STAGED_BOXES,
            BLOCK_N=DEPTH * A_COLS // LINE_COLS, MAX_TILE_ROWS=DEPTH * B_COLS // LINE_COLS,
            MMA_ROWS=B_COLS, ROW_STEP=ROW_STEP, TILE_SLOTS=TILE_SLOTS, SEGMENT_ROWS=SEGMENT_ROWS, MATH_REGISTERS=216,
            CLUSTER=1, SCALE_STEPS=1, IS_FP8=False, SHARED_BYTES=shared_bytes(),
        ),
        shared_bytes=shared_bytes(),
    )  # fmt: skip


def aot_cases() -> list[CudaCase]:
    dtypes = torch.bfloat16, torch.float16
    return [CudaCase(source(dtype), str(dtype).removeprefix("torch.")) for dtype in dtypes]
