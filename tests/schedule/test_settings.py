"""Tile shapes and schedules of a layer: worked examples and narrow matrices."""

from __future__ import annotations

import pytest
import torch

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.runtime.limits import MAX_PANELS
from comet.layout import ExpertLayout
from comet.schedule.settings import LayerSettings, TileShape


def create(dtype: torch.dtype = torch.bfloat16, tp: int = 1, **changes) -> LayerSettings:
    moe = MoEConfig(**({"hidden_size": 512, "ffn_size": 768, "num_experts": 8, "top_k": 2} | changes))
    overlap = OverlapConfig(comm_blocks=5, num_panels=4)
    return LayerSettings.create(moe, ExpertLayout.create(moe, ParallelConfig(ep=2, tp=tp), 0), overlap, dtype)


def blocks(tile: TileShape) -> tuple[int, int, int]:
    return tile.block_f, tile.block_n, tile.block_k


def test_worked_example_of_tile_shapes() -> None:
    assert blocks(TileShape.select(torch.bfloat16, hidden_size=2048, ffn_size=768)) == (128, 256, 64)
    assert blocks(TileShape.select(torch.bfloat16, hidden_size=64, ffn_size=48)) == (64, 64, 64)


def test_float32_has_small_tiles_and_a_shallow_pipeline() -> None:
    assert TileShape.select(torch.float32, 2048, 768) == TileShape(block_f=16, block_n=64, block_k=16, num_stages=2)
    assert TileShape.select(torch.float16, 2048, 768) == TileShape.select(torch.bfloat16, 2048, 768)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [16, 48, 80, 256, 7168])
@pytest.mark.parametrize("ffn_size", [16, 48, 112, 14336])
def test_tiles_are_powers_of_two_less_than_twice_the_matrix(
    dtype: torch.dtype, hidden_size: int, ffn_size: int
) -> None:
    tile = TileShape.select(dtype, hidden_size, ffn_size)
    bounds = (ffn_size, hidden_size, min(hidden_size, ffn_size))
    for block, bound in zip(blocks(tile), bounds, strict=True):
        assert block & (block - 1) == 0
        assert 16 <= block < 2 * bound


def test_worked_example_of_layer_settings() -> None:
    settings = create(tp=2)
    assert (settings.num_panels, settings.tile.block_f, settings.tile.block_n) == (2, 128, 256)
    assert settings.comm_blocks == 5


def test_panels_never_outnumber_their_flags() -> None:
    moe = MoEConfig(hidden_size=16384, ffn_size=64, num_experts=2, top_k=1)
    place = ExpertLayout.create(moe, ParallelConfig(ep=1), 0)
    settings = LayerSettings.create(moe, place, OverlapConfig(num_panels=1000), torch.bfloat16)
    assert settings.num_panels == MAX_PANELS
