"""Grouped GEMMs, gathers and gradients under the interpreter, against their twins and float64; examples, refusals."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

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
from ranks import in_ranks
from torch import Tensor

from comet.kernels.gemm.activation import activation_backward
from comet.kernels.gemm.gather_rows import OwnRows, gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm, num_blocks
from comet.kernels.gemm.wgrad import group_gemm_wgrad
from comet.kernels.runtime.arguments import TileTable

DTYPES = (torch.float32, torch.float16)
# Small blocks, so that small inputs have several blocks and tails along every axis.
SMALL = GemmConfig(block_m=32, block_n=32, block_k=32)
NO_ROWS = [[0, 0, 0]]
COUNTS = (
    NO_ROWS,
    [[5, 0, 40]],
    [[0, 16, 33], [1, 0, 17]],
    [[16, 16, 16], [0, 0, 0], [32, 1, 15]],
)


@in_ranks(1, interpret=True)
def test_kernels_match_their_twins_and_float64(rank: int, world_size: int) -> None:
    for seed, counts in enumerate(COUNTS):
        dtype = DTYPES[seed % 2]
        rows = make_rows(counts, block_rows=16, device="cpu", seed=seed)
        for width, shape in ((16, (16, 16)), (272, (48, 80)), (2064, (64, 32))):
            for gather, layout in product((True, False), ("nk", "kn")):
                check_group_gemm(rows, 3, shape, dtype, gather, layout, SMALL, 10 * seed, "cpu")
            check_gather(rows, width, dtype, 10 * seed, "cpu")
            check_wgrad(rows, shape, dtype, SMALL, 10 * seed, "cpu")
            check_activation_backward(rows, min(width, 272), dtype, seed, "cpu", ACTIVATIONS[seed % len(ACTIVATIONS)])
            if len(counts) == 1:
                check_biases(rows, min(width, 272), dtype, 10 * seed, "cpu")


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 1), (torch.float16, 2)])
@in_ranks(1, interpret=True)
def test_random_layouts(rank: int, world_size: int, dtype: torch.dtype, seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(6):
        num_experts, block_rows = generator.randint(1, 5), generator.choice((16, 32))
        counts = random_counts(generator, generator.randint(1, 3), num_experts, 3 * block_rows)
        rows = make_rows(counts, block_rows, "cpu", generator.randrange(2**20))
        shape = (16 * generator.randint(1, 6), 16 * generator.randint(1, 6))
        config = GemmConfig(
            block_m=generator.choice((16, 64)),
            block_n=generator.choice((16, 64)),
            block_k=generator.choice((16, 64)),
        )
        print(f"seed={seed} counts={counts} block_rows={block_rows} shape={shape} {config}")
        layout, gather = generator.choice(("nk", "kn")), generator.random() < 0.5
        check_group_gemm(rows, num_experts, shape, dtype, gather, layout, config, generator.randrange(2**20), "cpu")
        check_gather(rows, shape[0], dtype, generator.randrange(2**20), "cpu")
        check_wgrad(rows, shape, dtype, config, generator.randrange(2**20), "cpu")
        check_activation_backward(rows, shape[0], dtype, generator.randrange(2**20), "cpu")


def table_of(tiles: list[list[int]], num_tiles: int, row_ids: list[int], block_rows: int) -> TileTable:
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in (tiles, [num_tiles], row_ids)]
    return make_table(*ints, block_rows)


def example_table() -> TileTable:
    return table_of([[0, 0, 2, 0], [3, 4, 1, 0], [9, 9, 9, 9]], 2, [0] * 8, 4)


def gemm(**changes: Any) -> None:
    given = dict(a=torch.zeros(8, 32), b=torch.zeros(2, 48, 32), out=torch.zeros(8, 48), layout="nk") | changes
    group_gemm(**given, table=example_table(), gather=False, config=SMALL)


def wgrad(**changes: Tensor) -> None:
    given = dict(a=torch.zeros(8, 32), b=torch.zeros(8, 48), out=torch.zeros(2, 32, 48), counts=torch.zeros(2).int())
    a, b, out, counts = (given | changes).values()
    group_gemm_wgrad(a, b, out, counts, counts, config=SMALL)


def backward(ffn: int = 16, block_rows: int = 8, hidden_rows: int = 8) -> None:
    table, slots = replace(example_table(), block_rows=block_rows), torch.zeros(8, dtype=torch.int32)
    outs = torch.zeros(8, 2 * ffn), torch.zeros(hidden_rows, ffn), torch.zeros(4, 2)
    activation_backward(torch.zeros(8, 2 * ffn), torch.zeros(8, ffn), slots, torch.zeros(4, 2), table, *outs)


def gather(rows: Tensor, out: Tensor, own: Tensor | None = None) -> None:
    table = table_of([[0, 0, 2, 0]], 1, [0] * 8, 16)
    gather_rows(rows, out, table.row_ids, table, None if own is None else OwnRows(rows=own, first=0))


ROWS, OUT = torch.zeros(4, 32), torch.zeros(8, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gemm(layout="mn"), "layout='mn' must be 'nk' or 'kn'"),
        (lambda: gemm(layout="kn"), r"a of shape \(8, 32\), .* must be contiguous of shape \(8, 48\)"),
        (lambda: gemm(out=OUT), r"out of shape \(8, 32\), .* must be contiguous of shape \(8, 48\)"),
        (lambda: gemm(b=torch.zeros(2, 40, 32), out=torch.zeros(8, 40)), "N=40 must be a positive multiple of 16"),
        (lambda: gemm(a=torch.zeros(8, 24), b=torch.zeros(2, 48, 24)), "K=24 must be a positive multiple of 16"),
        (lambda: gemm(a=torch.zeros(32, 8).T), r"a of shape \(8, 32\), strides \(1, 8\) must be contiguous"),
        (lambda: wgrad(a=OUT[:7]), r"b of shape \(8, 48\), .* must be contiguous of shape \(7, 48\)"),
        (lambda: wgrad(out=torch.zeros(2, 32, 32)), r"b of shape \(8, 48\), .* must be contiguous of shape \(8, 32\)"),
        (
            lambda: wgrad(a=torch.zeros(8, 24), out=torch.zeros(2, 24, 48)),
            "columns of a=24 must be a positive multiple",
        ),
        (lambda: wgrad(counts=torch.zeros(1).int()), r"segment_counts of shape \(1,\), .* of shape \(2,\)"),
        (lambda: backward(hidden_rows=7), r"weighted_hidden of shape \(7, 16\), .* contiguous of shape \(8, 16\)"),
        (lambda: backward(ffn=24), "F=24 must be a positive multiple of 16"),
        (lambda: backward(block_rows=12), "block_rows=12 must be a multiple of 8"),
        (lambda: gather(ROWS, OUT[:7]), r"out of shape \(7, 32\), .* must be contiguous of shape \(8, 32\)"),
        (lambda: gather(torch.zeros(4, 16), OUT), r"out of shape \(8, 32\), .* of shape \(8, 16\)"),
        (lambda: gather(ROWS.half(), OUT), "dtypes of rows=torch.float16, .* and out=torch.float32 must be one"),
        (
            lambda: gather(torch.zeros(4, 24), torch.zeros(8, 24)),
            "columns of rows=24 must be a positive multiple of 16",
        ),
        (lambda: gather(ROWS, OUT, ROWS[:, :16]), r"own rows of shape \(4, 16\), .* of shape \(4, 32\)"),
        (lambda: gather(ROWS, OUT, ROWS.half()), "own rows=torch.float16 and out=torch.float32 must be one"),
        (
            lambda: gather(ROWS, OUT, torch.zeros(32, 4).T),
            r"own rows of shape \(4, 32\), strides \(1, 4\) must be cont",
        ),
        (lambda: gather(torch.zeros(32, 4).T, OUT), r"rows of shape \(4, 32\), strides \(1, 4\) must be contiguous"),
    ],
)
def test_the_wrong_argument_is_named(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_without_capacity_launch_nothing():
    table = example_table()
    empty = torch.zeros(0, 32)
    group_gemm(empty, torch.zeros(2, 48, 32), torch.zeros(0, 48), table, gather=False, layout="nk", config=SMALL)
    out = torch.ones(2, 32, 32)
    counts = torch.zeros(2, dtype=torch.int32)
    group_gemm_wgrad(empty, empty, out, counts, counts, config=SMALL)
    assert (out == 0).all()


@in_ranks(1, interpret=True)
def test_number_of_persistent_blocks(rank: int, world_size: int) -> None:
    assert [num_blocks(torch.device("cpu"), items) for items in (9, 2, 0)] == [3, 2, 1]
