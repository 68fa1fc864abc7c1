"""One rank of a job: get the configuration from rank 0, join the process group, run the task, say what went wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from comet.launch.config import make_job
from comet.launch.distributed import (
    LaunchContext,
    current_context,
    end_with_supervisor,
    leave,
    open_store,
    process_group,
)
from comet.launch.failures import POLL_S, STATUS_USER, report
from comet.launch.tasks import Task
from comet.training.config import JobConfig

SETTINGS_KEY = "comet/settings"
READERS_KEY = "comet/settings/readers"
READERS_S = 20.0  # ranks of another node may still be starting


def run_rank(task: Task, compose: Callable[[], dict[str, Any]], with_traceback: bool) -> NoReturn:
    """Run a task as the rank this process was started as, and end the process with the status of its outcome.

    Args:
        task: What to run; returning normally means success.
        compose: Makes the configuration; called on rank 0 only.
        with_traceback: Print the traceback of errors of the user as well.
    """
    end_with_supervisor()
    context = current_context()
    store = open_store(context)
    with Outcome(context, store, with_traceback) as outcome:
        config = share_config(context, store, compose)
        if config is None:
            leave(STATUS_USER)
        with process_group(context, store):
            task.load()(config, context)
    if outcome.status and context.rank == 0:
        call_off(context, store)
    leave(outcome.status)


def share_config(context: LaunchContext, store: dist.Store, compose: Callable[[], dict[str, Any]]) -> JobConfig | None:
    """Compose and validate on rank 0, and give the result to every rank.

    Args:
        context: This rank.
        store: The job's rendezvous store.
        compose: Makes the configuration; called on rank 0 only.

    Returns:
        The same configuration on every rank; ``None`` on the other ranks when rank 0 called the job off.

    Raises:
        ValueError: On rank 0 only, if the configuration is wrong.
    """
    if context.rank:
        container = json.loads(store.get(SETTINGS_KEY))
        if container is None:
            _meet(context, store)
            return None
        return make_job(container, context.world_size)
    container = compose()
    job = make_job(container, context.world_size)
    store.set(SETTINGS_KEY, json.dumps(container))
    return job


def call_off(context: LaunchContext, store: dist.Store) -> None:
    """Tell the ranks that wait for settings that there are none, once rank 0 has said why; nothing if they have them.

    Args:
        context: Rank 0.
        store: The job's rendezvous store.
    """
    nothing = json.dumps(None)
    if store.compare_set(SETTINGS_KEY, "", nothing) == nothing.encode():
        _meet(context, store)


def _meet(context: LaunchContext, store: dist.Store) -> None:
    """Let no rank leave before all know that the job is off: one that finds the store gone would report a lost rank.

    The first rank to leave has the supervisor of its node end the others, and the store goes with the node of rank 0.
    """
    store.add(READERS_KEY, 1)
    deadline = time.monotonic() + READERS_S
    with suppress(RuntimeError):  # the store is gone: the others have met and left
        while store.add(READERS_KEY, 0) < context.world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)


class Outcome:
    """Context manager that turns whatever ends its body into a report and an exit status.

    Attributes:
        status: 0 while nothing failed.
    """

    def __init__(self, context: LaunchContext, store: dist.Store, with_traceback: bool) -> None:
        self.context = context
        self.store = store
        self.with_traceback = with_traceback
        self.status = 0

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.status = report(error, self.context, self.store, self.with_traceback)
            return True
        return False
