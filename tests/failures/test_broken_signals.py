"""Signals broken on purpose, one at a time: the tests that should notice, do.

A break is applied in the processes of the ranks, before they run what the test gives them. Under the interpreter a
kernel looks its device functions up among the globals of its module, so a break is a plain function put there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import comm_conformance
import pytest
import torch
import torch.distributed as dist
from comm_conformance import Site
from late import come_late, passed
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, compare_call, poison
from ranks import run_ranks

import comet.layer.twin.layer
import comet.layer.twin.plan
from comet.comm import cpu_shm, signals
from comet.errors import CommTimeoutError
from comet.kernels.layer.triton import combine, dispatch, dispatch_gemm, gemm_combine, gemm_panels
from comet.kernels.plan import counting
from comet.kernels.runtime import primitives
from comet.layer.routed_experts import SymmetricPath
from comet.layer.workspace import Workspace

COPY = "broken_"  # before the name of a test file that runs over broken ranks
LATE_S = 1.0  # many times what the other rank needs to come to where it must wait
PATIENCE_S = 120.0  # how late a rank is that others do not wait for, as they should; it comes once they are past
WRONG = r"(not finite|error [\d.e+-]+ > )"
FAILED = r"(AssertionError|DID NOT RAISE)"
NO_RESULT = r"^$"  # the bare assertion of a test that compares what the ranks returned

LATE = "test_moe::test_a_late_rank_is_waited_for_in_each_layer"
STOPPED = "test_moe::test_a_rank_that_stops_is_named"
PLAN_NAMED = "test_plan::test_a_late_rank_is_named"
BARRIER = "test_comm::test_device_barrier_orders_ranks_and_names_a_late_one"


# ---- what is broken --------------------------------------------------------------------------------------------------


def nothing(*args: Any, **kwargs: Any) -> int:
    """A wait that does not wait, or a signal that never comes."""
    return 0


def skip(module: ModuleType, function: str, rank: int) -> None:
    assert hasattr(module, function), f"{module.__name__} has no {function} to break"
    setattr(module, function, nothing)


def never_late(module: ModuleType, rank: int) -> None:
    """Host side: every poll finds at once what it looks for."""
    module.poll = lambda condition, timeout_s: True


def flag_first(module: ModuleType, payload: str, place: str, rank: int) -> None:
    """On rank 1, raise each flag before the rows that ``payload`` stores, which come when rank 0 is past ``place``."""
    if rank != 1:
        return
    store, raise_flag, waiting = getattr(module, payload), module.signal, []

    def raise_then_store(flag_ptr: Any, epoch: Any) -> None:
        raise_flag(flag_ptr, epoch)
        if waiting:
            come_late(place, PATIENCE_S)
        while waiting:
            store(*waiting.pop())

    setattr(module, payload, lambda *args: waiting.append(args))
    module.signal = raise_then_store


BREAKS: dict[str, Callable[[int], None]] = {
    "nothing": nothing,
    "plan does not wait": partial(skip, counting, "wait_flags"),
    "layer 0 does not wait": partial(skip, dispatch_gemm, "zero_after_arrival"),
    "layer 0's flag first": partial(flag_first, dispatch, "push_chunk", "layer 0"),
    "backward dispatch does not wait": partial(skip, dispatch, "wait_flags"),
    "reduce does not wait": partial(skip, combine, "wait_flag"),
    "final sum does not wait": partial(skip, combine, "wait_flags"),
    "layer 1's flag first": partial(flag_first, combine, "reduce_rows", "layer 1"),
    "gradients' flag first": partial(flag_first, combine, "send_grads", "dgrad_combine"),
    "device barrier does not wait": partial(skip, primitives, "wait_flags"),
    "twin does not wait": partial(skip, comet.layer.twin.layer, "wait"),
    "twin's plan does not wait": partial(skip, comet.layer.twin.plan, "wait"),
    "host barrier does not wait": partial(never_late, cpu_shm),
    "host wait does not wait": partial(never_late, signals),
}


# ---- the tests that exist, over broken ranks -------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    (file,) = Path(__file__).parents[1].rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(COPY + name, file)
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_broken(broken: str, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(broken_rank, world_size, broken, fn.__module__, fn.__qualname__, args, **options)


def lateness(broken: str) -> float:
    """How long a late rank waits for others that do not wait for it."""
    if "flag first" in broken:
        return 0.0  # they do until its flag comes, and ``flag_first`` waits then
    return LATE_S if broken == "nothing" else PATIENCE_S


def broken_rank(rank: int, world_size: int, broken: str, name: str, function: str, args: tuple[Any, ...]) -> Any:
    module = load(name.removeprefix(COPY)) if name.startswith(COPY) else importlib.import_module(name)
    if hasattr(module, "LATE_S"):
        module.LATE_S = dict.fromkeys(module.LATE_S, lateness(broken))
    BREAKS[broken](rank)
    return getattr(module, function)(rank, world_size, *args)


NOTICED = [
    ("plan does not wait", PLAN_NAMED, (True,), NO_RESULT),
    ("layer 0 does not wait", LATE, ("fused", 0), WRONG),
    ("layer 0 does not wait", STOPPED, ("fused", "layer 0 dispatch"), NO_RESULT),
    ("layer 0's flag first", LATE, ("fused", 0), WRONG),
    ("final sum does not wait", LATE, ("fused", 1), WRONG),
    ("final sum does not wait", STOPPED, ("fused", "layer 1 combine"), NO_RESULT),
    ("layer 1's flag first", LATE, ("fused", 1), WRONG),
    ("device barrier does not wait", BARRIER, (), FAILED),
    ("twin does not wait", LATE, ("twin", 0), WRONG),
    ("twin does not wait", LATE, ("twin", 1), WRONG),
    ("twin's plan does not wait", PLAN_NAMED, (False,), NO_RESULT),
]


@pytest.mark.parametrize(
    ("broken", "test", "args", "complaint"),
    NOTICED,
    ids=[f"{broken}: {test} {args}" for broken, test, args, _ in NOTICED],
)
def test_the_break_is_noticed(broken: str, test: str, args: tuple[Any, ...], complaint: str) -> None:
    file, function = test.split("::")
    module = load(file)
    module.run_ranks = partial(run_broken, broken)
    with pytest.raises(AssertionError, match=complaint):
        getattr(module, function)(*args)


# ---- the host's barrier and wait -------------------------------------------------------------------------------------


def conformance(rank: int, world_size: int, broken: str, check: str) -> None:
    BREAKS[broken](rank)
    getattr(comm_conformance, check)(Site(rank, world_size, "cpu_shm", kernels=False))


@pytest.mark.parametrize(
    ("broken", "check"),
    [("host barrier does not wait", "check_late_rank"), ("host wait does not wait", "check_signal_wait")],
)
def test_the_break_of_the_host_is_noticed(broken: str, check: str) -> None:
    with pytest.raises(AssertionError, match=FAILED):
        run_ranks(conformance, 2, broken, check)


# ---- waits of the backward pass, and of a layer for its own GEMM -----------------------------------------------------


def late_in_backward(rank: int, world_size: int, broken: str, place: str) -> None:
    """Rank 1 does one step of a training pass late, over receive buffers full of NaN; gradients against the oracle."""
    BREAKS[broken](rank)
    case = LayerCase("ep2", 2, 1, (40, 40))
    moe = build_layer(case, rank, "fused")
    assert isinstance(moe.experts, SymmetricPath)
    backend = moe.experts.backend
    slept: list[str] = []
    arrived: list[torch.Tensor] = []
    step, gemm_combine = getattr(backend, place), backend.gemm_combine
    late = partial(after_others, slept, arrived, lateness(broken), moe.group.workspace, step)
    # Before rank 1 has done its layer 1, rank 0 cannot overwrite what arrived.
    noted = partial(note_then_do, arrived, moe.group.workspace, gemm_combine)
    backend.gemm_combine = noted
    setattr(backend, place, late if rank == 1 else partial(then_tell, step))
    inputs = rank_inputs(case, rank)
    x, weights = inputs.tokens.requires_grad_(), inputs.top_k_weights.requires_grad_()
    y = moe.routed_experts(x, inputs.top_k_ids, weights)
    if place != "keep_received":
        poison(moe.group)
    y.backward(inputs.grad_output)
    moe.group.workspace.check()
    assert len(slept) == rank, "rank 1 was late"
    compare_call(moe, case, rank, 0, (y, x, weights))
    dist.barrier()


def then_tell(step: Callable[..., Any], *args: Any, **options: Any) -> Any:
    found = step(*args, **options)
    if step.__name__ != "keep_received":
        passed(step.__name__)
    return found


def note_then_do(
    arrived: list[torch.Tensor], workspace: Workspace, step: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Note the rows that arrived, as integers: NaN equals nothing."""
    arrived.append(workspace.recv_rows.local.view(torch.int32).clone())
    return step(*args, **options)


def after_others(
    slept: list[str],
    arrived: list[torch.Tensor],
    most_s: float,
    workspace: Workspace,
    step: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Do a step late: when another rank is past it, or has overwritten rows that are to be kept."""
    slept.append(step.__name__)
    rows, keeps = workspace.recv_rows.local.view(torch.int32), step.__name__ == "keep_received"
    come_late(step.__name__, most_s, lambda: keeps and not torch.equal(rows, arrived[0]))
    return step(*args, **options)


@pytest.mark.parametrize("place", ["keep_received", "dispatch_dgrad", "dgrad_combine"])
def test_a_late_rank_is_waited_for_in_the_backward_pass(place: str) -> None:
    run_ranks(late_in_backward, 2, "nothing", place, interpret=True)


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ("device barrier does not wait", "keep_received"),
        ("backward dispatch does not wait", "dispatch_dgrad"),
        ("final sum does not wait", "dgrad_combine"),
        ("gradients' flag first", "dgrad_combine"),
    ],
)
def test_the_break_of_the_backward_pass_is_noticed(broken: str, place: str) -> None:
    with pytest.raises(AssertionError, match=WRONG):
        run_ranks(late_in_backward, 2, broken, place, interpret=True)


def without_gemm(rank: int, world_size: int, broken: str, comm_blocks: int) -> tuple[str, int]:
    """Layer 1 with compute blocks that do nothing; returns the complaint, and the newest flag of a partial sum."""
    BREAKS[broken](rank)
    skip(gemm_panels, "gemm_panels", rank)
    skip(gemm_combine, "gemm_panels", rank)
    case = LayerCase("one rank", 1, 1, (37,), comm_blocks=comm_blocks)
    moe = build_layer(case, rank, "fused")
    moe.group.comm.timeout_s = 0.02
    inputs = rank_inputs(case, rank)
    with torch.no_grad():
        moe.routed_experts(inputs.tokens, inputs.top_k_ids, inputs.top_k_weights)
    newest = int(moe.group.workspace.combine_flags.local.max())
    try:
        moe.group.workspace.check()
    except CommTimeoutError as error:
        return str(error), newest
    return "", newest


@pytest.mark.parametrize("comm_blocks", [0, 2])
def test_a_reduce_waits_for_the_gemm_of_its_rank(comm_blocks: int) -> None:
    found, broken = (
        run_ranks(without_gemm, 1, how, comm_blocks, interpret=True)[0] for how in ("nothing", "reduce does not wait")
    )
    complaint, newest = found
    assert complaint.startswith("rank 0 waited 0.0 s for rank 0 (layer 1 panel")
    assert newest == 0, "a panel that never came was summed up and sent"
    assert broken == ("", 1)
