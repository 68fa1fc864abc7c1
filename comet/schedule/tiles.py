"""The order of work inside one fused kernel: which tile and column block comes when, and what it waits for.

A ``TileSchedule`` is built from a ``Decomposition`` and a geometry. It says what the order is:
``comet.kernels.gemm.tiles`` holds the same formulas for the device, and the tests compare the two.

* Cut along tile **rows**: tiles lie in the plan's table phase by phase (phase 0: rows of this rank, phase p >= 1: rows
  of the p-th group of remote sources), inside a phase in expert order, so ascending tiles follow the arrival of rows.
* Cut along tile **columns**: all tiles of all experts finish column panel p before panel p + 1 begins.

A *work item* is one tile times one column block. Items are grouped: ``group_tiles`` consecutive tiles go through their
column blocks together, tile index fastest, so that rows and weights are reused from L2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from comet.config import require
from comet.schedule.dependency import Decomposition, TileAxis


def part_of(index: int, num_elements: int, num_parts: int) -> int:
    """Part that ``index`` falls in when ``num_elements`` are cut into parts as even as possible, wider parts first.

    Example: 5 elements in 3 parts are (0, 1), (2, 3), (4,): ``part_of(3, 5, 3) == 1``.
    """
    narrow, num_wide = divmod(num_elements, num_parts)
    in_wide = num_wide * (narrow + 1)
    return index // (narrow + 1) if index < in_wide else num_wide + (index - in_wide) // narrow


def part_span(part: int, num_elements: int, num_parts: int) -> range:
    """Elements of ``part`` under the same cut as ``part_of``; ``part_span(1, 5, 3) == range(2, 4)``."""
    narrow, num_wide = divmod(num_elements, num_parts)
    first = part * narrow + min(part, num_wide)
    return range(first, first + narrow + (part < num_wide))


def decode_grouped(item: int, num_tiles: int, num_cols: int, group_tiles: int) -> tuple[int, int]:
    """Tile and column block of a work item when tiles go group by group through all columns.

    Example: 3 tiles, 2 columns, groups of 2: items 0..5 are (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    group, inside = divmod(item, group_tiles * num_cols)
    first = group * group_tiles
    column, tile = divmod(inside, min(num_tiles - first, group_tiles))
    return first + tile, column


def phase_of_source(source: int, rank: int, world_size: int, num_phases: int) -> int:
    """Phase in which ``rank`` computes the rows of ``source``.

    Phase 0 is the rank itself; the remote ranks, in ring order from ``rank + 1``, are dealt into the other phases in
    contiguous groups as even as possible, wider groups first.

    Example: rank 2 of 4 with 3 phases: sources 2 -> 0, 3 -> 1, 0 -> 1, 1 -> 2.

    Raises:
        ValueError: If ``num_phases`` breaks the rule of ``check_phases``.
    """
    check_phases(num_phases, world_size)
    distance = (source - rank) % world_size
    return 1 + part_of(distance - 1, world_size - 1, num_phases - 1) if distance else 0


def check_phases(num_phases: int, world_size: int) -> None:
    """Raise ``ValueError`` unless every phase has a source: ``num_phases`` is 2 .. W, or 1 when W = 1."""
    low, high = min(2, world_size), world_size
    require(
        low <= num_phases <= high,
        f"num_phases={num_phases} must be between {low} and {high} for world_size={world_size}: "
        f"phase 0 is local, every other phase needs a remote rank",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSchedule:
    """Order of the work items of one fused kernel; hashable, the same on every rank.

    Args:
        axis: Name of the decomposed axis, for pictures and logs.
        tile_axis: Whether the parts are runs of tile rows (phases) or of tile columns (panels).
        num_cols: Column blocks of the compute operator's output.
        group_tiles: Tiles that go through their column blocks together.
        num_phases: Phases of the tile table; 1 when cut along columns.
        num_panels: Column panels; 1 when cut along rows.

    Raises:
        ValueError: If a field is not positive, there are more panels than column blocks, or parts of the other axis.
    """

    axis: str
    tile_axis: TileAxis
    num_cols: int
    group_tiles: int
    num_phases: int = 1
    num_panels: int = 1

    def __post_init__(self) -> None:
        for name in ("num_cols", "group_tiles", "num_phases", "num_panels"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be at least 1")
        require(
            self.num_panels <= self.num_cols,
            f"num_panels={self.num_panels} must be at most num_cols={self.num_cols}: a panel is whole column blocks",
        )
        other = "num_panels" if self.tile_axis is TileAxis.ROWS else "num_phases"
        value = getattr(self, other)
        require(value == 1, f"{other}={value} must be 1 in a schedule cut along tile {self.tile_axis.value}")

    @classmethod
    def build(
        cls,
        decomposition: Decomposition,
        *,
        num_cols: int,
        group_tiles: int,
        num_phases: int = 1,
        num_panels: int = 1,
    ) -> TileSchedule:
        """Schedule for a decomposition: ``num_phases`` serves a cut along rows, ``num_panels`` one along columns.

        The count of the other kind is ignored, so that one ``OverlapConfig`` serves all pipelines.

        Raises:
            ValueError: As the class.
            DependencyError: If the axis is not a side of the compute operator's tiles.
        """
        tile_axis = decomposition.tile_axis
        by_rows = tile_axis is TileAxis.ROWS
        return cls(
            axis=decomposition.axis,
            tile_axis=tile_axis,
            num_cols=num_cols,
            group_tiles=group_tiles,
            num_phases=num_phases if by_rows else 1,
            num_panels=1 if by_rows else num_panels,
        )

    def num_items(self, num_tiles: int) -> int:
        """Work items of ``num_tiles`` tiles."""
        return num_tiles * self.num_cols

    def decode(self, item: int, num_tiles: int) -> tuple[int, int, int]:
        """What a work item computes.

        A group of tiles may straddle two phases; decoding the tiles of each phase as a run of their own gives items in
        strict phase order.

        Args:
            item: 0 .. ``num_items(num_tiles) - 1``, in order of execution.
            num_tiles: Tiles in the plan's table.

        Returns:
            Index into the tile table, column block, column panel (0 when cut along rows).

        Raises:
            ValueError: If ``item`` is out of range.

        Example:
            Cut along columns with ``num_cols=3, num_panels=2, group_tiles=2`` and 3 tiles, panel 0 is columns 0 and 1:
            items 0..8 are (0,0,0) (1,0,0) (0,1,0) (1,1,0) (2,0,0) (2,1,0) (0,2,1) (1,2,1) (2,2,1).
        """
        num_items = self.num_items(num_tiles)
        require(0 <= item < num_items, f"item={item} must be at least 0 and below num_items={num_items}")
        panel = self.panel_of_column(item // num_tiles)
        columns = self.panel_columns(panel)
        tile, column = decode_grouped(item - columns.start * num_tiles, num_tiles, len(columns), self.group_tiles)
        return tile, columns.start + column, panel

    def items(self, num_tiles: int) -> Iterator[tuple[int, int, int]]:
        """``decode`` of every item, in order of execution."""
        return (self.decode(item, num_tiles) for item in range(self.num_items(num_tiles)))

    def wait_sources(self, phase: int, rank: int, world_size: int) -> tuple[int, ...]:
        """Source ranks whose rows the tiles of ``phase`` contain, in the order they are expected to arrive.

        Example: rank 2 of 4 with 3 phases: (2,), (3, 0), (1,).

        Raises:
            ValueError: If ``phase`` is out of range or ``num_phases`` breaks the rule of ``check_phases``.
        """
        check_phases(self.num_phases, world_size)
        rule = f"must be at least 0 and below num_phases={self.num_phases}"
        require(0 <= phase < self.num_phases, f"phase={phase} {rule}")
        if phase == 0:
            return (rank,)
        hops = part_span(phase - 1, world_size - 1, self.num_phases - 1)
        return tuple((rank + 1 + hop) % world_size for hop in hops)

    def panel_of_column(self, column: int) -> int:
        """Panel a column block belongs to."""
        others = self.num_cols - self.last_panel_width
        return part_of(column, others, self.num_panels - 1) if column < others else self.num_panels - 1

    def panel_columns(self, panel: int) -> range:
        """Column blocks of a panel; before the last, widths differ by at most 1, wider first."""
        others = self.num_cols - self.last_panel_width
        if panel == self.num_panels - 1:
            return range(others, self.num_cols)
        return part_span(panel, others, self.num_panels - 1)

    @property
    def last_panel_width(self) -> int:
        """Column blocks of the last panel: half of an even share, because nothing hides what becomes of it.

        Example: 28 column blocks in 4 panels are 9, 8, 8 and 3.
        """
        return max(self.num_cols // (2 * self.num_panels), 1) if self.num_panels > 1 else self.num_cols
