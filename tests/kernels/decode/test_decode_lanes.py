"""Which columns of a step the lanes of the vector form read: the worked example of ``lane_columns``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ranks import run_ranks

from comet.kernels.decode.scales import lane_columns


@triton.jit
def store_columns(
    out_ptr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, LANE: tl.constexpr, SCALES: tl.constexpr, LENGTH: tl.constexpr
):
    columns = lane_columns(ROWS, BLOCK_K, LANE, SCALES)
    places = tl.arange(0, LENGTH)
    if SCALES != 0:
        copies: tl.constexpr = columns.shape[0]
        places = tl.arange(0, copies)[:, None] * LENGTH + places[None, :]
    tl.store(out_ptr + places, columns)


def columns_of(rows: int, depth: int, lane: int, scales: int) -> list[list[int]]:
    """What every copy has; one where nothing is copied."""
    length = depth if scales == 0 else depth // lane * 8
    out = torch.full((32, length), -1, dtype=torch.int32)
    store_columns[(1,)](out, rows, depth, lane, scales, length)
    return [copy for copy in out.tolist() if copy[0] >= 0]


def play(rank: int, world_size: int) -> list[list[list[int]]]:
    calls = (16, 32, 16, 0), (16, 32, 16, 32), (32, 32, 16, 128), (4, 32, 16, 32), (8, 512, 16, 32), (2, 64, 32, 32)
    return [columns_of(*call) for call in calls]


def test_columns_of_a_step_example() -> None:
    plain, scaled, most, few, long, coded = run_ranks(play, 1, interpret=True)[0]
    halves = [*range(8), *range(16, 24)]
    assert plain == [list(range(32))]
    assert scaled == most == [halves] * 16
    assert few == [halves] * 4, "no more copies than rows"
    assert coded == [[*range(8), *range(32, 40)]] * 2, "32 weights of half a byte"
    assert long == [[lane * 16 + place for lane in range(32) for place in range(8)]], "a lane for every 16 bytes"
