"""A rank alone with tokens of its own on a GPU: warp decode for few, the path of the group for more, and a graph."""

from __future__ import annotations

import pytest
import torch
from data_parallel_cases import check_own_tokens, check_replays
from decode_cases import DecodeCase

pytestmark = pytest.mark.gpu

CASE = DecodeCase(name="own tokens", T=0, K=4, E=8, D=512, F=256, routing="masked", seed=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_rank_against_all_experts(dtype: torch.dtype) -> None:
    check_own_tokens(0, 1, CASE, 1, dtype, "cuda")


def test_graph_with_changing_routing() -> None:
    check_replays(0, 1, CASE, 1, torch.bfloat16, "cuda")
