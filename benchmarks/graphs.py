"""A variant of the MoE benchmark as CUDA graphs whose output can still be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from comet.tuner.timing import Variant, capture

LayerVariant = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Graph:
    """A variant recorded for all input sets, kept with what it reads; a replay of set 0 writes ``output``."""

    variant: LayerVariant
    replay: Variant
    output: tuple[Tensor, ...]

    def first(self) -> tuple[Tensor, ...]:
        """Replay input set 0."""
        self.replay(0)
        return self.output


def record(variant: LayerVariant, rotate: int) -> Graph:
    """Capture a variant as CUDA graphs that keep the output of input set 0.

    Args:
        variant: A function of the input set that never makes the host wait for the device.
        rotate: Number of input sets.

    Returns:
        The graphs.
    """
    kept: list[tuple[Tensor, ...]] = []

    def run(index: int) -> None:
        output = variant(index)
        if index == 0:
            kept[:] = [output]

    replay = capture(run, rotate=rotate)
    return Graph(variant, replay, kept[0])
