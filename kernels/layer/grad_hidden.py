"""Hidden's gradient in CUDA C++: what ``grad_hidden`` does, bit for bit, in the launch of ``dispatch_gemm_cuda``.

Gradients of the output travel as tokens do in layer 0, and weights are read along their columns, as they lie.
"""

import ctypes
import functools
from itertools import product

import torch
from torch import Tensor

from ..runtime.arguments import TileTable, Wire
from ..runtime.case import CudaCase
from ..runtime.cuda_text import DEPTH, LAUNCH_REGISTERS, LINE, SHARED_LIMIT, TILE_ROWS, cuda_text, memory_bytes
from ..runtime.nvrtc import CudaKernel, compile_cubin, is_available, load_kernel, tensor_map
from .dispatch_gemm import ITEM_BYTES, NAME, NUM_THREADS, launch, launch_constants
from .triton.dispatch import Sends

SOURCES = (
    "hopper", "recorder", "signals", "ring", "items", "products", "gather", "store_rows", "grad_hidden",
    "multiply_items", "push", "dispatch_gemm",
)  # fmt: skip
MOST_ROWS = 288  # of a piece that has all rows of its expert, as in layer 0
NUM_STAGES = 4
STAGED_ROWS = 32  # that are stored at once
PUSH_ROWS = 8
LEAST_PRODUCTS = 1_000_000_000  # of the tokens of a rank with one expert, as in layer 0
# A rank alone hides no more than a copy of its rows, and this GEMM is 1 to 5 % slower than Triton's over rows in order
# from so many products on (benchmarks/results/backward_kernels.md).
MOST_PRODUCTS_ALONE = 100_000_000_000


class Results(ctypes.Structure):
    """``Results`` of ``cuda/grad_hidden.cu``."""

    _fields_ = (("grad_hidden", ctypes.c_uint64),)


def shared_bytes(num_experts: int) -> int:
    """Dynamic shared memory of a block.

    Args:
        num_experts: Experts of this rank.

    Returns:
        Bytes: alignment, stages, staging, barriers, items, draws, the table of pieces.

    Example:
        32 experts: 1024 + 4 * 53248 + 2 * 4096 + 64 + 512 + 4 * 97 = 223172.
    """
    return memory_bytes(NUM_STAGES, MOST_ROWS, 2 * STAGED_ROWS * LINE, ITEM_BYTES) + 4 * (3 * num_experts + 1)


def runs_cuda(grad_y: Tensor, w2: Tensor, wire: Wire, sends: Sends, table: TileTable) -> bool:
    """Whether a launch is the one in CUDA C++; ranks may differ in it, for they see the same flags from either.

    Args:
        grad_y: Gradients of this rank's outputs.
        w2: ``(e, D, F)`` weights.
        wire: See ``grad_hidden``.
        sends: See ``grad_hidden``.
        table: See ``grad_hidden``.

    Example:
        M=1024, D=2048 and F=768, 1.6e9 products, are taken, if in 16 bits; M=512 not; M=65536 of several ranks only.
    """
    products = wire.max_tokens * w2[0].numel()
    is_fit = products >= LEAST_PRODUCTS and (wire.world_size > 1 or products < MOST_PRODUCTS_ALONE)
    return is_fit and can_run(grad_y, w2, sends, table)


def can_run(grad_y: Tensor, w2: Tensor, sends: Sends, table: TileTable) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of whatever size; see ``runs_cuda``."""
    experts, depth, ffn = w2.shape
    return (
        grad_y.element_size() == 2
        and depth % 8 == 0
        and ffn % 8 == 0
        and table.block_rows == TILE_ROWS
        and shared_bytes(experts) <= SHARED_LIMIT
        and table.segments is not None
        and is_available(grad_y.device)
    )


def grad_hidden_cuda(grad_y: Tensor, w2: Tensor, out: Tensor, wire: Wire, sends: Sends, table: TileTable) -> None:
    """Send this rank's gradients, receive the others', and multiply those of all routed rows by their expert's w2.

    Args:
        grad_y: ``(T, D)`` gradients of this rank's outputs, bfloat16 or float16.
        w2: ``(e, D, F)``, same dtype.
        out: ``(Q, F)`` result; rows of no expert are undefined.
        wire: Receive rows, which hold the others' gradients afterwards and not this rank's own, and flags.
        sends: Send lists.
        table: Segments, tiles by phase, and where each routed row arrives.
    """
    experts, depth, ffn = w2.shape
    records, device = wire.recorder is not None, torch.cuda.current_device()
    kernel = _kernel(grad_y.dtype, experts, wire.world_size, records, device)
    weights_map = tensor_map(w2, (1, DEPTH, LINE // w2.itemsize))
    launch(kernel, weights_map, grad_y, Results(out.data_ptr()), wire, sends, table, (experts, depth, ffn))


@functools.cache
def _kernel(dtype: torch.dtype, experts: int, world_size: int, records: bool, device: int) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(dtype, world_size, records), NAME),
        NAME,
        num_threads=NUM_THREADS,
        cluster=1,
        shared_bytes=shared_bytes(experts),
    )


def source(dtype: torch.dtype, world_size: int, records: bool) -> str:
    """The CUDA text of one configuration."""
    constants = launch_constants(world_size, PUSH_ROWS, NUM_STAGES, records, is_gradient=True) | dict(
        FENCED_BY_LOADERS=0, FENCED_BY_MULTIPLIERS=1, STAGED_ROWS=STAGED_ROWS, PUSH_BATCH=16,
        MULTIPLYING_REGISTERS=176 if records else 184,  # as in layer 0
    )  # fmt: skip
    return cuda_text(constants, dtype, SOURCES, MOST_ROWS)


def aot_cases() -> list[CudaCase]:
    """In both types, with and without recording."""
    ranks, experts = 4, 64
    return [
        CudaCase(
            name=f"{str(dtype).removeprefix('torch.')}, gradients{', recording' if records else ''}",
            kernel=f"{NAME}_cuda",
            source=source(dtype, ranks, records),
            shared_bytes=shared_bytes(experts),
            registers=LAUNCH_REGISTERS,
        )
        for dtype, records in product([torch.bfloat16, torch.float16], [False, True])
    ]
