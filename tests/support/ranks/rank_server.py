"""Ranks without the price of a new interpreter: a server imports torch, triton and comet once, and forks the ranks.

``ranks.RankServer`` runs this file as a script: one thread, no process group, no device. Test files are loaded in the
forked process only, so every run finds modules in the state of a fresh import.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

# What ranks import most, with the modules of all kernels: what is imported here no rank need import, nor, under the
# interpreter, parse. Importing it must start no thread (fork copies only one) and touch no device.
PRELOADED = (
    "pytest torch torch._dynamo triton comet.training.trainer comet.modular comet.decode comet.trace.timeline "
    "comet.layer.fused comet.router.kernels"
).split()
CUDA_DEVICE = "/dev/nvidia-uvm"  # what a process opens with CUDA; a fork of it has no use of CUDA
OWN_INTERPRETER = "COMET_TEST_OWN_INTERPRETER"  # leaves Triton's interpreter as it is
PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 4096
POLL_S = 0.01


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
                become_rank(Path(folder), rank, server)
            children.append(_Child(pid, socket.socket(fileno=descriptors[0])))


def become_rank(folder: Path, rank: int, server: int) -> NoReturn:
    """Do the job in ``folder`` as ``rank`` and end this process: status 0 if the function returned, otherwise 1.

    It keeps its end of the connection open, so that ``ForkedRank.wait`` outlasts it even when the server is gone.
    """
    status = 1
    try:
        with (folder / f"log.{rank}").open("wb") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        faulthandler.register(signal.SIGUSR1)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted test run leaves no process behind
        if os.getppid() == server:
            _do_job(folder, rank)
            status = 0
    finally:
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()  # such as a manager, which an interpreter that shuts down would end
        os._exit(status)  # a background thread of a half-broken process group must not keep a failed rank alive


def _do_job(folder: Path, rank: int) -> None:
    """Leave ``outcome.RANK`` in the folder, a pickled value or traceback."""
    try:
        outcome = pickle.dumps(("value", _call(pickle.loads((folder / "job").read_bytes()), rank, folder)))
    except BaseException:
        outcome = pickle.dumps(("error", traceback.format_exc()))
        raise
    finally:
        (folder / f"outcome.{rank}").write_bytes(outcome)


def _call(job: dict[str, Any], rank: int, folder: Path) -> Any:
    import numpy as np
    import torch
    import torch.distributed as dist

    os.chdir(job["cwd"])
    np.random.seed()  # no two processes draw the same, as when fresh; Python's own generator sees to that itself
    torch.default_generator.seed()
    torch.set_num_threads(1)
    fn = _import_function(**{name: job[name] for name in ("file", "module", "qualname")})
    args = pickle.loads(job["pickled_args"])
    if "cuda" in job["backend"]:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        job["backend"],
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["timeout"]),
    )
    value = fn(rank, job["world_size"], *args)
    dist.destroy_process_group()
    return value


def _import_function(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """Load the test file under the module name it had in the parent, so that its classes unpickle on both sides."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None, f"cannot import {file}"
    assert spec.loader is not None, f"cannot import {file}"
    found: Any = importlib.util.module_from_spec(spec)
    parents = module.split(".")[:-1]
    for depth in range(len(parents)):
        # Unpickling a class of tests.cpu.test_x imports "tests" as well, which need not be on the path.
        name = ".".join(parents[: depth + 1])
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[module] = found
    spec.loader.exec_module(found)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


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
    if os.environ.get("TRITON_INTERPRET") == "1" and OWN_INTERPRETER not in os.environ:
        from quick_interpreter import quicken

        quicken()
        _refuse_what_forks_lack("quick_interpreter")
    gc.freeze()  # a collection in a fork leaves these objects alone, and their pages shared
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _main(int(sys.argv[1]), json.loads(sys.argv[2]))
