"""Decode over NVLink: EP, TP and EP x TP against one process that holds all experts, in graphs and with late ranks."""

import pytest
import torch
import torch.distributed as dist
from cache_cases import compare_waves_over_ranks
from decode_cases import DecodeCase
from decode_ranks import (
    assert_ranks_agree,
    compare_step,
    draw_counts,
    gathered_inputs,
    on_device,
    open_rank,
    padded,
    run_steps,
    step_inputs,
)
from gpus import MOST_RANKS, ON_GPUS, num_gpus
from ranks import in_ranks, run_ranks

from comet.decode import DecodeScratch, DecodeWeights, RankDecode
from comet.errors import CommTimeoutError
from comet.kernels.decode.step import Batch

CASE = DecodeCase(name="qwen3-like", T=64, K=8, E=32, D=2048, F=768, routing="masked", seed=1)
# Even, so that the last one runs on negated tokens; ranks that share a GPU take turns many times in each.
REPLAYS = 3000 if num_gpus(own=True) >= MOST_RANKS else 300
STEPS = (1, 8, 32, 64, 0, 2, 1, 17, 33, 3) * 6


def layouts(rank: int, world_size: int, delay_s: float, replicated: bool) -> list[torch.Tensor]:
    """Gathered tokens are checked within: they have the bits of replicated ones."""
    outputs = []
    for tp in (size for size in (1, 2, 4) if world_size % size == 0):
        counts = [STEPS] if replicated else [draw_counts(world_size, most, 30, tp) for most in (1, 4, 64 // world_size)]
        for each in counts:
            outputs += run_steps(rank, world_size, CASE, tp, each, True, torch.bfloat16, "cuda", delay_s)
    return outputs


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts(world_size: int, replicated: bool) -> None:
    late, on_time = (
        run_ranks(layouts, world_size, delay, replicated, backend=ON_GPUS, timeout=400) for delay in (0.005, 0.0)
    )
    if replicated:
        assert_ranks_agree(on_time)
    for rank in range(world_size):
        assert all(torch.equal(*pair) for pair in zip(late[rank], on_time[rank], strict=True)), f"rank {rank}"


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("replicated", [True, False], ids=["replicated", "own tokens"])
def test_steps_from_caches_in_waves(replicated: bool) -> None:
    case = DecodeCase(name="waves", T=16, K=4, E=48, D=512, F=208, seed=6)
    counts = (16, 1, 5, 2, 16) * 20
    run_ranks(compare_waves_over_ranks, 2, case, 5, counts, replicated, torch.device("cuda"), backend=ON_GPUS)


def replay(decode: RankDecode, inputs: Batch, weights: DecodeWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Replays without a barrier; inputs change on the device. Returns the sum of all outputs and the last one."""
    tokens, ids, _ = inputs
    scratch = DecodeScratch.create(weights, CASE.K, torch.bfloat16)
    decode(*inputs, weights, scratch=scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    total = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    with torch.cuda.graph(graph):
        output = decode(*inputs, weights, scratch=scratch)
        total += output.double()
        ids.copy_((ids + 1) % CASE.E)
        tokens.neg_()
    for _ in range(REPLAYS):
        graph.replay()
    decode.check()
    return total, output


def last_of_replays(first: Batch) -> Batch:
    """The inputs of the last replay, on the CPU."""
    return Batch(-first.tokens, (first.ids + REPLAYS - 1) % CASE.E, first.routing_weights)


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("most", [1, 8])
@in_ranks(min(4, num_gpus()), backend=ON_GPUS, timeout=500)
def test_replays_without_a_barrier(rank: int, world_size: int, most: int) -> None:
    """Ranks have different numbers of tokens, one of them none; a last replicated step of all tokens compares."""
    comm, weights = open_rank(rank, world_size, CASE, 1, torch.bfloat16, "cuda")
    batches = gathered_inputs(CASE, 0, tuple(most * r // (world_size - 1) for r in range(world_size)), torch.bfloat16)
    decode = RankDecode(comm, hidden_size=CASE.D, max_tokens=most, replicated=False)
    total, output = replay(decode, on_device(batches[rank], "cuda"), weights)
    compare_step(CASE, output, last_of_replays(batches[rank]), torch.bfloat16, f"the last replay, rank {rank}")
    replicated = RankDecode(comm, hidden_size=CASE.D, max_tokens=world_size * most)
    whole, output = replay(replicated, on_device(padded(batches, most), "cuda"), weights)
    compare_step(CASE, output, last_of_replays(padded(batches, most)), torch.bfloat16, "the last replicated replay")
    mine = whole[rank * most :][: total.shape[0]]
    assert torch.equal(total, mine), f"rank {rank}: other bits than replicated within {REPLAYS} steps"
    others = [torch.empty_like(whole) for _ in range(world_size)]
    dist.all_gather(others, whole)
    assert all(torch.equal(other, whole) for other in others), f"ranks disagree within {REPLAYS} steps"
    comm.barrier()
    comm.close()


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("replicated", "what"), [(True, "all-reduce"), (False, "gather")])
@in_ranks(2, backend=ON_GPUS, timeout=120)
def test_a_rank_that_stops_is_named(rank: int, world_size: int, replicated: bool, what: str) -> None:
    comm, weights = open_rank(rank, 2, CASE, 1, torch.bfloat16, "cuda")
    comm.timeout_s = 2.0
    decode = RankDecode(comm, hidden_size=CASE.D, replicated=replicated)
    inputs = [tensor.cuda() for tensor in step_inputs(CASE, 0, 4, torch.bfloat16)]
    for _ in range(3 if rank else 4):
        decode(*inputs, weights)
    if rank == 0:
        said = rf"^rank 0 waited 2.0 s for rank 1 \(decode {what}, block \d+, epoch 4, saw 2\)$"
        with pytest.raises(CommTimeoutError, match=said):
            decode.check()
    torch.cuda.synchronize()
    dist.barrier()
