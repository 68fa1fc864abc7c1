"""Decode over ranks: real processes, the kernels under the interpreter, tokens of all ranks and of each its own."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase
from decode_ranks import (
    assert_ranks_agree,
    compare_step,
    draw_counts,
    gathered_inputs,
    late_message,
    open_rank,
    padded,
    run_steps,
    shard,
    step_inputs,
    three_steps,
)
from emulated import emulated_group
from ranks import in_ranks, run_ranks

from comet.comm import make_communicator
from comet.comm.failures import Board
from comet.decode import DecodeScratch, DecodeWeights, RankDecode, rank_slots
from comet.decode.ranks import TokenGather, gather_bytes, receive_bytes
from comet.errors import StepFailedError
from comet.kernels.decode import warp_decode
from comet.layout import ExpertLayout

FOLDED = DecodeCase(name="fold", T=1, K=2, E=4, D=16, F=16, config=FOLD, routing="masked", seed=3)
VECTORS = DecodeCase(name="vector", T=2, K=2, E=3, D=16, F=32, config=VECTOR, routing="masked", seed=1)
MATRICES = DecodeCase(name="matrix", T=3, K=2, E=6, D=272, F=16, config=MATRIX, routing="one", seed=2)
WIDE = DecodeCase(name="two blocks a token", T=1, K=1, E=2, D=528, F=16, config=MATRIX, seed=6)
EP_TP = DecodeCase(name="ep2 x tp2", T=3, K=2, E=4, D=16, F=32, config=MATRIX, routing="masked", seed=4)
TWIN = DecodeCase(name="twin", T=9, K=3, E=8, D=32, F=64, routing="masked", seed=5)
# Case, TP, and the tokens of steps behind each other, of all ranks or of each; expert and tensor parallel, every form.
Steps = Sequence[tuple[DecodeCase, int, Sequence[Any]]]
TWO: Steps = [(FOLDED, 1, (1,) * 12), (VECTORS, 2, (2, 1)), (MATRICES, 1, (3, 0, 2))]
TWO_GATHER: Steps = [
    (FOLDED, 1, draw_counts(2, 1, 12, 3)),
    (VECTORS, 2, ((1, 1), (0, 1), (0, 0))),
    (MATRICES, 1, ((3, 1), (0, 2), (0, 0), (1, 3))),
    (WIDE, 1, ((1, 0), (1, 1))),
]
FOUR: Steps = [(EP_TP, 2, (3, 1))]
FOUR_GATHER: Steps = [(replace(EP_TP, routing="one"), 2, ((3, 0, 1, 2), (0, 0, 0, 1)))]
TWINS: Steps = [(TWIN, tp, (9, 0, 1, 4, 9)) for tp in (1, 2, 4)]
TWINS_GATHER: Steps = [(TWIN, tp, draw_counts(4, 9, 5, tp)) for tp in (1, 2, 4)]


def steps(rank: int, world_size: int, table: Steps, use_kernels: bool) -> list[torch.Tensor]:
    outputs = [run_steps(rank, world_size, *of_case, use_kernels, delay_s=0.02) for of_case in table]
    return [output for of_case in outputs for output in of_case]


@pytest.mark.parametrize(("world_size", "table"), [(2, TWO), (2, TWO_GATHER), (4, FOUR), (4, FOUR_GATHER)])
def test_kernels_under_the_interpreter(world_size: int, table: Steps) -> None:
    outputs = run_ranks(steps, world_size, table, True, interpret=True, timeout=500)
    if table in (TWO, FOUR):
        assert_ranks_agree(outputs)


@pytest.mark.parametrize("table", [TWINS, TWINS_GATHER])
def test_twins_of_every_layout(table: Steps) -> None:
    outputs = run_ranks(steps, 4, table, False)
    if table is TWINS:
        assert_ranks_agree(outputs)


@in_ranks(2, interpret=True)
def test_layers_of_other_sizes_share_an_object(rank: int, world_size: int) -> None:
    """One object serves layers of another K and type, whose words overlap in memory."""
    comm = make_communicator("auto", dist.group.WORLD, "cpu", timeout_s=60.0)
    for use_kernels in (True, False):
        arguments = dict(hidden_size=16, use_kernels=use_kernels)
        decode = RankDecode(comm, max_tokens=2, replicated=False, **arguments)
        replicated = RankDecode(comm, max_tokens=4, **arguments)
        for step in range(6):
            dtype, counts = (torch.float32, torch.float16)[step % 2], (step % 3, (step + 1) % 3)
            case = DecodeCase(name="layer", T=2, K=1 + step % 3, E=4, D=16, F=16, seed=step)
            layout = ExpertLayout(num_experts=4, top_k=case.K, ep=2, tp=1, rank=rank)
            weights, batches = shard(case, layout, dtype, "cpu"), gathered_inputs(case, step, counts, dtype)
            config = MATRIX if use_kernels else None
            wanted = replicated(*padded(batches, 2), weights, config=config)[2 * rank :][: counts[rank]]
            assert torch.equal(decode(*batches[rank], weights, config=config), wanted), f"step {step}, rank {rank}"


# ---- a rank that stops -----------------------------------------------------------------------------------------------


def stops_before_a_step(rank: int, decode: RankDecode, weights: DecodeWeights) -> str:
    return late_message(decode, weights, FOLDED) if rank == 0 else ""


def wait_long_for_tokens() -> None:
    gather = warp_decode.gather
    warp_decode.gather = lambda step, buffer, dependent: gather(
        step, replace(buffer, timeout_ns=60 * 10**9), dependent=dependent
    )


def stops_within_a_step(rank: int, decode: RankDecode, weights: DecodeWeights) -> str:
    """Rank 1 sends its token and computes, but sends no sums."""
    wait_long_for_tokens()
    if rank == 0:
        return late_message(decode, weights, FOLDED)
    warp_decode._down = lambda *_: None
    decode(*step_inputs(FOLDED, 3, 1, torch.float32), weights, config=FOLD)
    return ""


def met_a_deadline(rank: int, decode: RankDecode, weights: DecodeWeights) -> str:
    """Rank 1 has given up in an earlier step: whatever it has of a token, it sends no sums of it."""
    wait_long_for_tokens()
    if rank == 1:
        decode.fault[0] = 1
        assert decode.gather is not None
        while (decode.gather.words.local[0, 0, 0, [0, 15, -4, -1]] >> 32).min() < 4:
            time.sleep(0.01)
    return late_message(decode, weights, FOLDED)


def runs_on(rank: int, decode: RankDecode, weights: DecodeWeights) -> str:
    """Rank 0 meets its deadline in step 3 and runs on; rank 1, late, gets the sums of that step and then misses it."""
    decode.comm.board = Board.alone()  # else rank 0 would be refused, and rank 1 as well
    message = ""
    if rank == 0:
        for step in range(3, 7):  # words of steps 3 and 5, of 4 and 6 have the same places
            message = late_message(decode, weights, FOLDED, step)
            assert re.match(r"rank 0 waited 0.2 s for rank 1 .*epoch 4, saw 2", message)
            decode.comm.board.clear()
    dist.barrier()
    if rank == 1:
        inputs = step_inputs(FOLDED, 3, 1, torch.float32)
        compare_step(FOLDED, decode(*inputs, weights, config=FOLD), inputs, torch.float32, "the step rank 0 gave up in")
        later = late_message(decode, weights, FOLDED, 4)
        assert later == "rank 1 waited 0.2 s for rank 0 (decode all-reduce, block 0, epoch 5, saw 3)"
    return message


@pytest.mark.parametrize(
    ("body", "replicated", "what"),
    [
        (stops_before_a_step, False, "gather, block 1"),
        (stops_before_a_step, True, "all-reduce, block 0"),
        (stops_within_a_step, False, "all-reduce, block 0"),
        (met_a_deadline, False, "all-reduce, block 0"),
        (runs_on, True, "all-reduce, block 0"),
    ],
)
@in_ranks(2, interpret=True)
def test_a_rank_that_stops_is_named(
    rank: int, world_size: int, body: Callable[[int, RankDecode, DecodeWeights], str], replicated: bool, what: str
) -> None:
    message = body(rank, *three_steps(rank, FOLDED, replicated=replicated))
    dist.barrier()
    said = rf"rank 0 waited 0.2 s for rank 1 \(decode {what}, epoch 4, saw 2\)($|; .* failed on rank 1 )"
    assert rank == 1 or re.match(said, message), message


# ---- examples and bad input ------------------------------------------------------------------------------------------


def test_examples() -> None:
    layout = ExpertLayout(num_experts=8, top_k=2, ep=4, tp=1, rank=1)
    assert rank_slots(layout, "cpu").tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]
    assert (receive_bytes(4, 2048), gather_bytes(4, 2048, 16)) == (8388608, 2162688)
    comm = emulated_group(4, "cpu")[1]
    assert TokenGather(comm, hidden_size=32, max_tokens=3).words.local.nbytes == gather_bytes(4, 32, 3)
    assert RankDecode(comm, hidden_size=32, max_tokens=3).words.local.nbytes == receive_bytes(4, 32, 3)
    assert RankDecode(comm, hidden_size=32, replicated=False).max_tokens == 16


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (1, dict(hidden_size=24), "D=24 must be at least 16 and a multiple of 16"),
        (1, dict(max_tokens=65), "max_tokens=65 must be at least 1 and at most 64"),
        (1, dict(max_tokens=0), "max_tokens=0 must be at least 1 and at most 64"),
        (4, dict(replicated=False, max_tokens=17), "max_tokens=17 must be at least 1 and at most 16: .* W=4"),
        (65, dict(replicated=False, max_tokens=1), "max_tokens=1 must be at least 1 and at most 0: .* W=65"),
    ],
)
def test_bad_sizes_are_named(world_size: int, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankDecode(emulated_group(world_size, "cpu")[0], **(dict(hidden_size=32) | arguments))


def test_a_rank_alone_needs_no_gather() -> None:
    comm = emulated_group(1, "cpu")[0]
    weights = shard(FOLDED, ExpertLayout(num_experts=4, top_k=2, ep=1, tp=1, rank=0), torch.float32, "cpu")
    decode = RankDecode(comm, hidden_size=16, replicated=False, use_kernels=False)
    inputs = step_inputs(FOLDED, 0, 5, torch.float32)
    compare_step(FOLDED, decode(*inputs, weights), inputs, torch.float32, "alone")
    assert decode(*step_inputs(FOLDED, 0, 0, torch.float32), weights).shape == (0, 16)
    with pytest.raises(ValueError, match="D=16 of tokens must be 32"):
        RankDecode(comm, hidden_size=32)(*inputs, weights)


@in_ranks(2, interpret=True)
def test_bad_tensors_are_named_and_break_nothing(rank: int, world_size: int) -> None:
    """A rank refuses before it sends anything, so the step that follows is in order."""
    comm, weights = open_rank(rank, 2, FOLDED, 1, torch.float32, "cpu")
    small = DecodeScratch.create(weights, 2, torch.float32, max_tokens=2)
    decode = RankDecode(comm, hidden_size=16, max_tokens=2, replicated=False, use_kernels=True)
    tokens, ids, routing_weights = step_inputs(FOLDED, 0, 2, torch.float32)
    cases = (
        (tokens[:, :8], dict(), r"tokens of shape .* must be \(T, D\) = \(T, 16\) with D=16 of w2"),
        (torch.cat((tokens, tokens)), dict(), r"top_k_ids of shape \(2, 2\) must be \(T, K\) = \(4, K\) with T=4"),
        (tokens, dict(scratch=small), r"scratch for 4 rows of .* must hold 8 of F, D"),
    )
    if rank == 0:
        for bad, settings, message in cases:
            with pytest.raises(ValueError, match=message):
                decode(bad, ids, routing_weights, weights, **settings)
        with pytest.raises(ValueError, match="T=3 tokens must be at most max_tokens=2"):
            decode(*step_inputs(FOLDED, 0, 3, torch.float32), weights)
    output = decode(tokens, ids, routing_weights, weights, config=MATRIX)
    compare_step(FOLDED, output, (tokens, ids, routing_weights), torch.float32, "the step after bad ones")
    strange, legal = torch.tensor([[2**40 + 1, 0], [-(2**31), 4]]), torch.tensor([[-1, 0], [-1, -1]])
    outputs = [decode(tokens, ids, routing_weights, weights, config=MATRIX) for ids in (strange, legal)]
    assert torch.equal(*outputs), "an unknown id must count as masked"
    twin = RankDecode(comm, hidden_size=16, max_tokens=2, replicated=False, use_kernels=False)
    with pytest.raises(ValueError, match="top_k_ids contain -2147483647; every id must be"):
        twin(tokens, torch.full_like(ids, -(2**31)), routing_weights, weights)
    output = twin(tokens, ids, routing_weights, weights)
    compare_step(FOLDED, output, (tokens, ids, routing_weights), torch.float32, "the twin's step after a bad one")


@in_ranks(2)
def test_ranks_with_different_numbers_of_replicated_tokens_are_told(rank: int, world_size: int) -> None:
    """Rank 1 passes more tokens as replicated, and rank 0 notices."""
    comm, weights = open_rank(rank, 2, FOLDED, 1, torch.float32, "cpu")
    decode = RankDecode(comm, hidden_size=16, use_kernels=False)
    inputs = step_inputs(FOLDED, 0, 2 + rank, torch.float32)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"^T=3 tokens must be as many on all ranks: another one passed fewer$"):
            decode(*inputs, weights)
    else:
        with suppress(StepFailedError):  # the other rank may be so fast that this step already fails
            decode(*inputs, weights)
    dist.barrier()
    with pytest.raises(
        StepFailedError, match=r"the decode step failed on rank 1 \(RuntimeError: T=3 tokens must be as "
    ):
        decode(*inputs, weights)
