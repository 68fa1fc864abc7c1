"""Weight gradients in CUDA C++ (``cuda/weight_gradient.cu``): what ``group_gemm_wgrad`` does, bit for bit.

What it has and its Triton twin cannot have: a warp that only loads, and is ahead in the next tiles, and two warpgroups
of which one stores its half of a tile while the other multiplies. A tile's contraction is as long as an expert has
rows, often a thousand: its end, where Triton's tensor cores idle, comes every ten microseconds. Of an expert's last
rows only steps of 16 are multiplied, not of 64.

Blocks draw their tiles, and none waits for another.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.arguments import multiprocessors
from ..runtime.case import CudaCase
from ..runtime.cuda_text import (
    LAUNCH_REGISTERS,
    LINE,
    MOST_AT_ONCE,
    SHARED_LIMIT,
    STEP,
    WARPS,
    tile_memory_bytes,
    transposed_cuda_text,
)
from ..runtime.nvrtc import SEGMENT_ROWS, CudaKernel, compile_cubin, is_available, load_kernel, segment_map, tensor_map

NAME = "weight_gradient"
SOURCES = "hopper", "ring", "items", "weight_gradient"
NUM_THREADS = 32 * (WARPS + 4)
ITEM_BYTES = 32  # of ``Item`` of ``cuda/weight_gradient.cu``
ITEM_SLOTS = 16  # an item may have no more than a stage, and slots are more than these
LINE_COLS = LINE // 2  # columns of a line
A_COLS = 128  # columns of a of a tile
B_COLS = MOST_AT_ONCE  # and of b
TICKETS = 2  # where its ticket is among a launch's counters, behind those of communication and of items
LEAST_TILES = 132  # with fewer, blocks have one each, and it is not the ends that count
BOX_ROWS = 16  # rows of a result that a warp stores at once


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig:
    """Shape of the blocks.

    Args:
        depth: Rows of a stage, a multiple of 16.
        num_stages: Depth of the load pipeline.
        lead: Stages that the first warpgroup is ahead of the second, fewer than there are; 0: whatever comes.
        staged_boxes: Boxes of 16 rows and 64 columns that a warp stages; one item has four.
    """

    depth: int = 32
    num_stages: int = 8
    lead: int = 3
    staged_boxes: int = 2

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block.

        Returns:
            Bytes: alignment, stages with three barriers each, staging, items, draws.

        Example:
            The default: 1024 + 8 * (24576 + 24) + 8 * 2 * 2048 + 16 * (32 + 16) = 231360.
        """
        lines = self.depth * (A_COLS + B_COLS) // LINE_COLS
        staging = WARPS * self.staged_boxes * BOX_ROWS * LINE
        return tile_memory_bytes(self.num_stages, lines, staging, ITEM_BYTES, ITEM_SLOTS) + 8 * self.num_stages


def runs_cuda(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether a launch is the one in CUDA C++.

    Args:
        a: See ``group_gemm_wgrad``.
        b: See ``group_gemm_wgrad``.
        out: See ``group_gemm_wgrad``.

    Example:
        Two experts of 1024 and 2048 columns have 2 * 8 * 8 = 128 tiles, fewer than multiprocessors: not.
    """
    return num_tiles(*out.shape) >= LEAST_TILES and can_run(a, b, out)


def num_tiles(experts: int, a_cols: int, b_cols: int) -> int:
    """Tiles of a launch.

    Args:
        experts: Experts of this rank.
        a_cols: M'.
        b_cols: N'.

    Example:
        Experts of 130 and 256 columns: 2 * 1 each.
    """
    return experts * -(-a_cols // A_COLS) * -(-b_cols // B_COLS)


def can_run(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of whatever size; see ``runs_cuda``.

    Args:
        a: See ``group_gemm_wgrad``.
        b: See ``group_gemm_wgrad``.
        out: See ``group_gemm_wgrad``.
    """
    return (
        a.element_size() == 2
        and a.dtype == b.dtype == out.dtype
        and all(map(_has_map, (a, b, out)))
        and (a.shape[1], b.shape[1]) == out.shape[1:]
        and is_available(a.device)
    )


def _has_map(tensor: Tensor) -> bool:
    """Whether bulk copies can address it."""
    return tensor.data_ptr() % 16 == 0 and tensor.shape[-1] % STEP == 0 and tensor.is_contiguous()


def group_gemm_wgrad_cuda(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    segment_starts: Tensor,
    segment_counts: Tensor,
    ticket: Tensor,
    *,
    config: CudaConfig | None = None,
    max_blocks: int | None = None,
) -> None:
    """Sum of outer products over the routed rows q of each expert; see ``group_gemm_wgrad``.

    Args:
        a: ``(Q, M')`` routed rows, bfloat16 or float16; Q > 0.
        b: ``(Q, N')`` routed rows, same dtype.
        out: ``(e, M', N')`` result, same dtype.
        segment_starts: ``(e,)`` or ``(e + 1,)`` int32.
        segment_counts: ``(e,)`` int32.
        ticket: int32, the first of which is 0: from which the blocks draw.
        config: Shape of the blocks.
        max_blocks: At most so many blocks, or ``None`` for one per multiprocessor.
    """
    config = config or CudaConfig()
    kernel = _kernel(config, a.dtype, torch.cuda.current_device())
    box = config.depth, LINE_COLS
    maps = segment_map(a, box), segment_map(b, box), tensor_map(out, (1, BOX_ROWS, LINE_COLS))
    num_blocks = min(multiprocessors(a.device), num_tiles(*out.shape))
    num_blocks = num_blocks if max_blocks is None else min(num_blocks, max_blocks)
    kernel.launch(num_blocks, [*maps, segment_starts, segment_counts, *out.shape, ticket])


@functools.cache
def _kernel(config: CudaConfig, dtype: torch.dtype, device: int) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(config, dtype), NAME),
        NAME,
        num_threads=NUM_THREADS,
        cluster=1,
        shared_bytes=config.shared_bytes(),
    )


def source(config: CudaConfig, dtype: torch.dtype) -> str:
    """The CUDA text of one configuration."""
    constants = dict(
        CLUSTER=1, STAGES=config.num_stages, DEPTH=config.depth, LEAD=config.lead, STAGED_BOXES=config.staged_boxes,
        COLS=config.depth * A_COLS // LINE_COLS, MOST_ROWS=config.depth * B_COLS // LINE_COLS,
        ITEM_SLOTS=ITEM_SLOTS, SEGMENT_ROWS=SEGMENT_ROWS, MULTIPLYING_REGISTERS=216,
    )  # fmt: skip
    assert config.depth % STEP == 0
    assert config.shared_bytes() <= SHARED_LIMIT
    return transposed_cuda_text(constants, dtype, SOURCES)


def aot_cases() -> list[CudaCase]:
    """Both element types."""
    config = CudaConfig()
    return [
        CudaCase(
            name=str(dtype).removeprefix("torch."),
            kernel=f"{NAME}_cuda",
            source=source(config, dtype),
            shared_bytes=config.shared_bytes(),
            registers=LAUNCH_REGISTERS,
        )
        for dtype in (torch.bfloat16, torch.float16)
    ]
