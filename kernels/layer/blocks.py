"""Blocks of the CUDA C++ kernels of both layers: how they multiply each type, and their common arguments."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..runtime.cuda_source import INT64, POINTER, SWIZZLE_BYTES, DeviceStruct, element_of, fields
from ..runtime.recorder import EVENT_WORDS

PLAN_TILE_ROWS = 128  # rows of the plan's tiles
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


MMA = Mma(block_n=128, block_k=64, mma_rows=256, row_step=16)  # for 16 bits
FP8_MMA = Mma(block_n=256, block_k=128, mma_rows=128, row_step=64)


class Fault(DeviceStruct):
    """The record of a wait that met its deadline."""

    _fields_ = (*fields(POINTER, "record"), *fields(INT64, "timeout_ns"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVariant:
    """The constants for which a kernel of either layer is compiled."""

    weights: torch.dtype  # elements of the operands: bfloat16, float16 or float8_e4m3fn
    output: torch.dtype  # elements of the results in 16 bits, bfloat16 or float16
    world_size: int  # W
    is_dgrad: bool = False  # whether it is the layer's input gradient: fc2_dgrad, fc1_dgrad
    records: bool = False  # whether warps record what they do
    is_split: bool = False  # whether some blocks only communicate at first, and the others do not before they are done
    # elements of the experts' biases, bfloat16, float16 or float32; ``None``: there are none
    bias: torch.dtype | None = None

    @property
    def is_fp8(self) -> bool:
        return self.weights.itemsize == 1

    @property
    def mma(self) -> Mma:
        return FP8_MMA if self.is_fp8 else MMA

    @property
    def types(self) -> dict[str, str]:
        """Types of operands, of results and of biases, if there are any, by their names in ``Config``."""
        elements = self.weights, self.output, self.bias or self.output
        return dict(zip(("Element", "Output", "Bias"), map(element_of, elements), strict=True))

    def entry_of(self, name: str, suffix: str = "") -> str:
        name += "_biases" * (self.bias is not None) + suffix
        return name + "_split" * self.is_split + "_recording" * self.records

    def stage_bytes(self, tile_rows: int, scale_steps: int = 0) -> int:
        """Bytes of a stage of operands, in block FP8 with each row's scales of ``scale_steps`` steps.

        Example:
            256 rows in 16 bits: (128 + 256) * 128 = 49152.
        """
        return (self.mma.block_n + tile_rows) * SWIZZLE_BYTES + 4 * tile_rows * scale_steps

    def constants(self, **others: Any) -> dict[str, int]:
        """Numbers of ``Config``: those that both layers have, and ``others`` by their names there in small letters."""
        numbers = dict(
            **asdict(self.mma), is_fp8=self.is_fp8, plan_tile_rows=PLAN_TILE_ROWS, tile_slots=TILE_SLOTS,
            pass_cols=PASS_COLS, event_words=EVENT_WORDS.value, world_size=self.world_size, records=self.records,
            is_split=self.is_split, is_dgrad=self.is_dgrad, has_bias=self.bias is not None, **others,
        )  # fmt: skip
        return {name.upper(): value for name, value in numbers.items()}
