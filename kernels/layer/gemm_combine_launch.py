"""The launch of layer 1 in CUDA C++ (``cuda/gemm_combine.cu``), whatever its elements: what host and source share."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.arguments import COMBINE_CHUNK_ROWS, MAX_PANELS, Returns, TileTable, Wire, multiprocessors
from ..runtime.cuda_text import PASS_COLS, WARPS
from ..runtime.nvrtc import CudaKernel
from ..runtime.primitives import PLACE_LAYER1, PLACE_PANEL
from ..runtime.recorder import KIND_FINAL_SUM, KIND_LAYER1_TILE, KIND_REDUCE
from .triton.combine import MULTIPROCESSORS, column_parts
from .triton.gemm_panels import PANEL_COUNTERS

NAME = "gemm_combine"

# Constants of the sources, which get them from here and from ``cuda_text``.
BLOCK_COLS = 256  # columns that count as one in panels
COMBINERS = 3  # warps that combine from the start

ITEM_BYTES = 32  # of ``Item`` of ``cuda/panels.cu``
ENTRY_BYTES = 8
SLOT_BYTES = 2 * PASS_COLS
MOST_ENTRIES = 8  # experts of a token, or ranks
NUM_THREADS = 32 * (WARPS + COMBINERS + 1)
GPU_PARTS = 8  # of an H200, within one of which a cluster lies

# To compile ahead of time: type, experts of a token, whether it records.
AOT_SHAPES = (
    (torch.bfloat16, 2, False),
    (torch.bfloat16, 8, False),
    (torch.bfloat16, 8, True),
    (torch.float16, 8, False),
)


def combiner_bytes(entries: int, ahead: int) -> int:
    """Shared memory of the warps that combine from the start.

    Args:
        entries: Most rows that a sum has.
        ahead: Rows that each has on their way.

    Example:
        8 entries, 12 rows: 3 * (32 * 8 * 8 + 12 * 512) = 24576.
    """
    return COMBINERS * (COMBINE_CHUNK_ROWS * entries * ENTRY_BYTES + ahead * SLOT_BYTES)


class Scales(ctypes.Structure):
    """``Scales`` of ``cuda/panels.cu``; zeros for elements of 16 bits."""

    _fields_ = (("rows", ctypes.c_uint64), ("weights", ctypes.c_uint64), ("routed_rows", ctypes.c_int64))


class Arguments(ctypes.Structure):
    """``Returns`` of ``cuda/combine.cu``: addresses, then integers."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "y", "landing", "out", "row_slots", "row_weights", "send_rows", "recv_counts", "landing_addresses",
            "weights_landing", "weights_landing_addresses", "weights_out", "flags", "flag_addresses", "tickets",
            "panel_counters", "num_tiles", "epoch", "fault", "timeout_ns", "events",
        )),
        *((name, ctypes.c_int32) for name in (
            "rank", "num_tokens", "max_tokens", "cols", "panels", "parts", "event_capacity",
        )),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much a launch has to do, and on how much of the GPU.

    Args:
        experts: Of this rank.
        depth: C, the contraction.
        num_panels: Column panels.
        spare_multiprocessors: See ``GemmCombineConfig``.
    """

    experts: int
    depth: int
    num_panels: int
    spare_multiprocessors: int


def launch(
    kernel: CudaKernel,
    maps: tuple[Any, Any],
    scales: Scales,
    y: Tensor,
    out: Tensor,
    wire: Wire,
    returns: Returns,
    table: TileTable,
    extent: Extent,
) -> None:
    """Launch layer 1.

    Args:
        kernel: Of ``cuda/gemm_combine.cu``.
        maps: Boxes of rows and of weights.
        scales: Of block FP8.
        y: See ``gemm_combine_cuda``.
        out: See ``gemm_combine_cuda``.
        wire: See ``gemm_combine_cuda``.
        returns: See ``gemm_combine_cuda``.
        table: See ``gemm_combine_cuda``.
        extent: What there is to do.
    """
    assert table.segments is not None
    recorder, cols, (starts, counts) = wire.recorder, out.shape[1], table.segments
    tensors = dict(
        y=y, landing=wire.rows, out=out, row_slots=returns.row_slots, send_rows=returns.send_rows,
        recv_counts=returns.recv_counts, landing_addresses=wire.row_pointers, flags=wire.flags,
        flag_addresses=wire.flag_pointers, tickets=table.counters, panel_counters=table.counters[PANEL_COUNTERS:],
        num_tiles=table.num_tiles, epoch=wire.epoch, fault=wire.fault, **_weights(returns),
    )  # fmt: skip
    if recorder is not None:
        tensors["events"] = recorder.events
    arguments = Arguments(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        timeout_ns=wire.timeout_ns,
        rank=wire.rank,
        num_tokens=out.shape[0],
        max_tokens=wire.max_tokens,
        cols=cols,
        panels=extent.num_panels,
        parts=cuda_parts(wire.max_tokens, wire.world_size, cols, extent.num_panels),
        event_capacity=0 if recorder is None else recorder.capacity,
    )
    num_multiprocessors = multiprocessors(y.device)
    num_blocks = launched_blocks(num_multiprocessors, extent.spare_multiprocessors, kernel.cluster)
    kernel.launch(num_blocks, [*maps, counts, starts, extent.experts, extent.depth, scales, arguments])


def _weights(returns: Returns) -> dict[str, Tensor]:
    """Routing weights, or their gradients and where these go, by the names of ``Arguments``."""
    grads = returns.grads
    if grads is None:
        assert returns.row_weights is not None
        return dict(row_weights=returns.row_weights)
    return dict(
        row_weights=grads.row_grads,
        weights_landing=grads.landing,
        weights_landing_addresses=grads.landing_pointers,
        weights_out=grads.out,
    )


def launched_blocks(num_multiprocessors: int, spare: int, cluster: int) -> int:
    """Blocks of a launch, of one cluster at least.

    The blocks of a cluster need multiprocessors of the same part of the GPU: where others hold some, each part may have
    one left over.

    Args:
        num_multiprocessors: Of the GPU.
        spare: Those that the launch may not use.
        cluster: Blocks of a cluster, 1 or 2.

    Example: 132 multiprocessors in pairs: 132; with 31 spare ones 132 - 31 - 8 = 93, so 92.
    """
    left_over = GPU_PARTS * (cluster - 1) if spare else 0
    return max((num_multiprocessors - spare - left_over) // cluster, 1) * cluster


def cuda_parts(max_tokens: int, world_size: int, cols: int, num_panels: int) -> int:
    """``column_parts`` of warps that combine, of whole column blocks.

    Args:
        max_tokens: M.
        world_size: W.
        cols: D.
        num_panels: Panels.

    Example:
        M=2048 and W=4 in 4 panels: D=2048 has 2 column blocks in each, so 2 parts; D=7168 4 parts. M=8192: 1 part.
    """
    widest_panel = -(-cols // (BLOCK_COLS * num_panels))
    return column_parts(max_tokens, world_size, COMBINERS * MULTIPROCESSORS, widest_panel, num_panels)


def launch_constants(top_k: int, world_size: int, records: bool, is_gradient: bool) -> dict[str, int]:
    """Constants of the launch, whatever its elements and blocks.

    Args:
        top_k: K.
        world_size: W.
        records: Whether warps record what they do.
        is_gradient: Of layer 0's tokens, instead of layer 1's outputs.
    """
    return dict(
        TOP_K=top_k, WORLD=world_size, RECORDS=int(records), IS_GRADIENT=int(is_gradient), BLOCK_COLS=BLOCK_COLS,
        COMBINERS=COMBINERS, CHUNK=COMBINE_CHUNK_ROWS, MAX_PANELS=MAX_PANELS, PLACE_PANEL=PLACE_PANEL.value,
        PLACE_LAYER1=PLACE_LAYER1.value, KIND_LAYER1_TILE=KIND_LAYER1_TILE.value, KIND_REDUCE=KIND_REDUCE.value,
        KIND_FINAL_SUM=KIND_FINAL_SUM.value,
    )  # fmt: skip
