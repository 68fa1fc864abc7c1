"""Grouped GEMMs and SwiGLU's backward on a GPU: bf16 against torch and float64, shipped tile shapes, large offsets."""

import random

import pytest
import torch
from activation_cases import ACTIVATIONS
from gemm_cases import (
    check_activation_backward,
    check_biases,
    check_gather,
    check_group_gemm,
    check_wgrad,
    make_rows,
    make_table,
    random_counts,
)
from gpus import captured

from comet.kernels.gemm.gather_rows import gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm
from comet.kernels.gemm.wgrad import group_gemm_wgrad

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = (
    [[0, 0, 0]],
    [[5, 0, 0]],
    [[0, 128, 300], [1, 0, 129]],
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_group_gemm(dtype, gather, layout):
    for seed, counts in enumerate(COUNTS):
        rows = make_rows(counts, 128, "cuda", seed)
        for shape in ((16, 16), (48, 80), (272, 336), (512, 1024)):
            check_group_gemm(rows, 3, shape, dtype, gather, layout, GemmConfig.select(dtype), seed, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_wgrad(dtype):
    for seed, counts in enumerate(COUNTS):
        rows = make_rows(counts, 128, "cuda", seed)
        for shape in ((16, 16), (80, 48), (336, 272), (512, 768)):
            first = check_wgrad(rows, shape, dtype, GemmConfig.select(dtype), seed, "cuda")
            again = check_wgrad(rows, shape, dtype, GemmConfig.select(dtype), seed, "cuda")
            assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows(dtype):
    for seed, counts in enumerate(COUNTS):
        rows = make_rows(counts, 128, "cuda", seed)
        for width in (16, 336, 1024, 7168):
            check_gather(rows, width, dtype, seed, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_backward(dtype):
    for seed, counts in enumerate(COUNTS):
        rows = make_rows(counts, 128, "cuda", seed)
        for ffn in (16, 272, 768, 1408):
            check_activation_backward(rows, ffn, dtype, seed, "cuda")
        for activation in ACTIVATIONS[1:]:
            check_activation_backward(rows, 272, dtype, seed, "cuda", activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[[0, 3, 700, 128]], [[1]], [[5000, 0]]])
def test_gradients_of_biases(dtype, counts):
    rows = make_rows(counts, 128, "cuda", len(counts[0]))
    for width in (16, 720, 2880):
        check_biases(rows, width, dtype, width, "cuda")


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts(seed):
    generator = random.Random(seed)
    num_experts = generator.randint(1, 12)
    rows = make_rows(random_counts(generator, generator.randint(1, 3), num_experts, 700), 128, "cuda", seed)
    shape = (16 * generator.randint(1, 60), 16 * generator.randint(1, 60))
    for num_stages in (3, 4):
        config = GemmConfig(num_stages=num_stages)
        print(f"seed={seed} shape={shape} segments={rows.segment_counts.tolist()} {config}")
        for gather in (True, False):
            for layout in ("nk", "kn"):
                check_group_gemm(rows, num_experts, shape, torch.bfloat16, gather, layout, config, seed, "cuda")
        check_wgrad(rows, shape, torch.bfloat16, config, seed, "cuda")
    check_activation_backward(rows, shape[0], torch.bfloat16, seed, "cuda")


def test_offsets_past_two_to_the_31():
    """The only tile starts behind element 2^31 of both operands (8.6 GB together), in place and gathered."""
    width, first_row = 4096, 2**31 // 4096 + 128
    rows, narrow = first_row + 128, 256
    a = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    a[first_row:, 0] = torch.arange(128, device="cuda")
    weight = torch.zeros(1, width, width, dtype=torch.bfloat16, device="cuda")
    weight[0, :, 0] = 2
    tiles = torch.tensor([[0, first_row, 128, 0]], dtype=torch.int32, device="cuda")
    row_ids = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    row_ids[first_row:] = torch.arange(rows - 1, first_row - 1, -1, device="cuda")
    table = make_table(tiles, torch.ones(1, dtype=torch.int32, device="cuda"), row_ids, 128)
    expected = 2 * torch.arange(128, device="cuda", dtype=torch.bfloat16)
    for gather in (False, True):
        out = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
        group_gemm(a, weight, out, table, gather=gather, layout="nk", config=GemmConfig())
        row = expected.flip(0) if gather else expected
        assert torch.equal(out[first_row:], row[:, None].expand(128, width))
        del out
    grad = torch.zeros(1, width, narrow, dtype=torch.bfloat16, device="cuda")
    ones = torch.ones(rows, narrow, dtype=torch.bfloat16, device="cuda")
    segments = torch.tensor([[first_row], [128]], dtype=torch.int32, device="cuda")
    group_gemm_wgrad(a, ones, grad, *segments, config=GemmConfig())
    assert (grad[0, 0] == 128 * 127 // 2).all()
    assert (grad[0, 1:] == 0).all()
    out = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    gather_rows(a, out, row_ids, table)
    assert torch.equal(out[first_row:], a[first_row:].flip(0))


def test_plan_is_read_on_the_device():
    """A captured graph follows new tiles: the number of tiles is not baked into the launch."""
    first, second = (make_rows(counts, 128, "cuda", 0) for counts in ([[1, 0]], [[200, 3]]))
    a = torch.randn(first.num_received + second.num_received, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    tiles = torch.zeros(8, 4, dtype=torch.int32, device="cuda")
    row_ids = torch.zeros(2048, dtype=torch.int32, device="cuda")
    table = make_table(tiles, torch.zeros(1, dtype=torch.int32, device="cuda"), row_ids, 128)
    out = torch.zeros(2048, 64, device="cuda", dtype=torch.bfloat16)
    graph, _ = captured(lambda: group_gemm(a, b, out, table, gather=True, layout="nk", config=GemmConfig()))
    for rows in (first, second):
        count = int(rows.table.num_tiles)
        tiles[:count] = rows.table.tiles[:count]
        row_ids[: rows.num_rows] = rows.table.row_ids
        table.num_tiles.copy_(rows.table.num_tiles)
        out.fill_(77)
        graph.replay()
        expected = torch.full_like(out, 77)
        group_gemm(a, b, expected, rows.table, gather=True, layout="nk", config=GemmConfig())
        assert torch.equal(out, expected)
