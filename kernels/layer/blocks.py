"""Blocks of the kernels in CUDA C++ of both layers: how they multiply elements of each type, and what both are told."""

from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.cuda_source import INT64, POINTER, SWIZZLE_BYTES, DeviceStruct, element_of, fields
from ..runtime.recorder import EVENT_WORDS

PLAN_TILE_ROWS = 128  # of the plan's tiles
TILE_SLOTS = 8  # tiles that the producer can be ahead, and more
PASS_COLS = 256  # columns that a communicating warp has at a time: 16 bytes per lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Mma:
    """How blocks multiply elements of a type."""

    block_n: int  # rows of a weight per block
    block_k: int  # elements of the contraction per stage: a line of ``SWIZZLE_BYTES``
    # most routed rows that one instruction, or in block FP8 both warpgroups, take: what an expert's rows are cut to
    mma_rows: int
    row_step: int  # rows come in steps of so many


MMA = Mma(block_n=128, block_k=64, mma_rows=256, row_step=16)  # of 16 bits
FP8_MMA = Mma(block_n=256, block_k=128, mma_rows=128, row_step=64)


class Fault(DeviceStruct):
    """Where a wait that met its deadline is recorded."""

    _fields_ = (*fields(POINTER, "record"), *fields(INT64, "timeout_ns"))


def stage_bytes(mma: Mma, tile_rows: int, scale_steps: int = 0) -> int:
    """Bytes of a stage of operands, in block FP8 with each row's scales of ``scale_steps`` steps.

    Example:
        256 rows in 16 bits: (128 + 256) * 128 = 49152.
    """
    return (mma.block_n + tile_rows) * SWIZZLE_BYTES + 4 * tile_rows * scale_steps


def config_types(weights: torch.dtype, output: torch.dtype, bias: torch.dtype | None = None) -> dict[str, str]:
    """Types of operands, of results and of biases, if there are any, by their names in ``Config``."""
    return dict(Element=element_of(weights), Output=element_of(output), Bias=element_of(bias or output))


def config_constants(mma: Mma, **others: Any) -> dict[str, int]:
    """Numbers of ``Config`` that both layers have, and ``others`` by their names there in small letters."""
    numbers = dict(
        block_n=mma.block_n,
        block_k=mma.block_k,
        mma_rows=mma.mma_rows,
        row_step=mma.row_step,
        is_fp8=mma is FP8_MMA,
        plan_tile_rows=PLAN_TILE_ROWS,
        tile_slots=TILE_SLOTS,
        pass_cols=PASS_COLS,
        event_words=EVENT_WORDS.value,
        **others,
    )
    return {name.upper(): value for name, value in numbers.items()}
