"""The multi-process harness: values come back, failures differ from hangs, and no process is left running."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from fault_rows import await_file, note
from launch_jobs import all_gone
from quick_interpreter import VERSION
from rank_server import OWN_INTERPRETER
from ranks import run_ranks

import comet.errors

CALLS: list[int] = []


@dataclass(frozen=True)
class Payload:
    """A class of the test file: it must unpickle on both sides."""

    value: int


def double(rank: int, world_size: int, offset: int) -> int:
    return 2 * rank + offset


def group_sum(rank: int, world_size: int, payload: Payload) -> tuple[Payload, torch.Tensor]:
    total = torch.tensor([rank + payload.value])
    dist.all_reduce(total)
    return Payload(int(total)), total


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("printed before", flush=True)
        os.write(2, b"written before")
        raise KeyError("the bad rank")
    time.sleep(600)


def hang_on_one(rank: int, world_size: int, folder: Path) -> None:
    note(folder / str(rank), str(os.getpid()))
    if rank == 1:
        time.sleep(600)
    await_file(folder / "1")


@dataclass
class ClockOfHang:
    """In place of the module ``time``: the deadline is over once rank 1 hangs and rank 0, seen twice, has ended."""

    folder: Path
    seen: int = 0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        first = self.folder / "0"
        self.seen += first.exists() and not psutil.pid_exists(int(first.read_text()))
        return 1000.0 * (self.seen > 1)


def die_on_zero(rank: int, world_size: int) -> int:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def leave_traces(rank: int, world_size: int) -> tuple[object, ...]:
    """Return traces that an earlier run left in modules, and random draws; leave new traces."""
    found = len(CALLS), hasattr(comet.errors, "trace"), torch.get_default_dtype(), torch.get_num_threads()
    CALLS.append(rank)
    comet.errors.trace = rank  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    return found, random.random(), np.random.random(), torch.rand(1).item(), tempfile.mktemp(), hash("comet")


def surroundings(rank: int, world_size: int) -> tuple[str | None, str, str, int]:
    return os.environ.get("TRITON_INTERPRET"), os.getcwd(), sys.path[0], os.getppid()


def kill_server(rank: int, world_size: int, folder: Path) -> None:
    note(folder / str(rank), str(os.getpid()))
    if rank == 1:
        await_file(folder / "0")
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_worked_example() -> None:
    assert run_ranks(double, 3, 10) == [10, 12, 14]


def test_every_run_finds_fresh_modules_and_no_two_ranks_draw_the_same() -> None:
    drawn = [run for _ in range(2) for run in run_ranks(leave_traces, 2)]
    assert [found for found, *_ in drawn] == [(0, False, torch.float32, 1)] * 4
    assert [len(set(draws)) for draws in zip(*(draws for _, *draws in drawn), strict=True)] == [4, 4, 4, 4, 2], drawn
    assert drawn[0][5] != drawn[1][5], "neighbours must not iterate over sets in the same order"


def test_ranks_see_the_environment_path_and_folder_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = run_ranks(surroundings, 1)[0]
    assert before[:3] == (None, os.getcwd(), sys.path[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by torch, at some time")
    assert run_ranks(surroundings, 1)[0] == (None, str(tmp_path), *before[2:]), "the same server"


def test_the_failing_rank_is_shown() -> None:
    message = (
        r"rank 1 \(exit code 1\)(.|\n)*fail_on_one(.|\n)*KeyError: 'the bad rank'"
        r"(.|\n)*output of rank 1(.|\n)*printed before\nwritten before"
    )
    with pytest.raises(AssertionError, match=message):
        run_ranks(fail_on_one, 2)


def test_a_hanging_rank_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "time", ClockOfHang(tmp_path))
    with pytest.raises(AssertionError, match=r"ranks \[1\] still running after 300 s(.|\n)*in hang_on_one"):
        run_ranks(hang_on_one, 2, tmp_path)


def test_a_killed_rank_is_a_failure_unless_allowed() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 \(exit code -9\)"):
        run_ranks(die_on_zero, 2)
    assert run_ranks(die_on_zero, 2, may_die=[0]) == [None, 1]


def test_runs_at_the_same_time_do_not_meet() -> None:
    with ThreadPoolExecutor() as threads:
        failing = threads.submit(run_ranks, fail_on_one, 2)
        sums = [threads.submit(run_ranks, group_sum, 2, Payload(value)) for value in range(4)]
        assert [future.result()[0][0] for future in sums] == [Payload(2 * value + 1) for value in range(4)]
        with pytest.raises(AssertionError, match="the bad rank"):
            failing.result()


def test_a_server_that_dies_is_reported_with_its_ranks_ended_and_then_replaced(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank [01] \(exit code"):
        run_ranks(kill_server, 2, tmp_path)
    assert all_gone([int(file.read_text()) for file in tmp_path.iterdir()])
    assert run_ranks(double, 1, 3) == [3]


KEPT: list[object] = []  # a rank refers to these until its end


def start_a_manager(rank: int, world_size: int) -> int:
    """Leave a process that ends only when an interpreter shuts down; Megatron leaves one when it saves."""
    KEPT.append(multiprocessing.get_context("spawn").Manager())
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    return child.pid


def test_processes_that_a_rank_started_end_with_it() -> None:
    assert all_gone(run_ranks(start_a_manager, 1))


HANGING_TEST = """
import os, time
from pathlib import Path

from ranks import run_ranks

def hang(rank, world_size, folder):
    (folder / "noting").write_text(f"{os.getpid()} {os.getppid()}")
    (folder / "noting").rename(folder / "pids")
    time.sleep(600)

def test_hang():
    run_ranks(hang, 1, Path(__file__).parent)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, pytest.ExitCode.INTERRUPTED), (signal.SIGKILL, -9)])
def test_interrupted_tests_leave_no_process(signum: signal.Signals, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(HANGING_TEST)
    program = f"""
import pytest, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
raise SystemExit(pytest.main(["-c", {os.devnull!r}, "-p", "no:cacheprovider", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    while not (pids := tmp_path / "pids").exists():
        assert process.poll() is None, process.communicate()[0].decode()
        time.sleep(0.05)
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # Ctrl-C reaches the ranks and their server as well
    else:
        process.send_signal(signum)
    process.communicate()
    assert process.returncode == status
    assert all_gone([int(pid) for pid in pids.read_text().split()])  # the rank and its server


def test_a_local_function_is_refused() -> None:
    def local(rank: int, world_size: int) -> None: ...

    with pytest.raises(ValueError, match="must be a module-level function"):
        run_ranks(local, 1)


@triton.jit
def scale(values, factor):
    return values.to(tl.float32) * factor


@triton.jit
def row_sums(x_ptr, out_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, N)
    values = scale(tl.load(x_ptr + row * N + columns), 0.5)
    running = tl.cumsum(values, axis=0)
    tl.store(out_ptr + row * 2, tl.sum(values, axis=0) + tl.max(running, axis=0))
    tl.store(out_ptr + row * 2 + 1, tl.sum((columns * 1_000_003).to(tl.float32), axis=0))


@triton.jit
def bad_index(x_ptr, out_ptr, N: tl.constexpr):
    tl.static_assert(N > 64, "too narrow")


def launches(rank: int, world_size: int) -> tuple[list[torch.Tensor], str, bool]:
    """Two launches with one that fails in between; the error; whether the language was put back."""
    before = dict(vars(tl))
    x, found = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half(), []
    for _ in range(2):
        found.append(torch.zeros(3, 2))
        row_sums[(3,)](x, found[-1], 64)
        with pytest.raises(Exception, match="too narrow") as caught:
            bad_index[(1,)](x, found[-1], 64)
    return found, str(caught.value), all(vars(tl)[name] is value for name, value in before.items())


@pytest.mark.slow
@pytest.mark.skipif(not triton.__version__.startswith(VERSION), reason=f"{triton.__version__} is left as it is")
def test_the_quick_interpreter_computes_what_tritons_own_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's own interpreter needs another server, as another path does."""
    quick = run_ranks(launches, 1, interpret=True)[0]
    monkeypatch.setenv(OWN_INTERPRETER, "1")
    monkeypatch.syspath_prepend(tmp_path / "first")
    slow = run_ranks(launches, 1, interpret=True)[0]
    assert all(torch.equal(mine, own) for mine, own in zip(quick[0], slow[0], strict=True))
    assert quick[0][0].any()
    assert quick[1:] == slow[1:]
    assert run_ranks(surroundings, 1, interpret=True)[0][:3] == ("1", os.getcwd(), str(tmp_path / "first"))
