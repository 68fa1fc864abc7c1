"""Functions that each rank runs in a test of decode over ranks."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from decode_cases import DecodeCase, Inputs, draw_experts, draw_ids
from gemm_cases import assert_as_good, chain_of
from torch import Tensor

from comet.comm import Communicator, make_communicator
from comet.decode import DecodeScratch, DecodeWeights, RankDecode, rank_slots
from comet.errors import CommTimeoutError
from comet.kernels.decode.step import Batch
from comet.layout import ExpertLayout
from comet.reference.layer import shard_experts


@cache
def full_weights(case: DecodeCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw_experts(case, dtype)


def step_inputs(case: DecodeCase, step: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and routing weights of one step, equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    ids = draw_ids(replace(case, T=num_tokens), generator)
    tokens = torch.randn(num_tokens, case.D, generator=generator).to(dtype)
    return tokens, ids, torch.rand(num_tokens, case.K, generator=generator) + 0.1


def shard(case: DecodeCase, layout: ExpertLayout, dtype: torch.dtype, device: str) -> DecodeWeights:
    w1, w2 = shard_experts(*full_weights(case, dtype), layout)
    return DecodeWeights(w1=w1.contiguous().to(device), w2=w2.contiguous().to(device), slots=rank_slots(layout, device))


def open_rank(
    rank: int, world_size: int, case: DecodeCase, tp: int, dtype: torch.dtype, device: str
) -> tuple[Communicator, DecodeWeights]:
    comm = make_communicator("auto", dist.group.WORLD, device, timeout_s=60.0)
    layout = ExpertLayout(num_experts=case.E, top_k=case.K, ep=world_size // tp, tp=tp, rank=rank)
    return comm, shard(case, layout, dtype, device)


def gathered_inputs(case: DecodeCase, step: int, counts: tuple[int, ...], dtype: torch.dtype) -> list[Batch]:
    """Return the batches of all ranks for a step in which rank r has ``counts[r]`` tokens."""
    return [Batch(*step_inputs(case, 100 * step + rank, count, dtype)) for rank, count in enumerate(counts)]


def on_device(batch: Batch, device: str) -> Batch:
    return Batch(*(tensor.to(device) for tensor in batch))


def padded(batches: list[Batch], max_tokens: int) -> Batch:
    """The batch that a gather makes of them: ``max_tokens`` of every rank, absent ones without experts."""
    device, size = batches[0].tokens.device, batches[0].tokens.shape[1]
    tokens = torch.zeros(len(batches), max_tokens, size, dtype=batches[0].tokens.dtype, device=device)
    ids = torch.full((len(batches), max_tokens, batches[0].ids.shape[1]), -1, dtype=torch.int32, device=device)
    weights = torch.ones(ids.shape, device=device)
    for rank, batch in enumerate(batches):
        for target, source in zip((tokens, ids, weights), batch, strict=True):
            target[rank, : source.shape[0]] = source
    return Batch(tokens.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1))


def run_steps(
    rank: int,
    world_size: int,
    case: DecodeCase,
    tp: int,
    counts: Sequence[int] | Sequence[tuple[int, ...]],
    use_kernels: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    delay_s: float = 0.0,
) -> list[Tensor]:
    """Steps one after the other without a barrier, checked against the oracle afterwards; returns the outputs.

    ``counts`` are the tokens of each step; or of each rank in each step: these are gathered, which must give the bits
    of a step in which all of them are replicated.
    """
    comm, weights = open_rank(rank, world_size, case, tp, dtype, device)
    of_ranks = [(count,) if isinstance(count, int) else count for count in counts]
    replicated, most = isinstance(counts[0], int), max(map(max, of_ranks))
    batches = [gathered_inputs(case, step, of_step, dtype) for step, of_step in enumerate(of_ranks)]
    own, all_tokens = 0 if replicated else rank, most * len(of_ranks[0])
    sizes = dict(hidden_size=case.D, use_kernels=use_kernels)
    decode = RankDecode(comm, max_tokens=most, replicated=replicated, **sizes)
    scratch = DecodeScratch.create(weights, case.K, dtype, max_tokens=all_tokens)
    settings = dict(scratch=scratch, config=case.config if use_kernels else None)
    sleeper, outputs = random.Random(rank + case.seed), []
    for step, batch in enumerate(batches):
        if delay_s and sleeper.random() < 0.5:
            time.sleep(sleeper.random() * delay_s)
        tokens, ids, routing_weights = on_device(batch[own], device)
        if step % 2:  # strides and types a caller may have
            tokens, ids, routing_weights = tokens.t().contiguous().t(), ids.long(), routing_weights.t().contiguous().t()
        outputs.append(decode(tokens, ids, routing_weights, weights, **settings))
    decode.check()
    whole = None if replicated else RankDecode(comm, max_tokens=all_tokens, **sizes)
    for step, (output, batch) in enumerate(zip(outputs, batches, strict=True)):
        who = f"{case.name}, seed {case.seed}, step {step} of {counts}, rank {rank} of {world_size}, tp {tp}"
        if whole is not None:
            wanted = whole(*on_device(padded(batch, most), device), weights, **settings)
            assert torch.equal(output, wanted[rank * most :][: len(output)]), f"{who}: other bits than replicated"
        compare_step(case, output, batch[own], dtype, who)
    comm.barrier()
    comm.close()
    return [output.cpu() for output in outputs]


def draw_counts(world_size: int, most: int, steps: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Tokens of every rank in every step, often none."""
    generator = random.Random(seed)
    return tuple(tuple(max(0, generator.randint(-1, most)) for _ in range(world_size)) for _ in range(steps))


def compare_step(
    case: DecodeCase, output: Tensor, inputs: tuple[Tensor, Tensor, Tensor] | Batch, dtype: torch.dtype, who: str
) -> None:
    """A step against one process that holds all experts, in the same type and in float64."""
    tokens, ids, routing_weights = (tensor.to(output.device) for tensor in inputs)
    w1, w2 = (weight.to(output.device) for weight in full_weights(case, dtype))
    slots = torch.arange(case.E, dtype=torch.int32, device=output.device)
    given = Inputs(tokens, ids, ids, routing_weights, DecodeWeights(w1=w1, w2=w2, slots=slots))
    assert_as_good(who, output, given.twin(), given.double().twin(), chain=chain_of(max(case.D, case.F), dtype))


def three_steps(rank: int, case: DecodeCase, *, replicated: bool) -> tuple[RankDecode, DecodeWeights]:
    """Decode three steps of one token a rank, then shorten the deadline, which starting the ranks would exceed."""
    comm, weights = open_rank(rank, 2, case, 1, torch.float32, "cpu")
    decode = RankDecode(comm, hidden_size=case.D, max_tokens=1, replicated=replicated, use_kernels=True)
    for step in range(3):
        decode(*step_inputs(case, step, 1, torch.float32), weights, config=case.config)
    dist.barrier()
    comm.timeout_s = 0.2
    return decode, weights


def late_message(decode: RankDecode, weights: DecodeWeights, case: DecodeCase, step: int = 3) -> str:
    """Return the message of a step that another rank does not join."""
    with pytest.raises(CommTimeoutError) as caught:
        decode(*step_inputs(case, step, 1, torch.float32), weights, config=case.config)
    return str(caught.value)


def assert_ranks_agree(outputs: list[list[Tensor]]) -> None:
    for rank, of_rank in enumerate(outputs):
        for step, (mine, first) in enumerate(zip(of_rank, outputs[0], strict=True)):
            assert torch.equal(mine, first), f"step {step}: rank {rank} has other bits than rank 0"
