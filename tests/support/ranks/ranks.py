"""Run one function in several fresh processes that form a ``torch.distributed`` group, and collect what it returns.

The processes inherit nothing from the test: they load the test file themselves and find modules as after their import.
They are forks of a server (``rank_server``) that has imported torch and touched no device.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpus import ON_GPUS, backend_of

SERVER = Path(__file__).with_name("rank_server.py")
GRACE_S = 0.2
STACK_S = 10.0
POLL_S = 0.02
LOG_TAIL = 4000
MESSAGE_BYTES = 4096


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
        backend: Backend of the process group, or ``ON_GPUS`` (see ``gpus.backend_of``).
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
    job = {
        "file": inspect.getfile(fn),
        "module": fn.__module__,
        "qualname": fn.__qualname__,
        "world_size": world_size,
        "backend": backend_of(world_size) if backend == ON_GPUS else backend,
        "timeout": timeout,
        "cwd": os.getcwd(),
        "pickled_args": pickle.dumps(args),
    }
    with tempfile.TemporaryDirectory(prefix="comet-ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        children: list[ForkedRank] = []
        try:
            for rank in range(world_size):
                children.append(_fork(rank, folder, interpret))
            _wait(children, folder, timeout, may_die)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [_value(rank, folder, may_die) for rank in range(world_size)]


def in_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs in so many ranks, by ``run_ranks`` with its options.

    Example: ``@in_ranks(2, interpret=True)`` over ``def test_words(rank, world_size, kind)``, of which ``kind`` is a
    parameter of the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())[2:]

        @functools.wraps(body)
        def test(**given: Any) -> None:
            run_ranks(body, world_size, *(given[each.name] for each in parameters), **options)

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        body.__qualname__ += ".__wrapped__"  # by which ranks find it
        return test

    return decorate


_servers: dict[object, RankServer] = {}  # they serve all tests of this process
_lock = threading.Lock()


def _fork(rank: int, folder: Path, interpret: bool) -> ForkedRank:
    """Fork the process that does the job in ``folder`` as ``rank`` and writes to the file ``log.RANK`` there.

    Each environment and import path has two servers, for even and odd ranks: two interpreters have two hash seeds, so
    that ranks which rely on the order of a set fall out of step, as ranks of a real job would.
    """
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank that is done at once would break off the connections of the others
    # pytest and torch set the last two as they go along, and each new value would ask for a server of its own.
    for name in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"):
        env.pop(name, None)
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    start = (tuple(sorted(env.items())), tuple(sys.path), rank % 2)
    with _lock:
        server = _servers.get(start)
        if server is None or server.process.poll() is not None:
            server = _servers[start] = RankServer(env)
        return server.fork(folder, rank)


class RankServer:
    """A process that forks ranks, and ends with this one.

    It gets a folder, a rank and one end of a connection per rank. Over it the server receives signals for the rank and
    answers with its exit code; once the other end is closed it kills the rank. The ranks end with the server.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - read when the server has ended
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, SERVER, str(theirs.fileno()), json.dumps(sys.path)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def fork(self, folder: Path, rank: int) -> ForkedRank:
        """Ask for a rank; whether the server still lives shows when the rank is polled."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(ConnectionError):
            socket.send_fds(self.control, [json.dumps([str(folder), rank]).encode()], [theirs.fileno()])
        return ForkedRank(self, connection)

    def close(self) -> None:
        self.control.close()
        self.process.wait()

    def obituary(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        return f"the rank server ended with exit code {code}\n{self.log.read().decode(errors='replace')[-LOG_TAIL:]}"


class ForkedRank:
    """A process the server forked, with the methods of ``subprocess.Popen``."""

    def __init__(self, server: RankServer, connection: socket.socket) -> None:
        self.server = server
        self.connection = connection
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code (minus the signal), ``None`` while it runs; raises ``RuntimeError`` if the server is gone."""
        if self.code is None:
            with contextlib.suppress(BlockingIOError):
                self._receive(socket.MSG_DONTWAIT)
                if self.code is None:
                    raise RuntimeError(self.server.obituary())
        return self.code

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Return when the process has ended, also if the server has."""
        if self.code is None:
            self._receive(0)
        self.connection.close()

    def _receive(self, flags: int) -> None:
        with contextlib.suppress(ConnectionError):
            if message := self.connection.recv(MESSAGE_BYTES, flags):  # empty: nobody holds the other end any more
                self.code = int(message)


def _wait(children: Sequence[ForkedRank], folder: Path, timeout: float, may_die: Sequence[int]) -> None:
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
