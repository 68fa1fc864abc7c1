"""How the work of one fused kernel is cut, as the dependency analysis decides; ``kernels/gemm/tiles.py`` is the order.

* Cut along tile **rows**: tiles lie in the plan's table phase by phase (rows of this rank, then those of all others),
  inside a phase in expert order, so ascending tiles follow the arrival of rows.
* Cut along tile **columns**: all tiles of all experts finish column panel p before panel p + 1 begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from comet.config import require
from comet.schedule.dependency import Decomposition, TileAxis


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSchedule:
    """The cut of one fused kernel; hashable, the same on every rank.

    Raises:
        ValueError: If a number is not positive, there are more panels than column blocks, or panels of a cut along
            rows.
    """

    axis: str  # name of the decomposed axis, for pictures and logs
    tile_axis: TileAxis  # whether the parts are runs of tile rows (phases) or of tile columns (panels)
    num_cols: int  # column blocks of the compute operator's output
    num_panels: int = 1  # column panels; 1 when cut along rows

    def __post_init__(self) -> None:
        for name in ("num_cols", "num_panels"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be at least 1")
        require(
            self.num_panels <= self.num_cols,
            f"num_panels={self.num_panels} must be at most num_cols={self.num_cols}: a panel is whole column blocks",
        )
        require(
            self.num_panels == 1 or self.tile_axis is TileAxis.COLUMNS,
            f"num_panels={self.num_panels} must be 1 in a schedule cut along tile rows",
        )

    @classmethod
    def build(cls, decomposition: Decomposition, *, num_cols: int, num_panels: int) -> TileSchedule:
        """Schedule for a decomposition; ``num_panels`` serves a cut along columns and is ignored by one along rows.

        Raises:
            ValueError: As the class.
            DependencyError: If the axis is not a side of the compute operator's tiles.
        """
        tile_axis = decomposition.tile_axis
        panels = num_panels if tile_axis is TileAxis.COLUMNS else 1
        return cls(axis=decomposition.axis, tile_axis=tile_axis, num_cols=num_cols, num_panels=panels)
