"""How a layer is cut: tile shapes, and the order of work, every item once, as the device functions compute it."""

import random

import pytest
import torch
import triton
import triton.language as tl
from ranks import run_ranks
from tile_orders import by_columns, by_rows

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.gemm import tiles
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


# ---- the order of work -----------------------------------------------------------------------------------------------


NUM_GEOMETRIES = 60

Geometry = tuple[int, int, int, int]  # tiles, columns, group tiles, panels


def random_geometries(seed: int) -> list[Geometry]:
    """Geometries that often have no tile or one."""
    print(f"seed={seed}")
    source = random.Random(seed)
    cases = []
    for _ in range(NUM_GEOMETRIES):
        num_cols = source.randint(1, 12)
        num_tiles = source.choice([0, 1, source.randint(2, 30)])
        cases.append((num_tiles, num_cols, source.randint(1, 9), source.randint(1, num_cols)))
    return cases


@triton.jit
def rows_kernel(out_ptr, num_tiles, num_cols, GROUP_TILES: tl.constexpr):
    item = tl.program_id(0)
    tile, column = tiles.decode_tokens(item, num_tiles, num_cols, GROUP_TILES)
    tl.store(out_ptr + item * 2, tile)
    tl.store(out_ptr + item * 2 + 1, column)


@triton.jit
def columns_kernel(out_ptr, num_tiles, num_cols, num_panels, GROUP_TILES: tl.constexpr):
    item = tl.program_id(0)
    tile, column, panel = tiles.decode_columns(item, num_tiles, num_cols, num_panels, GROUP_TILES)
    tl.store(out_ptr + item * 3, tile)
    tl.store(out_ptr + item * 3 + 1, column)
    tl.store(out_ptr + item * 3 + 2, panel)


def device_orders(_rank: int, _world_size: int, geometries: list[Geometry]) -> tuple[list[list], list[list]]:
    """Run in a child process, where the kernels above are interpreted."""
    rows, columns = [], []
    for num_tiles, num_cols, group, panels in geometries:
        num_items = num_tiles * num_cols
        rows.append(torch.full((num_items, 2), -1, dtype=torch.int32))
        columns.append(torch.full((num_items, 3), -1, dtype=torch.int32))
        if num_items:
            rows_kernel[(num_items,)](rows[-1], num_tiles, num_cols, group)
            columns_kernel[(num_items,)](columns[-1], num_tiles, num_cols, panels, group)
    return [order.tolist() for order in rows], [order.tolist() for order in columns]


def test_device_functions_compute_the_same_order() -> None:
    geometries = [*random_geometries(7)[:40], (1, 1, 1, 1), (0, 3, 2, 2), (17, 12, 8, 5)]
    ((rows, columns),) = run_ranks(device_orders, 1, geometries, interpret=True)
    for geometry, found_rows, found_columns in zip(geometries, rows, columns, strict=True):
        assert [tuple(item) for item in found_rows] == by_rows(*geometry[:3]), geometry
        assert [tuple(item) for item in found_columns] == by_columns(*geometry), geometry
