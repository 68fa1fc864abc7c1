"""The order of work: every item once, parts in order, and the device functions compute the very same order."""

import random
from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from ranks import run_ranks

from comet.kernels.gemm import tiles
from comet.schedule.dependency import TileAxis, pipelines
from comet.schedule.tiles import TileSchedule, decode_grouped, part_of, part_span, phase_of_source

NUM_GEOMETRIES = 60

Geometry = tuple[int, int, int, int]  # tiles, columns, group tiles, panels


def by_rows(num_cols: int, group_tiles: int, num_phases: int = 1) -> TileSchedule:
    return TileSchedule.build(
        pipelines()["layer0"], num_cols=num_cols, group_tiles=group_tiles, num_phases=num_phases, num_panels=99
    )


def by_columns(num_cols: int, group_tiles: int, num_panels: int) -> TileSchedule:
    return TileSchedule.build(
        pipelines()["layer1"], num_cols=num_cols, group_tiles=group_tiles, num_panels=num_panels, num_phases=99
    )


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
    assert [part_of(index, 5, 3) for index in range(5)] == [0, 0, 1, 1, 2]
    assert part_span(1, 5, 3) == range(2, 4)
    assert [decode_grouped(item, 3, 2, 2) for item in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert list(by_columns(3, 2, 2).items(3)) == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (0, 2, 1), (1, 2, 1), (2, 2, 1)
    ]  # fmt: skip
    assert [phase_of_source(source, 2, 4, 3) for source in (2, 3, 0, 1)] == [0, 1, 1, 2]
    assert [by_rows(1, 1, 3).wait_sources(phase, 2, 4) for phase in range(3)] == [(2,), (3, 0), (1,)]


@pytest.mark.parametrize("name", list(pipelines()))
def test_build_takes_the_count_of_its_own_axis(name: str) -> None:
    part = pipelines()[name]
    schedule = TileSchedule.build(part, num_cols=7, group_tiles=2, num_phases=3, num_panels=4)
    rows = part.axis == "tokens"
    assert (schedule.tile_axis is TileAxis.ROWS) == rows
    assert (schedule.num_phases, schedule.num_panels) == ((3, 1) if rows else (1, 4))
    assert hash(schedule) == hash(TileSchedule.build(part, num_cols=7, group_tiles=2, num_phases=3, num_panels=4))


@pytest.mark.parametrize("seed", range(3))
def test_every_item_exactly_once_and_panels_in_order(seed: int) -> None:
    for num_tiles, num_cols, group, panels in random_geometries(seed):
        for schedule in (by_rows(num_cols, group), by_columns(num_cols, group, panels)):
            items = list(schedule.items(num_tiles))
            assert len(items) == schedule.num_items(num_tiles) == num_tiles * num_cols
            assert sorted(item[:2] for item in items) == [(t, c) for t in range(num_tiles) for c in range(num_cols)]
            order = [item[2] for item in items]
            assert order == sorted(order), "the items of a panel are contiguous, panels ascend"
            assert all(schedule.panel_of_column(column) == panel for _, column, panel in items)
            counts = Counter(order)
            for panel in range(schedule.num_panels):
                assert counts[panel] == num_tiles * len(schedule.panel_columns(panel))


@pytest.mark.parametrize("seed", range(3))
def test_a_group_of_tiles_finishes_before_the_next_begins(seed: int) -> None:
    for num_tiles, num_cols, group, panels in random_geometries(seed):
        for schedule in (by_rows(num_cols, group), by_columns(num_cols, group, panels)):
            order = [(panel, tile // group, column) for tile, column, panel in schedule.items(num_tiles)]
            assert order == sorted(order)


@pytest.mark.parametrize("seed", range(3))
def test_local_tiles_first(seed: int) -> None:
    """No local tile comes after the group that straddles the boundary; phase by phase the order is strict."""
    source = random.Random(seed)
    for num_tiles, num_cols, group, _ in random_geometries(seed):
        local = source.randint(0, num_tiles)
        schedule = by_rows(num_cols, group, 2)
        straddling = -(-local // group) * group * num_cols
        assert all(tile >= local for tile, _, _ in list(schedule.items(num_tiles))[straddling:])
        strict = [tile for tile, _, _ in schedule.items(local)]
        strict += [local + tile for tile, _, _ in schedule.items(num_tiles - local)]
        assert Counter(strict) == dict.fromkeys(range(num_tiles), num_cols)
        assert all(tile < local for tile in strict[: local * num_cols])


def test_the_last_panel_is_half_as_wide_and_the_others_differ_by_at_most_one() -> None:
    assert [len(by_columns(28, 1, 4).panel_columns(panel)) for panel in range(4)] == [9, 8, 8, 3]
    for num_cols in range(1, 40):
        for panels in range(1, num_cols + 1):
            widths = [len(by_columns(num_cols, 1, panels).panel_columns(panel)) for panel in range(panels)]
            assert sum(widths) == num_cols
            assert widths == sorted(widths, reverse=True)
            if panels > 1:
                assert widths[0] - widths[-2] <= 1
                assert widths[-1] == max(num_cols // (2 * panels), 1)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_source_has_one_phase_and_the_ring_order_holds(world_size: int) -> None:
    for num_phases in range(min(2, world_size), world_size + 1):
        schedule = by_rows(2, 2, num_phases)
        for rank in range(world_size):
            waits = [schedule.wait_sources(phase, rank, world_size) for phase in range(num_phases)]
            flat = [source for sources in waits for source in sources]
            assert flat == [(rank + hop) % world_size for hop in range(world_size)]
            assert waits[0] == (rank,)
            sizes = [len(sources) for sources in waits[1:]]
            assert sizes == sorted(sizes, reverse=True)
            assert not sizes or (sizes[-1] >= 1 and sizes[0] - sizes[-1] <= 1)
            for phase, sources in enumerate(waits):
                assert all(phase_of_source(source, rank, world_size, num_phases) == phase for source in sources)


@pytest.mark.parametrize(("num_phases", "world_size"), [(1, 2), (2, 1), (5, 4), (1, 8)])
def test_phases_without_a_source_are_refused(num_phases: int, world_size: int) -> None:
    message = rf"num_phases={num_phases} must be between \d and {world_size} for world_size={world_size}"
    with pytest.raises(ValueError, match=message):
        by_rows(1, 1, num_phases).wait_sources(0, 0, world_size)
    with pytest.raises(ValueError, match=message):
        phase_of_source(0, 0, world_size, num_phases)


def test_errors_name_field_value_and_rule() -> None:
    with pytest.raises(ValueError, match=r"num_panels=4 must be at most num_cols=3: a panel is whole column blocks"):
        by_columns(3, 1, 4)
    for field in ("num_cols", "group_tiles", "num_phases", "num_panels"):
        fields = {"num_cols": 1, "group_tiles": 1, field: 0}
        with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
            TileSchedule(axis="tokens", tile_axis=TileAxis.ROWS, **fields)
    with pytest.raises(ValueError, match="num_phases=2 must be 1 in a schedule cut along tile columns"):
        TileSchedule(axis="hidden", tile_axis=TileAxis.COLUMNS, num_cols=4, group_tiles=1, num_phases=2)
    with pytest.raises(ValueError, match="num_panels=2 must be 1 in a schedule cut along tile rows"):
        TileSchedule(axis="tokens", tile_axis=TileAxis.ROWS, num_cols=4, group_tiles=1, num_panels=2)
    for item, num_tiles in ((-1, 3), (6, 3), (0, 0)):
        with pytest.raises(ValueError, match=rf"item={item} must be at least 0 and below num_items={2 * num_tiles}"):
            by_rows(2, 1).decode(item, num_tiles)
    with pytest.raises(ValueError, match="phase=2 must be at least 0 and below num_phases=2"):
        by_rows(1, 1, 2).wait_sources(2, 0, 2)


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


@triton.jit
def phases_kernel(out_ptr, world_size, num_phases, BLOCK: tl.constexpr):
    """Row ``rank`` of the output: the phase of every source, as one block."""
    rank = tl.program_id(0)
    sources = tl.arange(0, BLOCK)
    phases = tiles.phase_of_source(sources, rank, world_size, num_phases)
    tl.store(out_ptr + rank * world_size + sources, phases, mask=sources < world_size)


def device_orders(
    _rank: int, _world_size: int, geometries: list[Geometry], rings: list[tuple[int, int]]
) -> tuple[list[list], list[list], list[list]]:
    """Run in a child process, where the kernels above are interpreted."""
    rows, columns, phases = [], [], []
    for num_tiles, num_cols, group, panels in geometries:
        num_items = num_tiles * num_cols
        rows.append(torch.full((num_items, 2), -1, dtype=torch.int32))
        columns.append(torch.full((num_items, 3), -1, dtype=torch.int32))
        if num_items:
            rows_kernel[(num_items,)](rows[-1], num_tiles, num_cols, group)
            columns_kernel[(num_items,)](columns[-1], num_tiles, num_cols, panels, group)
    for size, num_phases in rings:
        phases.append(torch.full((size, size), -1, dtype=torch.int32))
        phases_kernel[(size,)](phases[-1], size, num_phases, 8)
    return tuple([order.tolist() for order in orders] for orders in (rows, columns, phases))


def test_device_functions_compute_the_same_order() -> None:
    geometries = [*random_geometries(7)[:40], (1, 1, 1, 1), (0, 3, 2, 2), (17, 12, 8, 5)]
    rings = [(size, phases) for size in range(1, 7) for phases in range(min(2, size), size + 1)]
    ((rows, columns, phases),) = run_ranks(device_orders, 1, geometries, rings, interpret=True)
    for (num_tiles, num_cols, group, panels), found_rows, found_columns in zip(geometries, rows, columns, strict=True):
        expected = [(tile, column) for tile, column, _ in by_rows(num_cols, group).items(num_tiles)]
        assert [tuple(item) for item in found_rows] == expected, (num_tiles, num_cols, group)
        expected_columns = list(by_columns(num_cols, group, panels).items(num_tiles))
        assert [tuple(item) for item in found_columns] == expected_columns, (num_tiles, num_cols, group, panels)
    for (size, num_phases), found in zip(rings, phases, strict=True):
        expected_phases = [
            [phase_of_source(source, rank, size, num_phases) for source in range(size)] for rank in range(size)
        ]
        assert found == expected_phases, (size, num_phases)
