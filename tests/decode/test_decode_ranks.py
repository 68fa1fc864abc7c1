"""Decode over ranks: real processes, the kernels under the interpreter, late ranks and ranks that never come."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase
from decode_ranks import assert_ranks_agree, compare_step, run_steps, shard, step_inputs
from ranks import run_ranks

from comet.comm import LocalCommunicator, make_communicator
from comet.comm.failures import Board
from comet.decode import RankDecode, rank_slots
from comet.decode.ranks import receive_bytes
from comet.errors import CommTimeoutError
from comet.kernels.decode.words import push_words, sum_words
from comet.layout import ExpertLayout

EPOCHS = 52
FOLDED = DecodeCase(name="fold", T=1, K=2, E=4, D=16, F=16, config=FOLD, seed=3)


def two_ranks(rank: int, world_size: int) -> list[torch.Tensor]:
    """Expert and tensor parallel, every form, steps of different length behind each other."""
    outputs = run_steps(rank, 2, FOLDED, 1, (1,) * EPOCHS, delay_s=0.01)
    vector = DecodeCase(name="vector", T=2, K=2, E=3, D=16, F=32, config=VECTOR, routing="masked", seed=1)
    outputs += run_steps(rank, 2, vector, 2, (2, 1), delay_s=0.02)
    matrix = DecodeCase(name="matrix", T=3, K=2, E=6, D=272, F=16, config=MATRIX, routing="one", seed=2)
    return outputs + run_steps(rank, 2, matrix, 1, (3, 0, 2), delay_s=0.05)


def four_ranks(rank: int, world_size: int) -> list[torch.Tensor]:
    case = DecodeCase(name="ep2 x tp2", T=3, K=2, E=4, D=16, F=32, config=MATRIX, routing="masked", seed=4)
    return run_steps(rank, 4, case, 2, (3, 1), delay_s=0.05)


@pytest.mark.parametrize(("body", "world_size"), [(two_ranks, 2), (four_ranks, 4)])
def test_kernels_under_the_interpreter(body, world_size: int) -> None:
    assert_ranks_agree(run_ranks(body, world_size, interpret=True, timeout=500))


def twins(rank: int, world_size: int) -> list[torch.Tensor]:
    case = DecodeCase(name="twin", T=9, K=3, E=8, D=32, F=64, routing="masked", seed=5)
    outputs = [run_steps(rank, world_size, case, tp, (9, 0, 1, 4, 9), False) for tp in (1, 2, 4)]
    assert len(outputs) == 3
    return [output for of_layout in outputs for output in of_layout]


def test_twins_of_every_layout() -> None:
    assert_ranks_agree(run_ranks(twins, 4))


# ---- every order that late ranks can cause ---------------------------------------------------------------------------


@triton.jit
def push_kernel(values_ptr, addresses, epoch, rank, max_tokens, D, W: tl.constexpr):
    cols = tl.arange(0, 16)
    token = tl.arange(0, 1)
    values = tl.load(values_ptr + cols)[None, :]
    push_words(values, token, cols, (cols < D)[None, :], addresses, epoch, rank, max_tokens, D, W, False)


@triton.jit
def sum_kernel(out_ptr, addresses, epoch, fault_ptr, timeout_ns, rank, max_tokens, D, W: tl.constexpr):
    sum_words(0, out_ptr, addresses, epoch, fault_ptr, timeout_ns, rank, max_tokens, D, W, 16, True)


def any_legal_order(rank: int, world_size: int, seed: int) -> None:
    """Three ranks in one process: each pushes and sums, step by step; a sum may run once all have pushed its epoch."""
    ranks, steps, sleeper = 3, 12, random.Random(seed)
    words = [torch.zeros(2, ranks, 1, 16, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([each.data_ptr() for each in words])
    values = torch.randn(steps, ranks, 16, generator=torch.Generator().manual_seed(seed))
    fault, pushed, summed = torch.zeros(8, dtype=torch.int64), [0] * ranks, [0] * ranks
    while min(summed) < steps:
        me = sleeper.randrange(ranks)
        if pushed[me] == summed[me] and pushed[me] < steps:
            step = pushed[me]
            push_kernel[(1,)](values[step, me], addresses, step + 1, me, 1, 16, W=ranks)
            pushed[me] += 1
        elif summed[me] < min(pushed):
            step, out = summed[me], torch.empty(1, 16)
            sum_kernel[(1,)](out, addresses, step + 1, fault, 10**9, me, 1, 16, W=ranks)
            wanted = values[step, 0] + values[step, 1] + values[step, 2]
            assert torch.equal(out[0], wanted), f"seed {seed}: rank {me} reads another step's words in step {step}"
            summed[me] += 1
    assert not fault.any()


def test_no_rank_overwrites_what_another_still_reads() -> None:
    run_ranks(any_legal_order, 1, 7, interpret=True)


# ---- a rank that stops -----------------------------------------------------------------------------------------------


def one_rank_stops(rank: int, world_size: int) -> str:
    """Rank 1 leaves after three steps; rank 0 must name it."""
    comm = make_communicator("auto", dist.group.WORLD, "cpu")
    layout = ExpertLayout(num_experts=4, top_k=2, ep=2, tp=1, rank=rank)
    weights = shard(FOLDED, layout, torch.float32, "cpu")
    decode = RankDecode(comm, hidden_size=16, max_tokens=1, use_kernels=True)
    for step in range(3):
        decode(*step_inputs(FOLDED, step, 1, torch.float32), weights, config=FOLD)
    message = ""
    comm.timeout_s = 0.2  # only now: starting the ranks takes longer
    if rank == 0:
        with pytest.raises(CommTimeoutError) as caught:
            decode(*step_inputs(FOLDED, 3, 1, torch.float32), weights, config=FOLD)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_rank_that_stops_is_named() -> None:
    message = run_ranks(one_rank_stops, 2, interpret=True, timeout=300)[0]
    pattern = r"rank 0 waited 0.2 s for rank 1 \(decode all-reduce, block 0, epoch 4, saw 2\)"
    assert re.fullmatch(pattern, message), message


def one_rank_runs_on(rank: int, world_size: int) -> str:
    """Rank 0 meets its deadline in step 3 and runs on; rank 1, late, gets the sums of that step and then misses it."""
    comm = make_communicator("auto", dist.group.WORLD, "cpu", timeout_s=60.0)
    layout = ExpertLayout(num_experts=4, top_k=2, ep=2, tp=1, rank=rank)
    weights = shard(FOLDED, layout, torch.float32, "cpu")
    decode = RankDecode(comm, hidden_size=16, max_tokens=1, use_kernels=True)
    for step in range(3):
        decode(*step_inputs(FOLDED, step, 1, torch.float32), weights, config=FOLD)
    dist.barrier()
    comm.timeout_s = 0.2
    comm.board = Board.alone()  # else rank 0 would be refused, and rank 1 as well
    if rank == 0:
        for step in range(3, 7):  # words of steps 3 and 5, of 4 and 6 have the same places
            with pytest.raises(CommTimeoutError, match=r"rank 0 waited 0.2 s for rank 1 .*epoch 4, saw 2"):
                decode(*step_inputs(FOLDED, step, 1, torch.float32), weights, config=FOLD)
            comm.board.clear()
    dist.barrier()
    message = ""
    if rank == 1:
        inputs = step_inputs(FOLDED, 3, 1, torch.float32)
        compare_step(FOLDED, decode(*inputs, weights, config=FOLD), inputs, torch.float32, "the step rank 0 gave up in")
        with pytest.raises(CommTimeoutError) as caught:
            decode(*step_inputs(FOLDED, 4, 1, torch.float32), weights, config=FOLD)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_rank_that_met_its_deadline_sends_no_more() -> None:
    message = run_ranks(one_rank_runs_on, 2, interpret=True, timeout=300)[1]
    pattern = r"rank 1 waited 0.2 s for rank 0 \(decode all-reduce, block 0, epoch 5, saw 3\)"
    assert re.fullmatch(pattern, message), message


# ---- examples and bad input ------------------------------------------------------------------------------------------


def alone() -> LocalCommunicator:
    return LocalCommunicator(torch.device("cpu"), 1.0)


def test_examples() -> None:
    layout = ExpertLayout(num_experts=8, top_k=2, ep=4, tp=1, rank=1)
    assert rank_slots(layout, "cpu").tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]
    assert receive_bytes(4, 2048) == 8388608
    assert RankDecode(alone(), hidden_size=32, max_tokens=3).words.local.nbytes == receive_bytes(1, 32, 3)


def test_bad_input_is_named() -> None:
    for arguments, message in (
        (dict(hidden_size=24), "D=24 must be a positive multiple of 16"),
        (dict(hidden_size=32, max_tokens=65), "max_tokens=65 must be between 1 and 64"),
        (dict(hidden_size=32, max_tokens=0), "max_tokens=0 must be between 1 and 64"),
    ):
        with pytest.raises(ValueError, match=message):
            RankDecode(alone(), **arguments)
    layout = ExpertLayout(num_experts=4, top_k=2, ep=1, tp=1, rank=0)
    weights = shard(FOLDED, layout, torch.float32, "cpu")
    with pytest.raises(ValueError, match="T=2 tokens must be at most max_tokens=1"):
        RankDecode(alone(), hidden_size=16, max_tokens=1)(*step_inputs(FOLDED, 0, 2, torch.float32), weights)
    with pytest.raises(ValueError, match="D=16 of tokens must be 32"):
        RankDecode(alone(), hidden_size=32)(*step_inputs(FOLDED, 0, 2, torch.float32), weights)
