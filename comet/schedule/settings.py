"""How the pieces of one layer are launched: the split and, from the dependency analysis, the order of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comet.config import DIM_MULTIPLE, MoEConfig, OverlapConfig
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.kernels.runtime.limits import MAX_PANELS
from comet.layout import ExpertLayout, round_up
from comet.schedule.dependency import TileAxis, pipelines

GPU_TILE_ROWS, CPU_TILE_ROWS = 128, 16


def tile_rows(device: torch.device) -> int:
    """Rows of a GEMM tile: 128 on a GPU, 16 on a CPU, whose interpreter takes as long for padding as for rows."""
    return CPU_TILE_ROWS if device.type == "cpu" else GPU_TILE_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class TileShape:
    """GEMM tile of the fused kernels for one element type."""

    block_f: int  # hidden columns of a layer-0 tile (its GEMM tile is gate and up, twice as wide)
    block_n: int  # output columns of a layer-1 tile
    block_k: int  # contraction step
    num_stages: int  # depth of the load pipeline

    @classmethod
    def select(cls, dtype: torch.dtype, hidden_size: int, ffn_size: int) -> TileShape:
        """The measured default, narrowed to the matrix.

        128 x 256 x 64 in 16 bits; 16 x 64 x 16 in 32, as IEEE float32 has no tensor cores.

        Example: bfloat16, D=2048, F=768: 128, 256, 64; bfloat16, D=64, F=48: 64, 64, 64.
        """
        wide = dtype != torch.float32
        block_f, block_n, block_k, num_stages = (128, 256, 64, 3) if wide else (16, 64, 16, 2)
        return cls(
            block_f=min(block_f, _power_of_2(ffn_size)),
            block_n=min(block_n, _power_of_2(hidden_size)),
            block_k=min(block_k, _power_of_2(min(hidden_size, ffn_size))),
            num_stages=num_stages,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSettings:
    """Everything but the tensors that the launches of one layer share.

    What the dependency analysis cuts along tile rows, layer 0 and hidden's gradient, goes phase by phase, as the plan's
    tiles lie; what it cuts along tile columns, layer 1 and the tokens' gradient, goes column panel by column panel, all
    tiles of all experts in each. ``kernels/gemm/tiles.py`` is the order.
    """

    comm_blocks: int  # thread blocks that only communicate at first; 0: communication is colocated with compute
    tile: TileShape  # GEMM tile shape
    num_panels: int  # column panels of layer 1 and of the tokens' gradient
    # whether all ranks have the kernels of layer 1 and of the tokens' gradients in CUDA C++; others may differ between
    # them
    cuda_kernels: bool = True
    reserved_sms: int = 0  # how many layer 1 leaves to other kernels
    activation: Activation = SWIGLU  # of the experts

    @classmethod
    def create(cls, moe: MoEConfig, layout: ExpertLayout, overlap: OverlapConfig, dtype: torch.dtype) -> LayerSettings:
        """Analyse the pipelines and cut them for one layer shape.

        A panel is at least one column block: with fewer column blocks than ``overlap.num_panels`` there are as many
        panels as column blocks.

        Example: bfloat16, D=512, F=768, TP=2, ``num_panels=4``: the 512 output columns of layer 1 are 2 column blocks
        of 256, so 2 panels.
        """
        tile = TileShape.select(dtype, moe.hidden_size, round_up(moe.ffn_size // layout.tp, DIM_MULTIPLE))
        num_panels = min(overlap.num_panels, -(-moe.hidden_size // tile.block_n), MAX_PANELS)
        found = pipelines()
        if not all(found[name].tile_axis is TileAxis.COLUMNS for name in ("layer1", "layer0_backward")):
            num_panels = 1
        return cls(comm_blocks=overlap.comm_blocks, tile=tile, num_panels=num_panels, activation=moe.activation)


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
