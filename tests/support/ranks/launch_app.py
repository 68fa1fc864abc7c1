"""A command line with the launcher's real ``main`` and small tasks that end in every way a job can end.

Run as ``python tests/support/ranks/launch_app.py TASK [settings]``; the folder for notes is ``output_dir``.
"""

import atexit
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comet.errors import CommTimeoutError, UnavailableError
from comet.jobs.config import TrainJob
from comet.launch.cli import main
from comet.launch.distributed import LaunchContext
from comet.launch.tasks.registry import Task
from comet.training.step import TrainStep
from comet.training.trainer import train

FAILING_RANK = 1


def note(config: TrainJob, context: LaunchContext) -> None:
    """Leaves the rank's process id, and waits for the others': a rank that fails at once would end them before."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pid.{context.rank}").write_text(str(os.getpid()))
    dist.barrier()


def add_ranks(config: TrainJob, context: LaunchContext) -> None:
    """Leaves what aborts an interpreter that shuts down, as a thread of a process group now and then does."""
    atexit.register(os.abort)
    note(config, context)
    total = torch.tensor([context.rank + 1])
    dist.all_reduce(total)
    if context.rank == 0:
        print("a line before")
        print(
            json.dumps(
                {
                    "total": int(total),
                    "world_size": context.world_size,
                    "steps": config.train.steps,
                    "ep": config.parallel.ep,
                    "nodes": context.num_nodes,
                    "threads": torch.get_num_threads(),
                }
            )
        )


def write_lines(config: TrainJob, context: LaunchContext) -> None:
    note(config, context)
    while context.rank == 0:
        print("a line", flush=True)
    dist.barrier()


def report_context(config: TrainJob, context: LaunchContext) -> None:
    note(config, context)
    everything: list[object] = [None] * context.world_size
    dist.all_gather_object(everything, (context.rank, context.node, context.local_rank, config.output_dir))
    if context.rank == 0:
        print(json.dumps(everything))


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def wait_forever() -> None:
    """Sleep in Python, so that signals are seen and no deadline ends the wait."""
    while True:
        time.sleep(0.1)


def deadlock() -> None:
    """Wait for the other rank inside C++, where Python sees no signal."""
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


refuse = raising(ValueError("seed=0 must please everyone"))
# Tasks by what rank 1 does, and the other one.
ENDS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "crash": (raising(KeyError("a bug of ours")), dist.barrier),
    "refuse": (refuse, refuse),
    "refuse_alone": (
        raising(UnavailableError("backend=nvshmem needs a package: pip install comet-moe[nvshmem]")), dist.barrier
    ),
    "time_out": (
        raising(CommTimeoutError("rank 1 waited 30.0 s for rank 0 (layer 0 dispatch, chunk 17, epoch 41, saw 40)")),
        wait_forever,
    ),
    "late": (wait_forever, dist.barrier),
    "refuse_while_others_wait": (raising(ValueError("tokens=7 must please everyone")), wait_forever),
    "sleep": (wait_forever, wait_forever),
    "deadlock": (deadlock, deadlock),
}  # fmt: skip


def end(name: str, config: TrainJob, context: LaunchContext) -> None:
    note(config, context)
    ENDS[name][context.rank != FAILING_RANK]()


globals().update({name: partial(end, name) for name in ENDS})  # the launcher imports a task by its name


def train_and_be_killed(config: TrainJob, context: LaunchContext) -> None:
    """Train; ``kills.json`` in the text's folder names the rank, call and place to kill in each attempt."""
    kills = json.loads(Path(str(config.data.path)).with_name("kills.json").read_text())
    rank, number, place = kills[context.attempt] if context.attempt < len(kills) else (None, 0, "step")
    if rank == context.rank:
        owner, name = KILLED_AT[place]
        function, calls = getattr(owner, name), itertools.count(1)

        def die_some_time(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        setattr(owner, name, die_some_time)
    train(config, context)


def plain(arguments: list[str]) -> int:
    print(arguments)
    return len(arguments)


# Calls of fsync and rename are those of a checkpoint that is being written.
KILLED_AT: dict[str, tuple[Any, str]] = {
    "step": (TrainStep, "__call__"),
    "fsync": (os, "fsync"),
    "rename": (Path, "rename"),
}
FUNCTIONS = (train_and_be_killed, add_ranks, write_lines, report_context)
TASKS = {name: Task("a test", f"launch_app.{name}") for name in (*ENDS, *(each.__name__ for each in FUNCTIONS))}
TASKS["plain"] = Task("a test", "launch_app.plain", settings="")
TASKS["gone"] = Task("a test", "launch_app_gone.gone")

if __name__ == "__main__":
    raise SystemExit(main(tasks=TASKS, program=(__file__,)))
