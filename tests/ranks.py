"""Run one function in several fresh processes that form a ``torch.distributed`` group, and collect what it returns.

Run as a script, this file is the child: it reads a job file, joins the group, calls the function and writes its
outcome (a value or a traceback) next to the job. Nothing is inherited: ``TRITON_INTERPRET`` is set before any import.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

GRACE_S = 0.5
POLL_S = 0.02
LOG_TAIL = 4000
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Job:
    """What a child needs before it can import the function and unpickle its arguments."""

    file: str
    module: str
    qualname: str
    world_size: int
    backend: str
    timeout: float
    sys_path: list[str]
    pickled_args: bytes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    interpret: bool = False,
    timeout: float = 120,
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
        backend: Backend of the process group.
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
    job = Job(
        file=inspect.getfile(fn),
        module=fn.__module__,
        qualname=fn.__qualname__,
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        sys_path=list(sys.path),
        pickled_args=pickle.dumps(args),
    )
    with tempfile.TemporaryDirectory(prefix="comet-ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(asdict(job)))  # the child knows this class as __main__.Job
        children = [_start(rank, folder, interpret) for rank in range(world_size)]
        try:
            _wait(children, folder, timeout, may_die)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [_value(rank, folder, may_die) for rank in range(world_size)]


def _start(rank: int, folder: Path, interpret: bool) -> subprocess.Popen[bytes]:
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env.pop("TRITON_INTERPRET", None)
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], env=env, stdout=log, stderr=log)


def _wait(children: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float, may_die: Sequence[int]) -> None:
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
            time.sleep(GRACE_S)
            reports = "\n".join(_report(rank, None, folder) for rank in running)
            raise AssertionError(f"ranks {running} still running after {timeout} s\n{reports}")
        time.sleep(POLL_S)


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


def _import_function(job: Job) -> Callable[..., Any]:
    """Load the test file under the module name it had in the parent, so that its classes unpickle on both sides."""
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None, f"cannot import {job.file}"
    assert spec.loader is not None, f"cannot import {job.file}"
    module = importlib.util.module_from_spec(spec)
    parents = job.module.split(".")[:-1]
    for depth in range(len(parents)):
        # Unpickling a class of tests.cpu.test_x imports "tests" as well, which need not be on the path.
        name = ".".join(parents[: depth + 1])
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    function = module
    for name in job.qualname.split("."):
        function = getattr(function, name)
    return function  # type: ignore[return-value]


def _call(job: Job, rank: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn = _import_function(job)
    args = pickle.loads(job.pickled_args)
    if job.backend != "gloo":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    value = fn(rank, job.world_size, *args)
    dist.destroy_process_group()
    return value


def _child(folder: Path, rank: int) -> None:
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted test run leaves no process behind
    job = Job(**pickle.loads((folder / "job").read_bytes()))
    sys.path[:] = job.sys_path
    try:
        outcome = pickle.dumps(("value", _call(job, rank, folder)))
    except BaseException:
        outcome = pickle.dumps(("error", traceback.format_exc()))
        raise
    finally:
        (folder / f"outcome.{rank}").write_bytes(outcome)


if __name__ == "__main__":
    status = 1
    try:
        _child(Path(sys.argv[1]), int(sys.argv[2]))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)  # a background thread of a half-broken process group must not keep a failed rank alive
