"""How panels of few tokens are cut into parts, by the kernels in Triton."""

from __future__ import annotations

import pytest
import torch
from launch_arguments import make_wire

from comet.kernels.layer.triton.gemm_combine import LEAST_PARTS, SUM_TOKENS, GemmCombineConfig, cut_panels
from comet.kernels.runtime.arguments import COMBINE_CHUNK_ROWS, MAX_PANELS


def cut(
    cols: int, num_panels: int, max_tokens: int, *, dtype: torch.dtype = torch.bfloat16, **changes: int | bool
) -> dict[str, int]:
    move_cols = 256 if dtype.itemsize == 2 else 128
    options = dict(num_panels=num_panels, move_cols=move_cols) | changes
    return cut_panels(
        torch.empty(1, cols, dtype=dtype, device="meta"), make_wire(2, max_tokens), GemmCombineConfig(**options)
    )


def test_worked_example() -> None:
    assert cut(416, 1, 128, dtype=torch.float32) == dict(num_parts=6, PART_STEP=32, ROWS=32, COLS=32)


def test_few_tokens_have_parts_and_many_have_not() -> None:
    assert cut(2048, 4, 512) == dict(num_parts=4, PART_STEP=64, ROWS=32, COLS=64)
    assert cut(1040, 4, 256, dtype=torch.float32)["num_parts"] == 4  # of tests/layer/test_moe.py
    whole = dict(num_parts=1, PART_STEP=64, ROWS=8, COLS=256)
    assert cut(2048, 4, 2048) == whole  # three parts
    assert cut(2048, 8, 512) == whole  # two have columns and flags
    assert cut(2048, 4, 512, comm_blocks=16) == whole


def test_a_step_has_no_more_tokens_than_a_ticket() -> None:
    found = cut(2048, 4, 512)
    assert found["num_parts"] == 4
    assert SUM_TOKENS % found["ROWS"] == COMBINE_CHUNK_ROWS % found["ROWS"] == 0
    assert found["ROWS"] * found["COLS"] == 8 * 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_have_flags_and_columns_in_every_panel(dtype: torch.dtype) -> None:
    for cols in range(16, 4097, 48):
        for num_panels in range(1, MAX_PANELS + 1):
            found = cut(cols, num_panels, 128, dtype=dtype)
            assert found["num_parts"] == 1 or found["num_parts"] >= LEAST_PARTS
            assert found["num_parts"] * num_panels <= MAX_PANELS
            if found["num_parts"] > 1:
                assert found["num_parts"] * found["PART_STEP"] * 2 * num_panels <= cols
