"""Many small tensors in one allocation: an allocation of each would take the host longer than their kernels run."""

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

KEPT_PLACES = 64  # enough for a few layers

Window = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and first element of a tensor


def allocate(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Tensor:
    """Uninitialised int32 memory for tensors of these shapes."""
    return torch.empty(_places(tuple(shapes.values()))[1], dtype=torch.int32, device=device)


def cut(memory: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors in what ``allocate`` returned for these shapes, each 256-byte aligned."""
    places, _ = _places(tuple(shapes.values()))
    return {name: memory.as_strided(*place) for name, place in zip(shapes, places, strict=True)}


@functools.lru_cache(maxsize=KEPT_PLACES)
def _places(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[Window, ...], int]:
    """Places of tensors one after the other, each from a multiple of 64 elements on, and their number of elements.

    Example: shapes (2, 3) and (4,) begin at 0 and 64, with strides (3, 1) and (1,); 128 elements in all.
    """
    places, first = [], 0
    for shape in shapes:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        places.append((shape, strides, first))
        first += -(-math.prod(shape) // 64) * 64
    return tuple(places), first
