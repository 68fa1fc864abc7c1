"""Modular layers over NVLink: every combination against the reference."""

import pytest
import torch
from gpus import ON_GPUS
from layer_cases import LayerCase
from modular_cases import attacks, larger, run_combinations
from ranks import in_ranks


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS, timeout=500)
def test_every_combination(rank: int, world_size: int) -> None:
    cases = [*attacks(2, seed=41), LayerCase("tp2", 1, 2, (31, 0), seed=42, calls=2)]
    run_combinations(rank, world_size, [larger(case, torch.bfloat16) for case in cases], {}, "cuda")
