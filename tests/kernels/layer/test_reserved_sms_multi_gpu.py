"""A collective of NCCL on another stream, in another order on either rank: both end, for the layer draws its work."""

import pytest
import torch
import torch.distributed as dist
from gpus import ON_GPUS
from ranks import in_ranks

from comet import MoE, MoEConfig, ParallelConfig, make_expert_group

CONFIG = MoEConfig(hidden_size=2048, ffn_size=768, num_experts=16, top_k=8)
NUM_TOKENS = 2048
CALLS = 5


def reduce_on(side: torch.cuda.Stream, gradients: torch.Tensor) -> None:
    with torch.cuda.stream(side):
        dist.all_reduce(gradients)


@pytest.mark.multi_gpu(n=2, own=True)  # NCCL
@pytest.mark.parametrize("spare", [0, 32])
@in_ranks(2, backend=ON_GPUS, timeout=120)
def test_a_collective_that_came_first_on_one_rank(rank: int, world_size: int, spare: int) -> None:
    device, bf16 = "cuda", torch.bfloat16
    group = make_expert_group(
        CONFIG, ParallelConfig(ep=world_size), max_tokens=NUM_TOKENS, dtype=bf16, device=device, timeout_s=20.0,
        reserved_sms=spare,
    )  # fmt: skip
    layer = MoE(CONFIG, group, path="fused", param_dtype=bf16)
    x = torch.randn(NUM_TOKENS, CONFIG.hidden_size, device=device, dtype=bf16)
    gradients, side = torch.ones(2**26, device=device), torch.cuda.Stream()
    dist.all_reduce(gradients)
    with torch.no_grad():
        wanted = layer(x)[0].clone()
        torch.cuda.synchronize()
        for call in range(CALLS):
            gradients.fill_(1)
            torch.cuda.synchronize()
            if rank == call % world_size:  # here the collective comes first, and has its SMs
                reduce_on(side, gradients)
            dist.all_reduce(torch.ones(1))  # on the hosts; afterwards the collective runs on that rank
            found = layer(x)[0]
            if rank != call % world_size:
                reduce_on(side, gradients)
            torch.cuda.synchronize()
            group.workspace.check()
            assert torch.equal(found, wanted), f"call {call}"
            assert (gradients == world_size).all(), f"call {call}"
    group.close()
