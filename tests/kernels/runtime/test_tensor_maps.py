"""Caches of a launch: tensor descriptors for any number of layers, none of them stale, and the launch's object."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from comet.kernels.runtime import nvrtc
from comet.kernels.runtime.nvrtc import segment_map, tensor_map

driver = pytest.importorskip("cuda.bindings.driver", reason="needs pip install 'comet-moe[cuda]'")

# The deepest models have about a hundred layers. A training step of one needs maps of: w1; hidden and w2; the operands
# and the result of w2's gradient; gradients of gate | up and w1; the operands and the result of w1's gradient.
LAYERS, MAPS_OF_A_LAYER = 100, 1 + 2 + 3 + 2 + 3


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of each map that the driver encoded: type, sizes, strides in bytes and box, the last axis first."""
    told: list[tuple[Any, ...]] = []

    def encode(kind: Any, rank: int, address: int, sizes: Any, strides: Any, box: Any, *_: Any) -> tuple[Any, Any]:
        told.append((kind, address, *([int(each) for each in numbers] for numbers in (sizes, strides, box))))
        return driver.CUresult.CUDA_SUCCESS, driver.CUtensorMap()

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    nvrtc._tensor_map.cache_clear()
    yield told
    nvrtc._tensor_map.cache_clear()


def rows_of(memory: Tensor, number: int) -> Tensor:
    """``(4, 64)`` of their own for each number."""
    return memory[256 * number : 256 * (number + 1)].view(4, 64)


def test_a_deep_model_finds_the_maps_of_its_last_step(made: list[tuple[Any, ...]]) -> None:
    count = LAYERS * MAPS_OF_A_LAYER
    memory = torch.empty(256 * count, dtype=torch.bfloat16)
    steps = [[tensor_map(rows_of(memory, number), (4, 64)) for number in range(count)] for _ in range(3)]
    assert len(made) == len(set(map(id, steps[0]))) == count
    assert all(one is other for step in steps[1:] for one, other in zip(steps[0], step, strict=True))


def test_memory_that_is_used_again_gets_a_map_of_its_own(made: list[tuple[Any, ...]]) -> None:
    rows = torch.empty(8, 128, dtype=torch.bfloat16)
    kinds = driver.CUtensorMapDataType
    bf16, f16 = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    wanted = {
        (rows, (4, 64)): (bf16, [128, 8], [256], [64, 4]),
        (rows, (8, 64)): (bf16, [128, 8], [256], [64, 8]),
        (rows[:4], (4, 64)): (bf16, [128, 4], [256], [64, 4]),
        (rows[::2], (4, 64)): (bf16, [128, 4], [512], [64, 4]),
        (rows[:, :64], (4, 64)): (bf16, [64, 8], [256], [64, 4]),
        (rows.view(4, 256), (4, 64)): (bf16, [256, 4], [512], [64, 4]),
        (rows.view(2, 4, 128), (1, 4, 64)): (bf16, [128, 4, 2], [256, 1024], [64, 4, 1]),
        (rows.view(torch.float16), (4, 64)): (f16, [128, 8], [256], [64, 4]),
    }
    for _ in range(2):
        for tensor, box in wanted:
            tensor_map(tensor, box)
    assert made == [(kind, rows.data_ptr(), *numbers) for kind, *numbers in wanted.values()]


def test_what_no_map_can_say(made: list[tuple[Any, ...]]) -> None:
    rows = torch.empty(8, 128, dtype=torch.bfloat16)
    for tensor, message in ((rows.T, "are 128 apart"), (rows[:, 1:], "does not start at 16 bytes")):
        with pytest.raises(AssertionError, match=message):
            tensor_map(tensor, (8, 64))
    assert not made


def test_maps_of_segments_know_how_far_apart_rows_are(made: list[tuple[Any, ...]]) -> None:
    rows = torch.empty(8, 128, dtype=torch.bfloat16)
    for _ in range(2):
        for tensor in (rows, rows.view(16, 64), rows[:4]):  # the last is cut by its segments alone, as the first is
            segment_map(tensor, (32, 64))
    assert [strides[:2] for *_, strides, _ in made] == [[256, 256], [128, 128]]


def test_the_object_of_a_launch_is_made_once_for_a_shape_and_a_stream() -> None:
    found = nvrtc.launch_config(132, 384, 2, 200_000, 1234)
    cluster = found.attrs[0].value.clusterDim
    assert (found.gridDimX, found.blockDimX, found.sharedMemBytes, int(found.hStream)) == (132, 384, 200_000, 1234)
    assert (found.numAttrs, cluster.x, cluster.y, cluster.z) == (1, 2, 1, 1)
    assert nvrtc.launch_config(132, 384, 2, 200_000, 1234) is found
    assert nvrtc.launch_config(132, 384, 2, 200_000, 5678) is not found
