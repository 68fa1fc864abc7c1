"""Modular layers over NVLink: every combination against the reference."""

import pytest
import torch
from gpus import ON_GPUS
from layer_cases import LayerCase
from modular_cases import attacks, check_fp8_rows, larger, run_combinations
from ranks import in_ranks

from comet.modular import SymmetricContiguous


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS, timeout=500)
def test_every_combination(rank: int, world_size: int) -> None:
    cases = [*attacks(2, seed=41), LayerCase("tp2", 1, 2, (31, 0), seed=42, calls=2)]
    run_combinations(rank, world_size, [larger(case, torch.bfloat16) for case in cases], {}, "cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = LayerCase("rows", 2, 1, (300, 129), 4, 4, 2080, 64, dtype=dtype, seed=43)
        check_fp8_rows(case, rank, SymmetricContiguous, "cuda")
