"""A rank fails in the middle of a step, everybody catches it and calls again: refused, and right after a restart.

The failing rank raises right after or right before one of the pieces of a step; what a retry would compute without a
restart was wrong in nine of thirty such trials.
"""

import random
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_cases import LayerCase, rank_inputs
from layer_ranks import Results, build_layer, check_call, train_call
from ranks import in_ranks, run_ranks
from tiers import slow

import comet.reference.plain
from comet.comm import make_communicator
from comet.comm.failures import Board, board_bytes
from comet.errors import CommTimeoutError, StepFailedError
from comet.layer.routed_experts import SymmetricPath
from comet.modular import FusedExperts, FusedPrepareFinalize, GroupedContiguous, ModularMoE, SymmetricContiguous
from comet.moe import MoE

CASE = LayerCase("ep2", 2, 1, (40, 33))
PIECES = (
    "plan", "dispatch_gemm", "gemm_combine", "barrier", "dispatch_dgrad", "activation_backward", "fc2_wgrad",
    "dgrad_combine", "fc1_wgrad",
)  # fmt: skip
ERRORS: tuple[BaseException, ...] = (
    torch.OutOfMemoryError("out of memory"), KeyboardInterrupt(), RuntimeError("a hook"), ValueError("a hook, too"),
)  # fmt: skip


def call(moe: MoE, rank: int, number: int) -> Results:
    return train_call(moe, CASE, rank, number)


def compare(moe: MoE, rank: int, number: int, where: str) -> None:
    check_call(CASE, rank, number, call(moe, rank, number), where)


def break_once(owner: Any, name: str, error: BaseException, *, after: bool) -> None:
    """Let ``owner.name`` raise the next time, ``after`` it has done its work or before."""
    function: Callable[..., Any] = getattr(owner, name)

    def fail(*args: Any, **options: Any) -> Any:
        setattr(owner, name, function)
        if after:
            function(*args, **options)
        raise error

    setattr(owner, name, fail)


@pytest.mark.parametrize("seeds", [range(5), slow(range(5, 12))])
@in_ranks(2)
def test_twin_refuses_after_a_failure_and_is_right_after_a_restart(rank: int, world_size: int, seeds: range) -> None:
    """One rank fails at random; all ranks refuse retries until all restart."""
    moe = build_layer(CASE, rank, "twin")
    assert isinstance(moe.experts, SymmetricPath)
    for seed in seeds:
        draw = random.Random(seed)
        failing, piece = draw.randrange(world_size), draw.choice(PIECES)
        error, after = draw.choice(ERRORS), draw.random() < 0.5 or piece == "plan"
        where = f"seed {seed}: {type(error).__name__} on rank {failing}, {piece}, {after=}"
        if rank == failing:
            break_once(moe.experts.backend, piece, error, after=after)
            with pytest.raises(type(error)):
                call(moe, rank, 2 * seed)
        else:
            with suppress(StepFailedError):  # or it had all that it needed
                call(moe, rank, 2 * seed)
        dist.barrier()
        for _ in range(2):
            with pytest.raises(StepFailedError, match=r"pass failed on rank \d \(.*workspace.restart\(\)") as refusal:
                call(moe, rank, 2 * seed + 1)
            assert f"rank {failing} ({type(error).__name__}" in str(refusal.value), where
        with pytest.raises(StepFailedError):
            moe.group.workspace.check()
        dist.barrier()
        moe.group.workspace.restart()
        compare(moe, rank, 2 * seed + 1, where)
        moe.group.workspace.check()
    moe.group.close()


@in_ranks(2)
def test_modular_parts_refuse_after_a_failure_and_are_right_after_a_restart(rank: int, world_size: int) -> None:
    """The experts raise between dispatch and combine."""
    moe = build_layer(CASE, rank, "twin")
    w1, w2 = moe.expert_weights()
    w1 = w1.flatten(1, 2)
    pairs = ((SymmetricContiguous, GroupedContiguous), (FusedPrepareFinalize, FusedExperts))
    for prepare_finalize, experts in pairs:
        layer = ModularMoE(prepare_finalize(CASE.config, moe.group), experts(CASE.config, moe.group))
        if rank == 0:
            break_once(layer.experts, "apply", torch.OutOfMemoryError("out of memory"), after=False)
        inputs = rank_inputs(CASE, rank)
        arguments = (inputs.routed, w1, w2)
        with pytest.raises(torch.OutOfMemoryError if rank == 0 else StepFailedError):
            layer(*arguments)
        dist.barrier()
        with pytest.raises(StepFailedError, match=r"modular layer failed on rank 0 \(OutOfMemoryError"):
            layer(*arguments)
        dist.barrier()
        moe.group.workspace.restart()
        check_call(CASE, rank, 0, {"output": layer(*arguments)}, prepare_finalize.__name__)
        dist.barrier()
    moe.group.close()


@in_ranks(2)
def test_plain_path_refuses_after_a_failure(rank: int, world_size: int) -> None:
    """Both ranks break off between two collectives; the next call and a restart are refused."""
    moe, inputs = build_layer(CASE, rank, "plain"), rank_inputs(CASE, rank)
    compare(moe, rank, 0, "before")
    break_once(moe.experts, "compute", RuntimeError("broke off"), after=False)
    with pytest.raises(RuntimeError, match="broke off"):
        moe.routed_experts(*inputs.routed)
    for _ in range(2):
        with pytest.raises(StepFailedError, match=r"\(RuntimeError: broke off\), .* new process groups"):
            moe.routed_experts(*inputs.routed)
        with pytest.raises(StepFailedError, match="new process groups"):
            moe.group.workspace.restart()
    dist.barrier()


@pytest.mark.parametrize("where", ["between", "after"])
@in_ranks(2)
def test_plain_path_refuses_after_a_failure_in_its_backward_pass(rank: int, world_size: int, where: str) -> None:
    """Both ranks break off between two collectives of a backward pass, or one after the last."""
    moe = build_layer(CASE, rank, "plain")
    compare(moe, rank, 0, "before")

    def fail(grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def hooked(function: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
        if where == "after":
            arguments[0].tokens.register_hook(fail)
            return function(*arguments, **options)
        output = function(*arguments, **options)
        output.register_hook(fail)
        return output

    if where == "between":
        comet.reference.plain.expert_rows = partial(hooked, comet.reference.plain.expert_rows)
    elif rank == 1:
        moe.experts.compute = partial(hooked, moe.experts.compute)
    if where == "after" and rank == 0:
        call(moe, rank, 1)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            call(moe, rank, 1)
    dist.barrier()
    failed = "1" if where == "after" else r"\d"  # both did "between", and one was first
    said = rf"^the backward pass failed on rank {failed} \(OutOfMemoryError: out of memory\).*new process groups"
    with pytest.raises(StepFailedError, match=said):
        call(moe, rank, 2)


def refuse_what_is_wrong_on_one_rank(rank: int, world_size: int, path: str) -> tuple[list[str], list[str]]:
    """Return the messages where one rank's layer is frozen, and where one has a bad id; the next call is right."""
    moe, frozen, bad = build_layer(CASE, rank, path), [], []
    for number in range(3):
        inputs = rank_inputs(CASE, rank, number)
        moe.requires_grad_(rank != number % world_size)
        with pytest.raises(ValueError, match="requires_grad=") as refusal:
            moe.routed_experts(*inputs.routed)
        frozen.append(str(refusal.value))
        moe.requires_grad_()
        if rank == number % world_size:
            inputs.top_k_ids[0, 0] = 1000
        with pytest.raises(ValueError, match="top_k_ids") as refusal:
            moe.routed_experts(*inputs.routed)
        bad.append(str(refusal.value).split(";")[0])
        compare(moe, rank, number, "after a refusal on all ranks")
    moe.group.workspace.check()
    moe.group.close()
    return frozen, bad


@pytest.mark.parametrize("path", ["twin", "plain"])
def test_what_is_wrong_on_one_rank_is_refused_on_all_and_costs_nothing(path: str) -> None:
    first, second = run_ranks(refuse_what_is_wrong_on_one_rank, 2, path)
    assert first[0] == second[0]
    flags = ["[False, True]", "[True, False]", "[False, True]"]
    assert [text.split(" of ")[0] for text in first[0]] == [f"requires_grad={each}" for each in flags]
    assert all(text.endswith("freeze on all of them, or on none") for text in first[0])
    here, there = "contain 1000", "contain 1 bad ids"
    assert first[1] == [f"top_k_ids of rank {rank} {what}" for rank, what in ((0, here), (1, there), (0, here))]
    assert second[1] == [f"top_k_ids of rank {rank} {what}" for rank, what in ((0, there), (1, here), (0, there))]


@in_ranks(2, interpret=True)
def test_kernels_say_what_the_other_rank_did_instead(rank: int, world_size: int) -> None:
    """Rank 0 begins its backward pass, rank 1 the next forward pass."""
    moe, inputs = build_layer(CASE, rank, "fused"), rank_inputs(CASE, rank)
    y = moe.routed_experts(*inputs.routed)
    dist.barrier()
    moe.group.comm.timeout_s = 0.1
    if rank == 0:
        y.sum().backward()
    else:
        moe.routed_experts(*inputs.routed)
    dist.barrier()
    said = moe.group.workspace.timeout()
    with pytest.raises((CommTimeoutError, StepFailedError)):
        moe.group.workspace.check()
    dist.barrier()
    place, other = (("barrier", "1 began a forward pass"), ("exchange", "0 began a backward pass"))[rank]
    words = (
        rf"rank {rank} waited .* for rank {1 - rank} \({place}.*\); rank {other}: all ranks of a group must call its "
    )
    assert re.fullmatch(f"{words}layers in one order, .*", said), said


def call_in_other_orders(rank: int, world_size: int, path: str) -> list[str]:
    """Two layers, two calls of one, and one with gradients on rank 0 only: the messages; all ranks go on each time."""
    first, inputs = build_layer(CASE, rank, path), rank_inputs(CASE, rank)
    group = first.group
    layers = [first, MoE(first.config, group, path=path)]
    expected = first.routed_experts(*inputs.routed)
    said = []

    def attempt(call: Callable[[], object], *, trains: bool = True) -> None:
        said.append("")
        try:
            with torch.set_grad_enabled(trains):
                call()
            group.workspace.check()
        except (ValueError, StepFailedError) as error:
            said[-1] = str(error)
        if path == "fused":
            dist.barrier()
            group.workspace.restart()
        assert torch.equal(expected, first.routed_experts(*inputs.routed)), "a refusal costs nothing"

    attempt(lambda: layers[rank].routed_experts(*inputs.routed))
    outputs = [first.routed_experts(*inputs.routed) for _ in range(2)]
    attempt(lambda: outputs[rank].sum().backward())
    attempt(lambda: first.routed_experts(*inputs.routed), trains=rank == 0)
    return said


@pytest.mark.parametrize("path", ["twin", "fused", "plain", "reference"])
def test_ranks_that_call_layers_in_different_orders_are_refused(path: str) -> None:
    first, second = run_ranks(call_in_other_orders, 2, path, interpret=path == "fused")
    for said in (first, second):
        assert re.match(r"rank \d called layer \d with .* while rank \d called layer \d with .* in one order", said[0])
        assert "layer 1" in said[0]
        assert "layer 2" in said[0]
        assert re.search(
            r"began the backward pass of call \d+ of layer 1 .*while rank \d began .* of layer 1:", said[1]
        )
    assert "gradients" in first[-1]
    assert path == "fused" or first == second


def test_a_rank_alone_restarts_by_itself_and_a_refusal_costs_nothing() -> None:
    case = LayerCase("alone", 1, 1, (40,))
    moe = build_layer(case, 0, "twin")
    path, inputs = moe.experts, rank_inputs(case, 0)
    assert isinstance(path, SymmetricPath)
    for piece in ("plan", "dispatch_gemm", "gemm_combine"):
        break_once(path.backend, piece, KeyboardInterrupt(), after=True)
        with pytest.raises(KeyboardInterrupt):
            moe.routed_experts(*inputs.routed)
        with pytest.raises(ValueError, match="top_k_ids of rank 0 contain"):
            moe.routed_experts(inputs.tokens, inputs.top_k_ids + 1000, inputs.top_k_weights)
        check_call(case, 0, 0, {"output": moe.routed_experts(*inputs.routed).detach()}, piece)


def call_from_a_second_thread(rank: int, world_size: int) -> str:
    """Return the message of a call during a step of another thread; without such a step the call is computed."""
    case = LayerCase("threads", world_size, 1, (40, 33)[:world_size])
    moe, inputs, said = build_layer(case, rank, "twin"), rank_inputs(case, rank), [""]
    wanted, found = moe.routed_experts(*inputs.routed), []

    def call() -> None:
        try:
            found.append(moe.routed_experts(*inputs.routed))
        except RuntimeError as error:
            said[0] = str(error)

    thread = threading.Thread(target=call)
    with moe.group.comm.step("forward pass"):
        thread.start()
        thread.join(0.3)
        assert not found, "another thread's step is under way"
    thread.join()
    if not found:
        call()
    assert torch.equal(found[0], wanted)
    moe.group.close()
    return said[0]


def test_threads_of_a_rank_alone_take_turns_and_over_ranks_a_second_one_is_refused() -> None:
    assert run_ranks(call_from_a_second_thread, 1) == [""]
    for said in run_ranks(call_from_a_second_thread, 2):
        assert re.match(r"the forward pass must wait for a step of another thread of rank [01]: call layers over", said)


def test_worked_example_of_a_board_and_two_that_fail_at_once() -> None:
    assert board_bytes(4) == 2112
    memory = [torch.zeros(board_bytes(3), dtype=torch.uint8) for _ in range(3)]
    boards = [Board(memory, rank) for rank in range(3)]
    for board in boards:
        board.check()
    wide = "\u00fc"  # two bytes
    boards[2].note("forward pass", RuntimeError(wide * 1000))
    boards[0].note("backward pass", KeyboardInterrupt())  # saw the first note, and leaves it
    for board in boards:
        assert not board.is_final
        with pytest.raises(StepFailedError, match=rf"^the forward pass failed on rank 2 \(RuntimeError: {wide}{wide}"):
            board.check()
        board.clear()
        board.check()
    boards[1].note("forward pass", RuntimeError(), is_final=True)
    assert all(board.is_final for board in boards)
    with pytest.raises(CommTimeoutError, match=r"rank 0 waited 0.0 s for rank 1, 2 \(meeting of all ranks\)"):
        boards[0].meet(0.0)


def ask_for_the_largest_count(rank: int, world_size: int) -> list[int]:
    """Three counts of one group; then rank 0 alone asks, which both have to restart from."""
    with make_communicator("auto", dist.group.WORLD, "cpu", timeout_s=60.0) as comm:
        found = [comm.largest(count) for count in (rank, 5 - rank, 2**31 - 1)]
        if rank == 0:
            comm.timeout_s = 0.1
            with pytest.raises(CommTimeoutError, match=r"rank 0 waited 0.1 s for rank 1 \(count of tokens\)"):
                comm.largest(1)
            comm.timeout_s = 60.0
        dist.barrier()
        with pytest.raises(StepFailedError, match="count of tokens failed on rank 0"):
            comm.largest(2)
        dist.barrier()
        comm.restart()
        return [*found, comm.largest(rank)]


def test_ranks_ask_for_their_largest_count() -> None:
    assert run_ranks(ask_for_the_largest_count, 2) == [[1, 5, 2**31 - 1, 1]] * 2


def test_who_left_a_step_says_why_until_it_begins_another() -> None:
    memory = [torch.zeros(board_bytes(3), dtype=torch.uint8) for _ in range(3)]
    boards = [Board(memory, rank) for rank in range(3)]
    late = "rank 0 waited 1.0 s for rank 1 (barrier, epoch 3)"
    boards[1].tell("forward pass", ValueError("top_k_ids of rank 1 contain 1000"))
    reason = "rank 1 left the forward pass before it sent anything (ValueError: top_k_ids of rank 1 contain 1000)"
    assert str(boards[0].explained(late)) == f"{late}; {reason}"
    boards[0].check()  # no rank is out of step by it
    boards[1].take_back()
    assert str(boards[0].explained(late)) == late
    boards[2].note("last step", boards[2].explained("rank 2 waited 1.0 s for rank 1"))
    assert "failed on rank 2 (CommTimeoutError: rank 2 waited 1.0 s for rank 1)" in str(boards[0].explained(late))
    assert boards[0].absent(0.0) == "rank 1, 2"
    assert boards[2].absent(0.0) == "rank 1"
    for board in boards:
        board.clear()
        assert str(board.explained(late)) == late
