"""gpt-oss's activation and biases over ranks with GPUs, in CUDA C++: under TP only a shard's first rank adds b2."""

from __future__ import annotations

import pytest
import torch
from activation_cases import NAMES
from activation_layers import NAMES as TENSORS
from activation_layers import expected, run_case
from gpus import ON_GPUS, gpu_of, need_gpus
from kinds import layer0_in, layer1_in
from ranks import run_ranks
from torch import Tensor

from comet.config import ParallelConfig

GPT_OSS = NAMES.index("clamped_swiglu")


def on_gpu(rank: int, world_size: int, ep: int, tp: int) -> list[Tensor]:
    torch.cuda.set_device(gpu_of(rank))
    with layer0_in("cuda") as layer0, layer1_in("cuda") as layer1:
        parallel = ParallelConfig(ep=ep, tp=tp)
        found = run_case(rank, "fused", parallel, GPT_OSS, 48, gpu_of(rank), dtype=torch.bfloat16)
    assert (layer0.call_count, layer1.call_count) == (1, 2)
    return found


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_output_and_gradients(ep: int, tp: int) -> None:
    need_gpus(ep * tp)
    found, wanted = run_ranks(on_gpu, ep * tp, ep, tp, backend=ON_GPUS), expected(GPT_OSS, 48, ep, tp)
    for rank, tensors in enumerate(found):
        for name, got, want in zip(TENSORS, tensors, wanted[rank], strict=True):
            error = (got.double() - want).norm() / want.norm()
            assert error < 4 * torch.finfo(torch.bfloat16).eps, f"rank {rank}, {name}: {error}"
