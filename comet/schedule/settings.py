"""How the pieces of one layer are launched: the split and, from the dependency analysis, the order of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from comet.config import DIM_MULTIPLE, MoEConfig, OverlapConfig
from comet.kernels.layer.settings import LaunchSettings, TileShape
from comet.kernels.runtime.limits import MAX_PANELS
from comet.layout import ExpertLayout, round_up
from comet.schedule.dependency import TileAxis, pipelines

GPU_TILE_ROWS, CPU_TILE_ROWS = 128, 16


def tile_rows(device: torch.device) -> int:
    """Rows of a GEMM tile: 128 on a GPU, 16 on a CPU, whose interpreter takes as long for padding as for rows."""
    return CPU_TILE_ROWS if device.type == "cpu" else GPU_TILE_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSettings(LaunchSettings):
    """The launch settings of one layer.

    The dependency analysis cuts layer 0 and hidden's gradient along tile rows: they go phase by phase, in the order of
    the plan's tiles. It cuts layer 1 and the tokens' gradient along tile columns: they go column panel by column panel,
    with all tiles of all experts in each. ``kernels/gemm/tiles.py`` computes the order.
    """

    # Whether all ranks have layer 1 and the tokens' gradients in CUDA C++; ranks may differ in the other kernels.
    cuda_kernels: bool = True

    @classmethod
    def create(cls, moe: MoEConfig, layout: ExpertLayout, overlap: OverlapConfig, dtype: torch.dtype) -> Self:
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
