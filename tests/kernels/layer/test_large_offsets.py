"""The case of ``test_large_offsets_gpu.py``, small: what it does there was seen to work, and to notice, here."""

from __future__ import annotations

import pytest
import torch
from offset_cases import check_rows_return, identity_expert, numbered_rows
from ranks import in_ranks

from comet.reference.layer import reference_experts


@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(379, 64), (128, 48), (1, 16)])
@in_ranks(1, interpret=True)
def test_rows_come_and_go(rank: int, world_size: int, num_tokens: int, hidden_size: int) -> None:
    check_rows_return(num_tokens, hidden_size, torch.float16, "cpu", block_rows=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_expert_is_the_identity_and_rows_are_numbered(dtype: torch.dtype) -> None:
    x = numbered_rows(300, 32, dtype, "cpu")
    assert x[299, :4].tolist() == [1, 43, 2, 0]
    ids, weights = torch.zeros(300, 1, dtype=torch.int32), torch.ones(300, 1)
    assert torch.equal(reference_experts(x, ids, weights, *identity_expert(32, dtype, "cpu")), x)
