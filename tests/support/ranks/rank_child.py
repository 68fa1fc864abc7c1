"""What a process does as one rank of ``run_ranks``: read the job, join the group, call the function, note the outcome.

Run as a script, this file is a fresh process; the rank server calls ``become_rank`` in a process it has just forked.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank needs before it can import the function and unpickle its arguments."""

    file: str
    module: str
    qualname: str
    world_size: int
    backend: str
    timeout: float
    sys_path: list[str]
    cwd: str
    pickled_args: bytes


def become_rank(folder: Path, rank: int, parent: int) -> NoReturn:
    """Do the job in ``folder`` as ``rank`` and end this process: status 0 if the function returned, otherwise 1.

    Args:
        folder: Holds the file ``job`` and receives ``outcome.RANK``, a pickled value or traceback.
        rank: This rank.
        parent: Process id of the parent; when it ends, this process is killed.
    """
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted test run leaves no process behind
    status = 1
    try:
        if os.getppid() == parent:
            _do_job(folder, rank)
            status = 0
    finally:
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()  # such as a manager, which an interpreter that shuts down would end
        os._exit(status)  # a background thread of a half-broken process group must not keep a failed rank alive


def _do_job(folder: Path, rank: int) -> None:
    job = Job(**pickle.loads((folder / "job").read_bytes()))
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    try:
        outcome = pickle.dumps(("value", _call(job, rank, folder)))
    except BaseException:
        outcome = pickle.dumps(("error", traceback.format_exc()))
        raise
    finally:
        (folder / f"outcome.{rank}").write_bytes(outcome)


def _call(job: Job, rank: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn = _import_function(job)
    args = pickle.loads(job.pickled_args)
    if "cuda" in job.backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
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


if __name__ == "__main__":
    become_rank(Path(sys.argv[1]), int(sys.argv[2]), os.getppid())
