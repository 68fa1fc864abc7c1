"""The order of work items as plain loops, which ``comet.kernels.gemm.tiles`` is compared with."""


def by_rows(num_tiles: int, num_cols: int, group_tiles: int) -> list[tuple[int, int]]:
    """(tile, column block) of every item: groups of tiles go through all columns, tiles of a group fastest."""
    return [
        (tile, column)
        for first in range(0, num_tiles, group_tiles)
        for column in range(num_cols)
        for tile in range(first, min(first + group_tiles, num_tiles))
    ]


def panels_of(num_cols: int, num_panels: int) -> list[range]:
    """Column blocks of each panel: the last has half of an even share, the others as even as can be, wider first."""
    last = max(num_cols // (2 * num_panels), 1) if num_panels > 1 else num_cols
    starts, others = [0], num_cols - last
    for left in range(num_panels - 1, 0, -1):
        starts.append(starts[-1] + -(-(others - starts[-1]) // left))
    return [range(*span) for span in zip(starts, [*starts[1:], num_cols], strict=True)]


def by_columns(num_tiles: int, num_cols: int, group_tiles: int, num_panels: int) -> list[tuple[int, int, int]]:
    """(tile, column block, panel) of every item: all tiles finish a panel before the next one."""
    return [
        (tile, columns.start + column, panel)
        for panel, columns in enumerate(panels_of(num_cols, num_panels))
        for tile, column in by_rows(num_tiles, len(columns), group_tiles)
    ]
