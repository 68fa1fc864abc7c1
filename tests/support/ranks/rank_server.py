"""Ranks without the price of a new interpreter: a server imports torch, triton and comet once, and forks the ranks.

``fork_rank`` is the side of the tests. Run as a script, this file is the server: one thread, no process group, no
device. Test files are loaded in the forked process only, so every run finds modules in the state of a fresh import.

The server gets a folder, a rank and one end of a connection per rank. Over it the server receives signals for the rank
and answers with its exit code; once the other end is closed it kills the rank. The server ends with the process that
started it, and the ranks end with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rank_child import become_rank

# What ranks import most, with the modules of all kernels: what is imported here no rank need import, nor, under the
# interpreter, parse. Importing it must start no thread (fork copies only one) and touch no device.
PRELOADED = (
    "pytest torch torch._dynamo triton comet.training.trainer comet.modular comet.decode comet.trace.timeline "
    "comet.layer.fused comet.router.kernels"
).split()
CUDA_DEVICE = "/dev/nvidia-uvm"  # what a process opens with CUDA; a fork of it has no use of CUDA
MESSAGE_BYTES = 4096
POLL_S = 0.01
LOG_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Start:
    """How a server is started; each distinct start has a server of its own.

    Args:
        environment: Environment variables, as sorted pairs.
        sys_path: Where the server imports from.
        parity: 0 or 1, for even and odd ranks: two interpreters have two hash seeds, so that ranks which rely on the
            order of a set fall out of step, as ranks of a real job would.
    """

    environment: tuple[tuple[str, str], ...]
    sys_path: tuple[str, ...]
    parity: int


_servers: dict[Start, RankServer] = {}  # they serve all tests of this process
_lock = threading.Lock()


def fork_rank(start: Start, folder: Path, rank: int) -> ForkedRank:
    """Fork the process that does the job in ``folder`` as ``rank`` and writes to the file ``log.RANK`` there."""
    with _lock:
        server = _servers.get(start)
        if server is None or server.process.poll() is not None:
            server = _servers[start] = RankServer(start)
        return server.fork(folder, rank)


class RankServer:
    def __init__(self, start: Start) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - read when the server has ended
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), json.dumps(start.sys_path)],
                env=dict(start.environment),
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
    """A process the server forked, with what ``run_ranks`` needs of ``subprocess.Popen``."""

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


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    connection: socket.socket

    def obey(self) -> None:
        """Pass on the signal that came over the connection."""
        message = self.connection.recv(MESSAGE_BYTES)
        os.kill(self.pid, message[0] if message else signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether the process has; its exit code is told once."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        with contextlib.suppress(ConnectionError):
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.connection.close()
        return True


def serve(control: socket.socket) -> None:
    """Fork the ranks asked for over ``control`` and look after them, until its other end is closed."""
    children: list[_Child] = []
    while True:
        connections = [child.connection for child in children]
        ready = select.select([control, *connections], [], [], POLL_S if children else None)[0]
        for child in children:
            if child.connection in ready:
                child.obey()
        children = [child for child in children if not child.has_ended()]
        if control in ready:
            request, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not request:
                return
            folder, rank = json.loads(request)
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                for end in (control, *(child.connection for child in children)):
                    end.close()
                _become_forked_rank(Path(folder), rank, server)
            children.append(_Child(pid, socket.socket(fileno=descriptors[0])))


def _become_forked_rank(folder: Path, rank: int, server: int) -> NoReturn:
    """Keeps its end of the connection open, so that ``ForkedRank.wait`` outlasts it even when the server is gone."""
    with (folder / f"log.{rank}").open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    import numpy as np
    import torch

    np.random.seed()  # no two processes draw the same, as when fresh; Python's own generator sees to that itself
    torch.default_generator.seed()
    become_rank(folder, rank, server)


def _refuse_what_forks_lack(imported: str) -> None:
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads after importing {imported}: a fork would lack all but one")
    opened = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    if CUDA_DEVICE in opened:
        raise RuntimeError(f"{CUDA_DEVICE} is open after importing {imported}: no fork could use a GPU")


def _main(descriptor: int, sys_path: list[str]) -> None:
    sys.path[:] = sys_path
    for name in PRELOADED:
        importlib.import_module(name)
        _refuse_what_forks_lack(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import quicken

        quicken()
        _refuse_what_forks_lack("quick_interpreter")
    gc.freeze()  # a collection in a fork leaves these objects alone, and their pages shared
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _main(int(sys.argv[1]), json.loads(sys.argv[2]))
