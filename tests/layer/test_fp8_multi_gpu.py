"""The layer in block FP8 over NVLink, against float64 on the quantised operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpus import ON_GPUS, gpu_of, need_gpus
from kinds import Kind, layer1_in
from layer_cases import LayerCase
from layer_ranks import run_case
from ranks import run_ranks

BF16 = dict(dtype=torch.bfloat16, fp8=True)
CASES = [
    LayerCase("ep2", 2, 1, (700, 700), 8, 2, 512, 512, **BF16, calls=4),
    LayerCase("ep2 unequal", 2, 1, (900, 5), 8, 4, 256, 128, **BF16),
    LayerCase("ep2 none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128, **BF16),
    LayerCase("ep2 masked", 2, 1, (300, 450), 64, 8, 384, 128, routing="masked", **BF16),
    LayerCase("tp2", 1, 2, (310, 290), 8, 2, 512, 512, **BF16),
    LayerCase("ep4", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, **BF16, calls=4),
    LayerCase("ep2 x tp2", 2, 2, (140, 220, 50, 90), 8, 2, 256, 512, **BF16, calls=3),
]


def on_gpu(rank: int, world_size: int, case: LayerCase, layer1: Kind) -> None:
    torch.cuda.set_device(gpu_of(rank))
    for delay_s in (0.0, 0.05) if case.calls > 1 else (0.0,):
        with layer1_in(layer1):
            run_case(rank, world_size, replace(case, delay_s=delay_s), "fused", gpu_of(rank))


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("layer1", ["cuda", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(case: LayerCase, layer1: Kind) -> None:
    """With delays, too, where there are several calls to delay."""
    need_gpus(case.world_size)
    run_ranks(on_gpu, case.world_size, case, layer1, backend=ON_GPUS, timeout=240)
