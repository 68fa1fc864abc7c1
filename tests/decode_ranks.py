"""What each rank does in a test of decode over ranks."""

from __future__ import annotations

import random
import time
from functools import cache

import torch
import torch.distributed as dist
from decode_cases import DecodeCase, draw_ids
from gemm_cases import assert_as_good
from torch import Tensor

from comet.comm import make_communicator
from comet.decode import DecodeScratch, DecodeWeights, RankDecode, rank_slots, warp_decode_torch
from comet.layout import ExpertLayout
from comet.reference import shard_experts


@cache
def full_weights(case: DecodeCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    w1 = torch.randn(case.E, 2 * case.F, case.D, generator=generator) / case.D**0.5
    w2 = torch.randn(case.E, case.D, case.F, generator=generator) / case.F**0.5
    return w1.to(dtype), w2.to(dtype)


def step_inputs(case: DecodeCase, step: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and routing weights of one step, equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    of_step = DecodeCase(
        name=case.name, T=num_tokens, K=case.K, E=case.E, D=case.D, F=case.F, routing=case.routing, seed=case.seed
    )
    ids = draw_ids(of_step, generator)
    tokens = torch.randn(num_tokens, case.D, generator=generator).to(dtype)
    return tokens, ids, torch.rand(num_tokens, case.K, generator=generator) + 0.1


def shard(case: DecodeCase, layout: ExpertLayout, dtype: torch.dtype, device: str) -> DecodeWeights:
    w1, w2 = shard_experts(*full_weights(case, dtype), layout)
    return DecodeWeights(w1=w1.contiguous().to(device), w2=w2.contiguous().to(device), slots=rank_slots(layout, device))


def run_steps(
    rank: int,
    world_size: int,
    case: DecodeCase,
    tp: int,
    num_tokens: tuple[int, ...],
    use_kernels: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    delay_s: float = 0.0,
) -> list[Tensor]:
    """Steps one after the other without a barrier, checked against the oracle afterwards; returns the outputs."""
    comm = make_communicator("auto", dist.group.WORLD, device, timeout_s=60.0)
    layout = ExpertLayout(num_experts=case.E, top_k=case.K, ep=world_size // tp, tp=tp, rank=rank)
    weights = shard(case, layout, dtype, device)
    decode = RankDecode(comm, hidden_size=case.D, max_tokens=max(num_tokens), use_kernels=use_kernels)
    scratch = DecodeScratch.create(weights, case.K, dtype, max_tokens=max(num_tokens))
    sleeper, outputs = random.Random(rank + case.seed), []
    for step, count in enumerate(num_tokens):
        if delay_s and sleeper.random() < 0.5:
            time.sleep(sleeper.random() * delay_s)
        inputs = (tensor.to(device) for tensor in step_inputs(case, step, count, dtype))
        outputs.append(decode(*inputs, weights, scratch=scratch, config=case.config if use_kernels else None))
    decode.check()
    comm.barrier()
    comm.close()
    for step, (output, count) in enumerate(zip(outputs, num_tokens, strict=True)):
        who = f"{case.name}, seed {case.seed}, step {step}, rank {rank} of {world_size}, tp {tp}"
        compare_step(case, output, step_inputs(case, step, count, dtype), dtype, who)
    return [output.cpu() for output in outputs]


def compare_step(
    case: DecodeCase, output: Tensor, inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, who: str
) -> None:
    """A step against one process that holds all experts, in the same type and in float64."""
    device = output.device
    tokens, ids, routing_weights = (tensor.to(device) for tensor in inputs)
    w1, w2 = (weight.to(device) for weight in full_weights(case, dtype))
    slots = torch.arange(case.E, dtype=torch.int32, device=device)
    plain = warp_decode_torch(tokens, ids, routing_weights, DecodeWeights(w1=w1, w2=w2, slots=slots))
    exact = DecodeWeights(w1=w1.double(), w2=w2.double(), slots=slots)
    assert_as_good(who, output, plain, warp_decode_torch(tokens.double(), ids, routing_weights.double(), exact))


def assert_ranks_agree(outputs: list[list[Tensor]]) -> None:
    for rank, of_rank in enumerate(outputs):
        for step, (mine, first) in enumerate(zip(of_rank, outputs[0], strict=True)):
            assert torch.equal(mine, first), f"step {step}: rank {rank} has other bits than rank 0"
