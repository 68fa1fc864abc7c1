"""Run one function in several fresh processes that form a ``torch.distributed`` group, and collect what it returns.

The processes inherit nothing from the test: they load the test file themselves and find modules as after their import.
They are forks of a server that has imported torch and touched no device (``rank_server``).
"""

import functools
import inspect
import logging
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpus import ON_GPUS, backend_of, need_gpus
from rank_server import IN_SERVER, become_rank

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
        backend: Backend of the process group, or ``ON_GPUS`` (see ``gpus.backend_of``); then each rank's current device
            is a GPU, and a test is skipped where there are too few.
        may_die: Ranks that may end by a signal (a test kills them on purpose); they count as returning ``None``.

    Returns:
        ``[fn(0, ...), fn(1, ...), ...]``, each value pickled back from its process.

    Raises:
        AssertionError: If a rank raised or died (with its traceback and output; the others are killed), or on timeout.

    Example:
        With ``def double(rank, world_size, offset): return 2 * rank + offset``,
        ``run_ranks(double, 3, 10)`` returns ``[10, 12, 14]``.
    """
    if "<locals>" in fn.__qualname__:
        raise ValueError(f"fn={fn.__qualname__} must be a module-level function, so that a child process can import it")
    if backend == ON_GPUS:
        need_gpus(world_size)
    job = {
        "file": inspect.getfile(fn),
        "module": fn.__module__,
        "world_size": world_size,
        "backend": backend_of(world_size) if backend == ON_GPUS else backend,
        "timeout": timeout,
        "pickled_call": pickle.dumps((fn, args)),
    }
    with tempfile.TemporaryDirectory(prefix="comet-ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        children: list[ForkServerProcess] = []
        try:
            _start(children, folder, world_size, interpret)
            _wait(children, folder, timeout, may_die)
        finally:
            for child in children:
                child.kill()
                child.join()
        return [_value(rank, folder, may_die) for rank in range(world_size)]


def in_ranks(
    world_size: int | str, *, interpret: bool | str = False, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs in ranks, by ``run_ranks`` with its options.

    Args:
        world_size: How many, or the test's parameters whose product it is ("ep tp"); of a case its ``world_size``.
        interpret: Whether kernels are interpreted, or the parameter that says so: by ``True``, or as a path "fused".
        **options: Others of ``run_ranks``.

    Example: ``@in_ranks(2, interpret="path")`` over ``def test_words(rank, world_size, path)``, of which ``path`` is a
    parameter of the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        _, of_world, *parameters = inspect.signature(body).parameters.values()
        names = world_size.split() if isinstance(world_size, str) else []

        @functools.wraps(body)
        def test(**given: Any) -> None:
            counts = [getattr(given[name], "world_size", given[name]) for name in names] or [world_size]
            is_interpreted = given[interpret] in (True, "fused") if isinstance(interpret, str) else interpret
            run_ranks(
                body, math.prod(counts), *(given[each.name] for each in parameters), interpret=is_interpreted, **options
            )

        shown = [of_world, *parameters] if "world_size" in names else parameters
        test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        body.__qualname__ += ".__wrapped__"  # ranks look the function up by this name
        return test

    return decorate


def logged(name: str) -> list[str]:
    """Return a list that collects what this process logs there from now on: ``["WARNING its text"]``."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return told


_servers: dict[object, ForkServer] = {}  # they serve all tests of this process
_lock = threading.Lock()


def _start(children: list[ForkServerProcess], folder: Path, world_size: int, interpret: bool) -> None:
    """Fork the processes that do the job in ``folder``."""
    for rank in range(world_size):
        children.append(fork_of_server(become_rank, folder, rank, number=rank % 2, interpret=interpret))


def fork_of_server(
    target: Callable[..., Any], *args: Any, number: int = 0, interpret: bool = False
) -> ForkServerProcess:
    """A process that calls ``target(*args)``, forked from a server of this environment and import path.

    Each has two servers, for even and odd ranks: two interpreters have two hash seeds, so that ranks which rely on the
    order of a set fall out of step, as ranks of a real job would.
    """
    with _lock:
        env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(sys.path))
        env["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank that is done at once would break off the others' connections
        # pytest and torch set the last two as they go along, and each new value would ask for a server of its own.
        for name in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"):
            env.pop(name, None)
        if interpret:
            env["TRITON_INTERPRET"] = "1"
        server = _servers.setdefault((tuple(sorted(env.items())), number), ForkServer())
        with patch.dict(os.environ, env | {IN_SERVER: "1"}, clear=True):
            server.set_forkserver_preload(["rank_server"])
            server.ensure_running()
            child = get_context("forkserver").Process(target=target, args=args)
            with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                child.start()
        return child


def _wait(children: Sequence[ForkServerProcess], folder: Path, timeout: float, may_die: Sequence[int]) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [child.exitcode for child in children]
        if any(_is_failure(rank, code, may_die) for rank, code in enumerate(codes)):
            time.sleep(GRACE_S)  # the first to exit may only be the victim of another rank that is about to exit
            codes = [child.exitcode for child in children]
            failed = [rank for rank, code in enumerate(codes) if _is_failure(rank, code, may_die)]
            raise AssertionError("\n".join(_report(rank, codes[rank], folder) for rank in failed))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            for rank in running:
                os.kill(children[rank].pid, signal.SIGUSR1)  # prints the stack of every thread into the log
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
    log = folder / f"log.{rank}"
    output = log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""
    state = "still running" if code is None else f"exit code {code}"
    return f"---- rank {rank} ({state}) ----\n{error}\n-- output of rank {rank} --\n{output}"


def _value(rank: int, folder: Path, may_die: Sequence[int]) -> Any:
    outcome = folder / f"outcome.{rank}"
    if rank in may_die and not outcome.exists():
        return None
    return pickle.loads(outcome.read_bytes())[1]
