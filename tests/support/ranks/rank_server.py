"""A rank of a test: a process forked from a server that has imported torch, triton and comet and touched no device.

The server is one of ``multiprocessing.forkserver``. It imports this file as well; test files are loaded in the forked
process only, so every run finds modules in the state of a fresh import.
"""

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import traceback
import types
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import late_warps

# Ranks need not import these modules (with those of all kernels) nor, under the interpreter, parse them. An import here
# must start no thread (fork copies only one) and touch no device.
PRELOADED = (
    "pytest torch torch._dynamo triton comet.training.trainer comet.modular comet.decode comet.trace.timeline "
    "comet.layer.fused comet.router.kernels comet.launch.config comet.launch.rank comet.launch.local"
).split()
CUDA_DEVICE = "/dev/nvidia-uvm"  # open in a process that has initialised CUDA; a fork of this process cannot use CUDA
IN_SERVER = "COMET_TEST_RANK_SERVER"  # set while a server imports this file
OWN_INTERPRETER = "COMET_TEST_OWN_INTERPRETER"  # leaves Triton's interpreter as it is
PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Import what ranks will need, in the server."""
    for name in PRELOADED:
        importlib.import_module(name)
        _refuse_what_forks_lack(name)
    if os.environ.get("TRITON_INTERPRET") == "1" and OWN_INTERPRETER not in os.environ:
        from quick_interpreter import quicken

        quicken()
    late_warps.install_if_asked()
    gc.freeze()  # a collection in a fork leaves these objects alone, and their pages shared


def _refuse_what_forks_lack(imported: str) -> None:
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads after importing {imported}: a fork would lack all but one")
    opened = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    if CUDA_DEVICE in opened:
        raise RuntimeError(f"{CUDA_DEVICE} is open after importing {imported}: no fork could use a GPU")


def become_rank(folder: Path, rank: int) -> NoReturn:
    """Do the job in ``folder`` as ``rank`` and end this process: status 0 if the function returned, otherwise 1.

    Output goes to ``log.RANK`` there, a pickled value or traceback to ``outcome.RANK``.
    """
    status = 1
    try:
        with (folder / f"log.{rank}").open("wb") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        faulthandler.register(signal.SIGUSR1)
        # The server ends with the test run, unless a rank holds its end of this pipe; and ranks end with the server.
        os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            outcome = pickle.dumps(("value", _call(pickle.loads((folder / "job").read_bytes()), rank, folder)))
        except BaseException:
            outcome = pickle.dumps(("error", traceback.format_exc()))
            raise
        finally:
            (folder / f"outcome.{rank}").write_bytes(outcome)
        status = 0
    finally:
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()  # such as a manager, which an interpreter that shuts down would end
        os._exit(status)  # a background thread of a half-broken process group must not keep a failed rank alive


def _call(job: dict[str, Any], rank: int, folder: Path) -> Any:
    import numpy as np
    import torch
    import torch.distributed as dist

    np.random.seed()  # no two processes draw the same, as when fresh; Python's own generator sees to that itself
    torch.default_generator.seed()
    torch.set_num_threads(1)
    _load_file(job["file"], job["module"])
    fn, args = pickle.loads(job["pickled_call"])
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


def _load_file(file: str, name: str) -> None:
    """Load the test file under the module name it had in the parent, so that its classes unpickle on both sides."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"cannot import {file}"
    assert spec.loader is not None, f"cannot import {file}"
    parents = name.split(".")[:-1]
    for depth in range(len(parents)):  # parents need not be on the path
        sys.modules.setdefault(parent := ".".join(parents[: depth + 1]), types.ModuleType(parent))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if os.environ.pop(IN_SERVER, ""):
    prepare()
