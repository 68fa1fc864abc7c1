"""Layer 0's forward pass in CUDA C++ (``cuda/``): what ``dispatch_gemm`` does, bit for bit, in one launch.

What it has and its Triton twin cannot have: warps that only load, pieces of rows of equal height in the place of tiles
of 128, and a warp in every block that pushes rows, eight at a time: the first rows arrive after microseconds, and no
block is kept from multiplying. Blocks draw their items, so that those that need the same weights read them together.

Why it ends: pushing warps wait for nobody, so every flag is raised, in whatever order blocks run.
"""

import ctypes
import functools
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..runtime.arguments import CHUNK_ROWS, TileTable, Wire, multiprocessors
from ..runtime.case import CudaCase
from ..runtime.cuda_text import COLS, LAUNCH_REGISTERS, LINE, SHARED_LIMIT, TILE_ROWS, WARPS, cuda_text, memory_bytes
from ..runtime.nvrtc import CudaKernel, compile_cubin, is_available, load_kernel, tensor_map
from ..runtime.primitives import PLACE_LAYER0
from ..runtime.recorder import KIND_DISPATCH, KIND_LAYER0_TILE
from .triton.dispatch import Sends

NAME = "dispatch_gemm"
SOURCES = (
    "hopper", "recorder", "signals", "ring", "items", "products", "gather", "swiglu", "gather_gemm",
    "multiply_items", "push", "dispatch_gemm",
)  # fmt: skip
LOADERS = 3  # warps that load; one more pushes
NUM_THREADS = 32 * (WARPS + LOADERS + 1)
ITEM_BYTES = 48  # of ``Item`` of ``cuda/gather.cu``
# Of the tokens of a rank with one expert; with fewer the launch is too short to tell.
LEAST_PRODUCTS = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig:
    """Shape of the blocks, as measured best on an H200.

    Args:
        most_rows: Most rows of a piece that has all rows of its expert; others have up to ``MOST_AT_ONCE``.
        num_stages: Depth of the load pipeline.
        staged_rows: Rows of a result that are stored at once, a multiple of 32 that divides ``most_rows``.
        push_rows: Rows of a pushing warp's ticket, a divisor of 128.
    """

    most_rows: int = 288
    num_stages: int = 4
    staged_rows: int = 32
    push_rows: int = 8

    def shared_bytes(self, num_experts: int) -> int:
        """Dynamic shared memory of a block.

        Args:
            num_experts: Experts of this rank.

        Returns:
            Bytes: alignment, stages, staging, barriers, items, draws, the table of pieces.

        Example:
            32 experts: 1024 + 4 * 53248 + 2 * 2048 + 64 + 512 + 4 * 97 = 219076.
        """
        memory = memory_bytes(self.num_stages, self.most_rows, 2 * self.staged_rows * COLS // 2, ITEM_BYTES)
        return memory + 4 * (3 * num_experts + 1)


class _Fault(ctypes.Structure):
    _fields_ = (("record", ctypes.c_uint64), ("timeout_ns", ctypes.c_uint64))


class Results(ctypes.Structure):
    """``Results`` of ``cuda/gather_gemm.cu``."""

    _fields_ = (("hidden", ctypes.c_uint64), ("pre", ctypes.c_uint64))


class _Sends(ctypes.Structure):
    """``Sends`` of ``cuda/push.cu``: addresses, then integers."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "x", "token_ids", "counts", "row_addresses", "flag_addresses", "tickets", "pushed", "epoch", "events",
        )),
        *((name, ctypes.c_int32) for name in ("rank", "max_tokens", "cols", "event_capacity")),
    )  # fmt: skip


def takes(max_tokens: int, experts: int, double_f: int, depth: int, itemsize: int, block_rows: int) -> bool:
    """Whether a launch of this size is one for CUDA C++, on a GPU that has it and where ranks push their rows.

    Args:
        max_tokens: M.
        experts: Experts of this rank.
        double_f: 2F of this rank.
        depth: D.
        itemsize: Bytes of an element.
        block_rows: Rows of the plan's tiles.

    Example:
        M=512, 2F=1536 and D=2048 are 1.6e9 products: taken, if in 16 bits; M=256 not.
    """
    return _is_large(max_tokens, double_f, depth) and _fits(experts, double_f, depth, itemsize, block_rows)


def _is_large(max_tokens: int, double_f: int, depth: int) -> bool:
    return max_tokens * double_f * depth >= LEAST_PRODUCTS


def _fits(experts: int, double_f: int, depth: int, itemsize: int, block_rows: int) -> bool:
    return (
        itemsize == 2
        and double_f % 16 == 0
        and depth % 8 == 0
        and block_rows == TILE_ROWS
        and CudaConfig().shared_bytes(experts) <= SHARED_LIMIT
    )


def runs_cuda(x: Tensor, w1: Tensor, wire: Wire, sends: Sends, table: TileTable) -> bool:
    """Whether a launch is the one in CUDA C++; ranks may differ in it, for they see the same flags from either.

    Args:
        x: This rank's tokens.
        w1: ``(e, 2F, D)`` weights.
        wire: See ``dispatch_gemm``.
        sends: See ``dispatch_gemm``.
        table: See ``dispatch_gemm``.
    """
    return _is_large(wire.max_tokens, *w1.shape[1:]) and can_run(x, w1, sends, table)


def can_run(x: Tensor, w1: Tensor, sends: Sends, table: TileTable) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of whatever size; see ``runs_cuda``."""
    return (
        _fits(*w1.shape, x.element_size(), table.block_rows) and table.segments is not None and is_available(x.device)
    )


def dispatch_gemm_cuda(
    x: Tensor,
    w1: Tensor,
    hidden: Tensor,
    pre: Tensor | None,
    wire: Wire,
    sends: Sends,
    table: TileTable,
    config: CudaConfig | None = None,
) -> None:
    """Send this rank's rows, receive the others', and compute hidden = silu(x w_gate) * (x w_up) for all routed rows.

    Args:
        x: ``(T, D)`` this rank's tokens, bfloat16 or float16.
        w1: ``(e, 2F, D)`` gate rows, then up rows, same dtype.
        hidden: ``(Q, F)`` result; rows of no expert are undefined.
        pre: ``(Q, 2F)`` receives gate | up for the backward pass, or ``None``.
        wire: Receive rows and flags.
        sends: Send lists.
        table: Segments, tiles by phase, and where each routed row arrives.
        config: Shape of the blocks.
    """
    config = config or CudaConfig()
    experts, double_f, depth = w1.shape
    kernel = _kernel(
        config, x.dtype, experts, wire.world_size, pre is not None, wire.recorder is not None,
        torch.cuda.current_device(),
    )  # fmt: skip
    results = Results(hidden=hidden.data_ptr(), pre=0 if pre is None else pre.data_ptr())
    launch(kernel, gate_up_map(w1, COLS), x, results, wire, sends, table, (experts, depth, double_f // 2))


def gate_up_map(w1: Tensor, cols: int) -> Any:
    """Descriptor of w1 for bulk copies of eight gate rows, the eight up rows that go with them, and so on.

    Args:
        w1: ``(e, 2F, D)`` gate rows, then up rows.
        cols: Rows of a copy, half of them gate rows.
    """
    experts, double_f, depth = w1.shape
    eights = w1.view(experts, 2, double_f // 16, 8, depth).transpose(1, 2)
    return tensor_map(eights, (1, cols // 16, 2, 8, LINE // w1.itemsize))


def launch(
    kernel: CudaKernel,
    weights_map: Any,
    x: Tensor,
    results: ctypes.Structure,
    wire: Wire,
    sends: Sends,
    table: TileTable,
    sizes: tuple[int, int, int],
) -> None:
    """Launch layer 0 on all multiprocessors.

    Args:
        kernel: Of ``cuda/dispatch_gemm.cu``.
        weights_map: See ``gate_up_map``.
        x: ``(T, ..)`` what travels of this rank's tokens, in rows of 16-bit words.
        results: What the kernel calls ``Results``.
        wire: See ``dispatch_gemm_cuda``.
        sends: See ``dispatch_gemm_cuda``.
        table: See ``dispatch_gemm_cuda``.
        sizes: e, D, F.
    """
    assert table.segments is not None
    recorder, (starts, counts) = wire.recorder, table.segments
    tensors = dict(
        x=x, token_ids=sends.token_ids, counts=sends.counts, row_addresses=wire.row_pointers,
        flag_addresses=wire.flag_pointers, tickets=table.counters, pushed=sends.pushed, epoch=wire.epoch,
    )  # fmt: skip
    if recorder is not None:
        tensors["events"] = recorder.events
    arguments = _Sends(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        rank=wire.rank,
        max_tokens=wire.max_tokens,
        cols=x.shape[1],
        event_capacity=0 if recorder is None else recorder.capacity,
    )
    tables = wire.rows, counts, starts, table.tiles, table.num_tiles, table.row_ids, wire.flags
    fault = _Fault(record=wire.fault.data_ptr(), timeout_ns=wire.timeout_ns)
    num_blocks = multiprocessors(x.device)
    kernel.launch(num_blocks, [weights_map, *tables, *sizes, results, fault, arguments])


@functools.cache
def _kernel(
    config: CudaConfig, dtype: torch.dtype, experts: int, world_size: int, saves_pre: bool, records: bool, device: int
) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_kernel(
        compile_cubin(source(config, dtype, world_size, saves_pre, records), NAME),
        NAME,
        num_threads=NUM_THREADS,
        cluster=1,
        shared_bytes=config.shared_bytes(experts),
    )


def source(config: CudaConfig, dtype: torch.dtype, world_size: int, saves_pre: bool, records: bool) -> str:
    """The CUDA text of one configuration."""
    constants = launch_constants(world_size, config.push_rows, config.num_stages, records) | dict(
        FENCED_BY_LOADERS=0,
        FENCED_BY_MULTIPLIERS=1,  # whose rows are what threads wrote
        STAGED_ROWS=config.staged_rows,
        PUSH_BATCH=16,
        SAVES_PRE=int(saves_pre),
        MULTIPLYING_REGISTERS=176 if records else 184,  # recording takes registers of the warps that load
    )
    return cuda_text(constants, dtype, SOURCES, config.most_rows)


def launch_constants(
    world_size: int, push_rows: int, num_stages: int, records: bool, *, is_gradient: bool = False
) -> dict[str, int]:
    """Constants of the launch, whatever its elements.

    Args:
        world_size: W.
        push_rows: See ``CudaConfig``.
        num_stages: See ``CudaConfig``.
        records: Whether warps record what they do.
        is_gradient: Whether hidden's gradient is computed, and not hidden.
    """
    return dict(
        CLUSTER=1, STAGES=num_stages, PUSH_ROWS=push_rows, WORLD=world_size, RECORDS=int(records),
        LOADERS=LOADERS, CHUNK=CHUNK_ROWS, PLACE_LAYER0=PLACE_LAYER0.value, KIND_LAYER0_TILE=KIND_LAYER0_TILE.value,
        KIND_DISPATCH=KIND_DISPATCH.value, IS_GRADIENT=int(is_gradient),
    )  # fmt: skip


def aot_cases() -> list[CudaCase]:
    """Inference and training, each with recording, and training in float16."""
    shapes = [
        *product([torch.bfloat16], [False, True], [False, True]),
        (torch.float16, True, False),
        (torch.float16, True, True),
    ]
    config, ranks, experts = CudaConfig(), 4, 64
    return [
        CudaCase(
            name=f"{str(dtype).removeprefix('torch.')}, {'training' if saves_pre else 'inference'}"
            f"{', recording' if records else ''}",
            kernel=f"{NAME}_cuda",
            source=source(config, dtype, ranks, saves_pre, records),
            shared_bytes=config.shared_bytes(experts),
            # Once per item, of a layer that is looked at and not timed.
            spilled_bytes=160 if dtype == torch.float16 and records else 0,
            registers=LAUNCH_REGISTERS,
        )
        for dtype, saves_pre, records in shapes
    ]
