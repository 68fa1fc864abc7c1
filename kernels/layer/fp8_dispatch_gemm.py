"""Layer 0 in block FP8 in CUDA C++: what ``fp8_dispatch_gemm`` does, in the launch of ``dispatch_gemm_cuda``.

A block multiplies pieces of up to 128 routed rows with 128 columns of gate and of up. Each of its two multiplying
warpgroups adds up the products of a step, scaled, while the tensor cores work for the other.
"""

import ctypes
import functools

import torch

from ..runtime.arguments import Scaled, TileTable, Wire
from ..runtime.case import CudaCase
from ..runtime.cuda_text import (
    FP8_COLS,
    FP8_STEP,
    LAUNCH_REGISTERS,
    SHARED_LIMIT,
    TILE_ROWS,
    fp8_cuda_text,
    fp8_memory_bytes,
)
from ..runtime.nvrtc import CudaKernel, compile_cubin, is_available, load_kernel
from .dispatch_gemm import ITEM_BYTES, NAME, NUM_THREADS, gate_up_map, launch, launch_constants
from .triton.dispatch import Sends

SOURCES = (
    "hopper", "recorder", "signals", "ring", "items", "fp8_products", "gather", "swiglu", "fp8_gather_gemm", "push",
    "dispatch_gemm",
)  # fmt: skip
NUM_STAGES = 4
SCALE_STEPS = 4  # a row's scales of so many steps are loaded together: four bytes at a time cost 6.5 % of the launch
PUSH_ROWS = 8
MAXIMA_BYTES = 2 * 2 * FP8_STEP * 4  # the largest of each of 64 rows, of two warpgroups and of two items in turn


class Results(ctypes.Structure):
    """``Results`` of ``cuda/fp8_gather_gemm.cu``."""

    _fields_ = (
        ("hidden", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("weight_scales", ctypes.c_uint64),
        ("routed_rows", ctypes.c_int64),
    )


def shared_bytes(num_experts: int) -> int:
    """Dynamic shared memory of a block.

    Args:
        num_experts: Experts of this rank.

    Returns:
        Bytes: alignment, stages, their scales, the largest of rows, barriers, items, draws, the table of pieces.

    Example:
        32 experts: 1024 + 4 * 49152 + 4 * 2048 + 1024 + 64 + 512 + 4 * 97 = 207812.
    """
    return fp8_memory_bytes(NUM_STAGES, SCALE_STEPS, MAXIMA_BYTES, ITEM_BYTES) + 4 * (3 * num_experts + 1)


def runs_cuda(w1: Scaled, wire: Wire, sends: Sends, table: TileTable) -> bool:
    """Whether a launch is the one in CUDA C++; ranks may differ in it, for they see the same flags from either.

    Args:
        w1: ``(e, 2F, D)`` weights.
        wire: See ``fp8_dispatch_gemm``.
        sends: See ``fp8_dispatch_gemm``.
        table: See ``fp8_dispatch_gemm``.
    """
    return (
        table.block_rows == TILE_ROWS
        and shared_bytes(len(w1.elements)) <= SHARED_LIMIT
        and table.segments is not None
        and is_available(wire.rows.device)
    )


def fp8_dispatch_gemm_cuda(w1: Scaled, hidden: Scaled, wire: Wire, sends: Sends, table: TileTable) -> None:
    """Send this rank's packed rows, receive the others', and compute hidden, quantised; see ``fp8_dispatch_gemm``.

    Args:
        w1: ``(e, 2F, D)``, gate rows, then up rows; scales ``(e, 2F / 128, D / 128)``.
        hidden: ``(Q, F)`` with scales ``(F / 128, Q)``, results; rows of no expert are left alone.
        wire: Packed rows ``(R, ..)`` int32, of which this rank's own are there, and flags.
        sends: Send lists.
        table: Segments, tiles by phase, and where each routed row arrives.
    """
    experts, double_f, depth = w1.elements.shape
    kernel = _kernel(experts, wire.world_size, wire.recorder is not None, torch.cuda.current_device())
    weights_map = gate_up_map(w1.elements, FP8_COLS)
    results = Results(
        hidden=hidden.elements.data_ptr(),
        scales=hidden.scales.data_ptr(),
        weight_scales=w1.scales.data_ptr(),
        routed_rows=hidden.elements.shape[0],
    )
    own = wire.rows[wire.rank * wire.max_tokens :].view(torch.int16)
    launch(kernel, weights_map, own, results, wire, sends, table, (experts, depth, double_f // 2))


@functools.cache
def _kernel(experts: int, world_size: int, records: bool, device: int) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(world_size, records), NAME),
        NAME,
        num_threads=NUM_THREADS,
        cluster=1,
        shared_bytes=shared_bytes(experts),
    )


def source(world_size: int, records: bool) -> str:
    """The CUDA text of one configuration."""
    constants = launch_constants(world_size, PUSH_ROWS, NUM_STAGES, records) | dict(
        MULTIPLYING_REGISTERS=208, PUSH_BATCH=8, FENCED_BY_LOADERS=1, SCALE_STEPS=SCALE_STEPS
    )
    return fp8_cuda_text(constants, torch.bfloat16, SOURCES)


def aot_cases() -> list[CudaCase]:
    """With and without recording."""
    ranks, experts = 4, 64
    return [
        CudaCase(
            name=f"{ranks} ranks{', recording' if records else ''}",
            kernel=f"fp8_{NAME}_cuda",
            source=source(ranks, records),
            shared_bytes=shared_bytes(experts),
            spilled_bytes=16 if records else 0,  # of the warps that load, once per item
            registers=LAUNCH_REGISTERS,
        )
        for records in (False, True)
    ]
