"""The order of work: every item once, parts in order, and the device functions compute the very same order."""

import random
from collections import Counter
from itertools import product

import torch
import triton
import triton.language as tl
from ranks import run_ranks
from tile_orders import by_columns, by_rows, panels_of

from comet.kernels.gemm import tiles

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


def test_worked_examples() -> None:
    assert by_rows(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert by_columns(3, 3, 2, 2) == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (0, 2, 1), (1, 2, 1), (2, 2, 1)
    ]  # fmt: skip
    assert [len(columns) for columns in panels_of(28, 4)] == [9, 8, 8, 3]


def test_every_item_comes_once_and_panels_in_order() -> None:
    for num_tiles, num_cols, group, panels in random_geometries(0):
        in_rows = [(*item, 0) for item in by_rows(num_tiles, num_cols, group)]
        for order in (in_rows, by_columns(num_tiles, num_cols, group, panels)):
            assert Counter(item[:2] for item in order) == Counter(product(range(num_tiles), range(num_cols)))
            keys = [(panel, tile // group, column) for tile, column, panel in order]
            assert keys == sorted(keys), "panels ascend, and a group of tiles finishes before the next begins"


def test_the_last_panel_is_half_as_wide_and_the_others_differ_by_at_most_one() -> None:
    for num_cols in range(1, 40):
        for panels in range(1, num_cols + 1):
            widths = [len(columns) for columns in panels_of(num_cols, panels)]
            assert sum(widths) == num_cols
            assert widths == sorted(widths, reverse=True)
            if panels > 1:
                assert widths[0] - widths[-2] <= 1
                assert widths[-1] == max(num_cols // (2 * panels), 1)


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
