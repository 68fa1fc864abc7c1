"""Python programs as forks of the server of ranks, and as forks of these: torch and Comet are imported already.

A job of the command line is three programs, a launcher and two ranks, and starts in a tenth of the usual time.
"""

import atexit
import ctypes
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
OPTIONS = ("-P", "-u")  # options of the interpreter that make no difference here


class Forked(subprocess.Popen):
    """A ``Popen`` that forks this process, in a new session, when the command is this interpreter."""

    def _execute_child(self, command: Sequence[str], *rest: Any) -> None:
        if isinstance(command, str) or command[0] != sys.executable:
            super()._execute_child(command, *rest)
            return
        _, _, _, _, folder, env, _, _, _, *pipes = rest[:15]
        out, err = (inherited if pipe == -1 else pipe for pipe, inherited in ((pipes[3], 1), (pipes[5], 2)))
        self._fork(command[1:], folder or os.getcwd(), env or os.environ, out, err)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _fork(self, arguments: Sequence[str], folder: str | Path, env: Mapping[str, str], out: int, err: int) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            for file in os.listdir("/proc/self/fd"):
                with suppress(FileNotFoundError):  # ``listdir`` has closed its own descriptor
                    if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                        os.close(int(file))
            become_program(arguments, folder, dict(env), out, err)


class Program(Forked):
    """A fork of the server as a ``subprocess.Popen``; it inherits only standard output and error from this process."""

    def _fork(self, arguments: Sequence[str], folder: str | Path, env: Mapping[str, str], out: int, err: int) -> None:
        from ranks import fork_of_server

        outputs = [Connection(os.dup(descriptor), readable=False) for descriptor in (out, err)]
        call = (_in_server, list(arguments), folder, dict(env), outputs)
        self.process = fork_of_server(*call, interpret=env.get("TRITON_INTERPRET") == "1")
        self.pid = self.process.pid

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._joined(0)

    def _wait(self, timeout: float | None) -> int:
        if self._joined(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _joined(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.process.join(timeout)
            self.returncode = self.process.exitcode
        return self.returncode


def completed(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of such a program, with what it prints; it is ended where it takes longer."""
    process = Program(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _in_server(
    arguments: Sequence[str], folder: str | Path, env: Mapping[str, str], outputs: Sequence[Connection]
) -> NoReturn:
    # The server ends with the test run, and programs end with the server, as in ``rank_server``.
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    subprocess.Popen = Forked  # type: ignore[misc]
    become_program(arguments, folder, env, *(each.fileno() for each in outputs))


def become_program(
    arguments: Sequence[str], folder: str | Path, env: Mapping[str, str], out: int, err: int
) -> NoReturn:
    """Be in this process what the interpreter would be that is started with these arguments."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        _run(list(arguments))
    finally:
        status = _status(sys.exc_info()[1])
        atexit._run_exitfuncs()
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)


def _status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if error is not None:
        traceback.print_exception(error)
    return int(error is not None)


def _run(arguments: list[str]) -> None:
    import torch

    torch.default_generator.seed()  # no two programs draw the same
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    while arguments[0] in OPTIONS:
        del arguments[0]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
