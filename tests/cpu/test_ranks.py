"""The multi-process harness itself: values come back, failures and hangs are told apart, nothing is left running."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


@dataclass(frozen=True)
class Payload:
    """A class of the test file: it must unpickle on both sides."""

    value: int


def double(rank: int, world_size: int, offset: int) -> int:
    return 2 * rank + offset


def group_sum(rank: int, world_size: int, payload: Payload) -> tuple[Payload, torch.Tensor, str | None, int]:
    total = torch.tensor([rank + payload.value])
    dist.all_reduce(total)
    return Payload(int(total)), total, os.environ.get("TRITON_INTERPRET"), torch.get_num_threads()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the bad rank")
    time.sleep(600)


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def die_on_zero(rank: int, world_size: int) -> int:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_worked_example() -> None:
    assert run_ranks(double, 3, 10) == [10, 12, 14]


@pytest.mark.parametrize("interpret", [False, True])
def test_ranks_share_a_group(interpret: bool) -> None:
    results = run_ranks(group_sum, 2, Payload(5), interpret=interpret)
    for payload, total, interpreted, threads in results:
        assert payload == Payload(11)
        assert total.tolist() == [11]
        assert interpreted == ("1" if interpret else None)
        assert threads == 1


def test_the_failing_rank_is_shown() -> None:
    with pytest.raises(
        AssertionError, match=r"rank 1 \(exit code 1\)(.|\n)*fail_on_one(.|\n)*KeyError: 'the bad rank'"
    ):
        run_ranks(fail_on_one, 2)


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] still running after 15 s(.|\n)*in hang_on_one"):
        run_ranks(hang_on_one, 2, timeout=15)


def test_a_killed_rank_is_a_failure_unless_allowed() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 \(exit code -9\)"):
        run_ranks(die_on_zero, 2)
    assert run_ranks(die_on_zero, 2, may_die=[0]) == [None, 1]


def test_a_local_function_is_refused() -> None:
    def local(rank: int, world_size: int) -> None: ...

    with pytest.raises(ValueError, match="must be a module-level function"):
        run_ranks(local, 1)
