"""Decode over ranks: real processes, the kernels under the interpreter, late ranks and ranks that never come."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase
from decode_ranks import assert_ranks_agree, compare_step, late_message, run_steps, shard, step_inputs, three_steps
from ranks import run_ranks

from comet.comm import LocalCommunicator
from comet.comm.failures import Board
from comet.decode import RankDecode, rank_slots
from comet.decode.ranks import receive_bytes
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


def runs_on(rank: int, world_size: int) -> str:
    """Rank 0 meets its deadline in step 3 and runs on; rank 1, late, gets the sums of that step and then misses it."""
    decode, weights = three_steps(rank, FOLDED, replicated=True)
    decode.comm.board = Board.alone()  # else rank 0 would be refused, and rank 1 as well
    if rank == 0:
        for step in range(3, 7):  # words of steps 3 and 5, of 4 and 6 have the same places
            message = late_message(decode, weights, FOLDED, step)
            assert re.match(r"rank 0 waited 0.2 s for rank 1 .*epoch 4, saw 2", message)
            decode.comm.board.clear()
    dist.barrier()
    message = ""
    if rank == 1:
        inputs = step_inputs(FOLDED, 3, 1, torch.float32)
        compare_step(FOLDED, decode(*inputs, weights, config=FOLD), inputs, torch.float32, "the step rank 0 gave up in")
        message = late_message(decode, weights, FOLDED, 4)
    dist.barrier()
    return message


def test_a_rank_that_met_its_deadline_sends_no_more() -> None:
    message = run_ranks(runs_on, 2, interpret=True, timeout=300)[1]
    pattern = r"rank 1 waited 0.2 s for rank 0 \(decode all-reduce, block 0, epoch 5, saw 3\)"
    assert re.fullmatch(pattern, message), message


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
