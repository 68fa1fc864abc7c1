"""Run one function in several fresh processes that form a ``torch.distributed`` group, and collect what it returns.

The processes inherit nothing from the test: they load the test file themselves and find modules as after their import.
They are forks of a server that has imported torch and touched no device (``rank_server``); with any backend but
``gloo`` and ``ON_GPUS`` they are new interpreters (``rank_child``).
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpus import ON_GPUS, backend_of
from rank_child import Job
from rank_server import ForkedRank, Start, fork_rank

Child = ForkedRank | subprocess.Popen[bytes]

FRESH = Path(__file__).with_name("rank_child.py")
GRACE_S = 0.2
STACK_S = 10.0
POLL_S = 0.02
LOG_TAIL = 4000


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    interpret: bool = False,
    timeout: float = 300,
    backend: str = "gloo",
    may_die: Sequence[int] = (),
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in ``world_size`` fresh processes that share a process group.

    The default group of ``torch.distributed`` is ready when ``fn`` starts and destroyed after it returned. ``fn`` is
    found again by file and qualified name, so it must be a module-level function of a file.

    Args:
        fn: A module-level function.
        world_size: Number of processes, at least 1.
        *args: Further arguments, picklable.
        interpret: Set ``TRITON_INTERPRET=1`` in the children before anything is imported (unset it otherwise).
        timeout: Seconds after which every rank is killed and those still running are named.
        backend: Backend of the process group; ``gloo`` and ``ON_GPUS`` (see ``gpus.backend_of``) fork the processes,
            any other starts new interpreters.
        may_die: Ranks that may end by a signal (a test kills them on purpose); they count as returning ``None``.

    Returns:
        ``[fn(0, ...), fn(1, ...), ...]``, each value pickled back from its process.

    Raises:
        AssertionError: If a rank raised or died (with its traceback and output; the others are killed), or on timeout.
        RuntimeError: If the server of the ranks died, with its output.

    Example:
        With ``def double(rank, world_size, offset): return 2 * rank + offset``,
        ``run_ranks(double, 3, 10)`` returns ``[10, 12, 14]``.
    """
    if "<locals>" in fn.__qualname__:
        raise ValueError(f"fn={fn.__qualname__} must be a module-level function, so that a child process can import it")
    job = Job(
        file=inspect.getfile(fn),
        module=fn.__module__,
        qualname=fn.__qualname__,
        world_size=world_size,
        backend=backend_of(world_size) if backend == ON_GPUS else backend,
        timeout=timeout,
        sys_path=list(sys.path),
        cwd=os.getcwd(),
        pickled_args=pickle.dumps(args),
    )
    with tempfile.TemporaryDirectory(prefix="comet-ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(asdict(job)))  # a class of its own in a child whose __main__ it is
        children: list[Child] = []
        try:
            for rank in range(world_size):
                children.append(_start(rank, folder, interpret, fork=backend in ("gloo", ON_GPUS)))
            _wait(children, folder, timeout, may_die)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [_value(rank, folder, may_die) for rank in range(world_size)]


def _start(rank: int, folder: Path, interpret: bool, fork: bool) -> Child:
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank that is done at once would break off the connections of the others
    # pytest and torch set the last two as they go along, and each new value would ask for a server of its own.
    for name in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"):
        env.pop(name, None)
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    with (folder / f"log.{rank}").open("wb") as log:
        if fork:
            return fork_rank(Start(tuple(sorted(env.items())), tuple(sys.path), rank % 2), folder, rank)
        return subprocess.Popen([sys.executable, FRESH, str(folder), str(rank)], env=env, stdout=log, stderr=log)


def _wait(children: Sequence[Child], folder: Path, timeout: float, may_die: Sequence[int]) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [child.poll() for child in children]
        if any(_is_failure(rank, code, may_die) for rank, code in enumerate(codes)):
            time.sleep(GRACE_S)  # the first to exit may only be the victim of another rank that is about to exit
            codes = [child.poll() for child in children]
            failed = [rank for rank, code in enumerate(codes) if _is_failure(rank, code, may_die)]
            raise AssertionError("\n".join(_report(rank, codes[rank], folder) for rank in failed))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            for rank in running:
                children[rank].send_signal(signal.SIGUSR1)  # prints the stack of every thread into the log
            _await_stacks([folder / f"log.{rank}" for rank in running])
            reports = "\n".join(_report(rank, None, folder) for rank in running)
            raise AssertionError(f"ranks {running} still running after {timeout} s\n{reports}")
        time.sleep(POLL_S)


def _await_stacks(logs: Sequence[Path]) -> None:
    """Wait until each process has printed where it is; one that is stopped cannot."""
    polls = 0
    while not all("Current thread" in log.read_text(errors="replace") for log in logs) and polls * POLL_S < STACK_S:
        polls += 1
        time.sleep(POLL_S)
    time.sleep(GRACE_S)  # the lines behind these words


def _is_failure(rank: int, code: int | None, may_die: Sequence[int]) -> bool:
    return code not in (None, 0) and not (code is not None and code < 0 and rank in may_die)


def _report(rank: int, code: int | None, folder: Path) -> str:
    outcome = folder / f"outcome.{rank}"
    error = pickle.loads(outcome.read_bytes())[1] if code is not None and outcome.exists() else ""
    log = (folder / f"log.{rank}").read_text(errors="replace")[-LOG_TAIL:]
    state = "still running" if code is None else f"exit code {code}"
    return f"---- rank {rank} ({state}) ----\n{error}\n-- output of rank {rank} --\n{log}"


def _value(rank: int, folder: Path, may_die: Sequence[int]) -> Any:
    outcome = folder / f"outcome.{rank}"
    if rank in may_die and not outcome.exists():
        return None
    return pickle.loads(outcome.read_bytes())[1]
