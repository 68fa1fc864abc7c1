"""The whole routed-experts layer over NVLink, forward and backward, against the single-process oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_cases import LayerCase
from layer_ranks import run_case
from ranks import run_ranks
from stream_cases import assert_same, make_pair, make_tokens, train_step

BF16 = dict(dtype=torch.bfloat16, block_rows=128)
CASES = [
    LayerCase("ep2", 2, 1, (700, 700), 8, 2, 512, 512, **BF16, calls=4),
    LayerCase("ep2 unequal", 2, 1, (900, 5), 8, 4, 256, 128, **BF16),
    LayerCase("ep2 none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128, **BF16),
    LayerCase("ep2 one expert", 2, 1, (300, 200), 8, 2, 256, 128, routing="one", **BF16),
    LayerCase("ep2 masked", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked", **BF16),
    LayerCase("tp2", 1, 2, (310, 290), 8, 2, 512, 512, **BF16),
    LayerCase("tp2 of 24 columns", 1, 2, (310, 290), 8, 2, 256, 48, **BF16),
    LayerCase("ep4", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, **BF16, num_phases=3, calls=4),
    LayerCase("tp4", 1, 4, (100, 120, 90, 80), 8, 2, 256, 512, **BF16, calls=3),
    LayerCase("ep2 x tp2", 2, 2, (140, 220, 50, 90), 8, 2, 256, 512, **BF16, num_phases=4, calls=3),
]


def on_gpu(rank: int, world_size: int, case: LayerCase, path: str, delays: bool = False) -> list[torch.Tensor]:
    torch.cuda.set_device(rank)
    return run_case(rank, world_size, case, path, f"cuda:{rank}", delays)


def needs(case: LayerCase) -> None:
    if torch.cuda.device_count() < case.world_size:
        pytest.skip(f"needs {case.world_size} GPUs, found {torch.cuda.device_count()}")


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(case: LayerCase) -> None:
    needs(case)
    run_ranks(on_gpu, case.world_size, case, "fused", backend="cpu:gloo,cuda:nccl", timeout=240)


@pytest.mark.multi_gpu(n=2)
def test_plain_path() -> None:
    case = CASES[0]
    needs(case)
    run_ranks(on_gpu, case.world_size, case, "plain", backend="cpu:gloo,cuda:nccl", timeout=240)


@pytest.mark.multi_gpu(n=2)
def test_many_epochs_with_delayed_ranks_are_bitwise_reproducible() -> None:
    case = replace(CASES[0], calls=40)
    needs(case)
    first, second = (
        run_ranks(on_gpu, 2, case, "fused", delays, backend="cpu:gloo,cuda:nccl", timeout=400)
        for delays in (True, False)
    )
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first[rank], second[rank], strict=True))


def with_streams(rank: int, world_size: int) -> None:
    """The whole layer with its shared expert on a stream of its own, against the same layer one after the other."""
    torch.cuda.set_device(rank)
    layers = make_pair(f"cuda:{rank}", torch.bfloat16, "fused", ep=world_size)
    for seed in range(3):
        tokens = make_tokens(layers.streams, 10 * seed + rank)
        expected = train_step(layers.in_line, tokens, late=False)
        for late in (True, False):
            step = train_step(layers.streams, tokens, late=late)
            assert_same(step, expected, f"rank {rank}, seed {seed}, late={late}")
    layers.streams.group.workspace.check()
    layers.streams.group.close()


@pytest.mark.multi_gpu(n=2)
def test_shared_expert_beside_the_routed_ones() -> None:
    run_ranks(with_streams, 2, backend="cpu:gloo,cuda:nccl", timeout=240)
