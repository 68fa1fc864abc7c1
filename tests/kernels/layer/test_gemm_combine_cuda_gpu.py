"""Layer 1 in CUDA C++: bit for bit what its Triton twin computes, for all ranks of a group emulated on one GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from emulated_cases import LAYER1, draw_layer1
from emulated_ranks import EmulatedCase
from gradient_launches import run_gradients
from layer1_launches import exact_layer1, run_layer1


def check(case: EmulatedCase) -> None:
    found, twin = run_layer1(case, "cuda"), run_layer1(case, "triton")
    # Outputs of experts, partial sums and the result are rounded once each.
    rounding = 3 * torch.finfo(case.dtype).eps / 2
    for rank, ((exact, size), mine, other) in enumerate(zip(exact_layer1(case), found, twin, strict=True)):
        assert torch.equal(mine, other), f"rank {rank} of {case}"
        excess = (
            ((mine.double() - exact).abs() - (1.1 * rounding * size + 4e-9 * case.ffn_size + 1e-6)).max()
            if mine.numel()
            else 0
        )
        assert excess <= 0, f"rank {rank} of {case}: {excess} past the limit"


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYER1, ids=lambda case: case.name)
def test_equals_its_twin(case: EmulatedCase) -> None:
    check(case)


SPLITS = (
    EmulatedCase("split", 4, 1, (500, 90, 0, 710), 16, 4, 768, 256, num_panels=3),
    EmulatedCase("split", 2, 1, (2500, 1800), 8, 2, 1280, 256, dtype=torch.float16),
    EmulatedCase("split alone", 1, 1, (700,), 8, 2, 512, 256, num_panels=1),
)


@pytest.mark.gpu
@pytest.mark.parametrize("comm_blocks", [1, 4, 16, 1000])
@pytest.mark.parametrize("case", SPLITS)
def test_blocks_that_only_combine_change_no_bit(case: EmulatedCase, comm_blocks: int) -> None:
    """Also where all blocks but two do."""
    split = replace(case, comm_blocks=comm_blocks)
    for run in (run_layer1, run_gradients):
        for found, twin in zip(run(split, "cuda"), run(case, "triton"), strict=True):
            for mine, other in zip(*([each] if torch.is_tensor(each) else each for each in (found, twin)), strict=True):
                assert torch.equal(mine, other), split


@pytest.mark.gpu
def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        check(draw_layer1(draw, seed + number))
