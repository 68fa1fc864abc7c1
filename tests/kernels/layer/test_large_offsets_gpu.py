"""Received rows, combine rows, hidden and outputs of more than 2^31 elements each: no address wraps around."""

import pytest
import torch
from offset_cases import check_rows_return, pool_shape

from comet.layer.workspace import workspace_bytes

HIDDEN_SIZE = 8192
NUM_TOKENS = 2**31 // HIDDEN_SIZE + 8192 - 5


@pytest.mark.gpu
def test_rows_beyond_32_bits_come_and_go() -> None:
    rows = NUM_TOKENS * HIDDEN_SIZE
    assert rows * 96 // 97 > 2**31, "every matrix is to be that large, masked tokens left out"
    # Two pools, and at most at one time: tokens, hidden, two more results, and what checking takes.
    needed = 2 * workspace_bytes(pool_shape(NUM_TOKENS, HIDDEN_SIZE, torch.bfloat16)) + 6 * 2 * rows
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} GiB are free")
    check_rows_return(NUM_TOKENS, HIDDEN_SIZE, torch.bfloat16, "cuda", block_rows=128)
