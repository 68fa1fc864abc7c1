"""Weight gradients in CUDA C++: bit for bit what the Triton kernel computes, with NaN behind every segment."""

import random

import pytest
import torch
from gemm_cases import check_wgrad_cuda, make_rows, wgrad_operands
from gpus import captured
from torch import Tensor

from comet.kernels.gemm.group_gemm import GemmConfig
from comet.kernels.gemm.wgrad import group_gemm_wgrad
from comet.kernels.gemm.wgrad_cuda import group_gemm_wgrad_cuda

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
COUNTS = [0, 1, 15, 16, 17, 63, 64, 65, 200, 1024, 0]


def ticket() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16), (128, 256), (80, 48), (336, 272), (1536, 2048)])
def test_equals_its_twin(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_wgrad_cuda(COUNTS, shape, dtype)


def test_fewer_blocks_than_tiles() -> None:
    check_wgrad_cuda(COUNTS[::-1], (784, 336), torch.bfloat16, max_blocks=3)
    check_wgrad_cuda([0, 0, 0], (272, 512), torch.bfloat16, max_blocks=1)


def test_random_segments() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(12):
        most = draw.choice([16, 100, 700])
        counts = [draw.choice([0, 1, draw.randint(0, most)]) for _ in range(draw.randint(1, 40))]
        shape = (16 * draw.randint(1, 60), 16 * draw.randint(1, 60))
        check_wgrad_cuda(counts, shape, draw.choice(DTYPES), draw.choice([None, 1, 7]))


def test_offsets_past_two_to_the_31() -> None:
    """The segment starts behind element 2^31 of a, and its result lies behind element 2^31 of out."""
    width, first_row = 4096, 2**31 // 4096 + 128
    a = torch.zeros(first_row + 128, width, dtype=torch.bfloat16, device="cuda")
    a[first_row:, 0] = torch.arange(128, device="cuda")
    ones = torch.ones(len(a), width, dtype=torch.bfloat16, device="cuda")
    experts = 2**31 // width**2 + 2
    starts = torch.zeros(experts, dtype=torch.int32, device="cuda")
    counts = torch.zeros_like(starts)
    starts[-1], counts[-1] = first_row, 128
    out = torch.full((experts, width, width), 77.0, dtype=torch.bfloat16, device="cuda")
    group_gemm_wgrad_cuda(a, ones, out, starts, counts, ticket())
    assert (out[-1, 0] == 128 * 127 // 2).all()
    assert not out[-1, 1:].any()
    assert not out[:-1].any()


def test_a_graph_draws_anew_each_time() -> None:
    rows = make_rows([[100, 0, 65]], 128, "cuda", 0)
    a_and_b = wgrad_operands(rows, (512, 1024), torch.bfloat16, 5, "cuda")
    segments = rows.segment_starts, rows.segment_counts
    out, wanted = (torch.zeros(3, 512, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    group_gemm_wgrad(*a_and_b, wanted, *segments, config=GemmConfig())
    graph, _ = captured(lambda: group_gemm_wgrad_cuda(*a_and_b, out, *segments, ticket(), max_blocks=5))
    for _ in range(3):
        out.fill_(77)
        graph.replay()
        assert torch.equal(out, wanted)
