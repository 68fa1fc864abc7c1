"""GPUs with tokens of their own: warp decode for few, the path of the group for more, and a graph."""

import pytest
import torch
from data_parallel_cases import check_own_tokens, check_replays
from decode_cases import DecodeCase
from gpus import ON_GPUS
from ranks import in_ranks

CASE = DecodeCase(name="own tokens", T=0, K=4, E=8, D=512, F=256, routing="masked", seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_rank_against_all_experts(dtype: torch.dtype) -> None:
    check_own_tokens(0, 1, CASE, 1, dtype, "cuda")


@pytest.mark.gpu
def test_one_rank_in_a_graph() -> None:
    check_replays(0, 1, CASE, 1, torch.bfloat16, "cuda")


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS)
def test_two_ranks_against_all_experts_and_in_a_graph(rank: int, world_size: int) -> None:
    for tp in (1, 2):
        check_own_tokens(rank, world_size, CASE, tp, torch.bfloat16, "cuda")
        check_replays(rank, world_size, CASE, tp, torch.bfloat16, "cuda")


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS)
def test_two_nodes_that_kernels_join(rank: int, world_size: int) -> None:
    check_own_tokens(rank, world_size, CASE, 1, torch.bfloat16, "cuda", 1)
    for replicated in (False, True):
        check_replays(rank, world_size, CASE, 1, torch.bfloat16, "cuda", 1, replicated=replicated)
