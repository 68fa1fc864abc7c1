"""Gradients of layer 0's tokens in CUDA C++: bit for bit those of the Triton twin, of all ranks emulated on one GPU."""

from __future__ import annotations

import random

import pytest
import torch
from emulated_cases import LAYER1, draw_layer1
from emulated_ranks import EmulatedCase
from gradient_launches import exact_gradients, run_gradients

pytestmark = pytest.mark.gpu


def check(case: EmulatedCase) -> None:
    found, twin = run_gradients(case, "cuda"), run_gradients(case, "triton")
    rounding = 3 * torch.finfo(case.dtype).eps / 2  # of rows of y, partial sums and the result
    for rank, ((exact, size, weights), mine, other) in enumerate(zip(exact_gradients(case), found, twin, strict=True)):
        for name, one, two in zip(("tokens", "routing weights"), mine, other, strict=True):
            assert torch.equal(one, two), f"{name} of rank {rank} of {case}"
        excess = (mine[0].double() - exact).abs() - (1.1 * rounding * size + 4e-9 * case.ffn_size + 1e-6)
        assert not (excess > 0).any(), f"rank {rank} of {case}: {excess.max()} past the limit"
        assert torch.allclose(mine[1].double(), weights, rtol=1e-5, atol=1e-5), f"rank {rank} of {case}"


@pytest.mark.parametrize("case", LAYER1, ids=lambda case: case.name)
def test_equal_their_twin(case: EmulatedCase) -> None:
    check(case)


def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(8):
        check(draw_layer1(draw, seed + number))
