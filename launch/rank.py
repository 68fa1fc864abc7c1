"""One rank of a job: meet the others, get the configuration, run the task, say what went wrong."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from comet.config import require
from comet.jobs.config import JobConfig
from comet.launch.config import compose, make_job, names_folder
from comet.launch.distributed import (
    SETTINGS_KEY,
    WORDS_KEY,
    LaunchContext,
    current_context,
    join,
    leave,
    open_store,
    process_group,
)
from comet.launch.failures import report, say_silent
from comet.launch.memory import require_memory
from comet.launch.messages import STATUS_SAVED
from comet.launch.schema import defaults_of
from comet.launch.signs import Signs
from comet.launch.tasks.registry import Task, imported


def run_rank(task: Task, options: Namespace) -> NoReturn:
    """Run a task as the rank this process was started as, and end the process with the status of its outcome."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # This also ends a collective; nothing depends on an end in order.
    context, status = current_context(), 0
    signs: Signs | None = None  # how this rank talks with the others, once they have met

    def reported(kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        nonlocal status
        if isinstance(error, Exception):
            status = report(error, signs, options.traceback)
        return isinstance(error, Exception)

    with ExitStack() as ends:
        ends.push(reported)
        store = open_store(context)
        context, part, members = join(context, store)
        signs = Signs(context, part, members, say_silent)
        signs.start()
        config = share_config(context, store, part, task, options)
        signs.watch(config.comm.timeout_s)
        if context.local_rank == 0 or context.device.type == "cuda":  # No rank allocates before all have joined below.
            require_memory(task, config, context.world_size, context.local_world_size, context.device)
        with process_group(context, part, config.comm.timeout_s):
            result = imported(task.function)(config, context)
        signs.finish()
        if isinstance(result, Mapping) and result.get("stopped"):
            leave(STATUS_SAVED)
    leave(status)


def share_config(
    context: LaunchContext, store: dist.Store, part: dist.Store, task: Task, options: Namespace
) -> JobConfig:
    """Compose on rank 0, unless the launcher or an earlier attempt did, and validate on every rank.

    The job's rendezvous ``store`` keeps the settings from one attempt to the next; this attempt has its own ``part``.
    What another node was started with would be left out, so it must be what rank 0 was.
    """
    settings = imported(task.settings)
    words = " ".join([task.function, *(["--config", options.config] if options.config else []), *options.overrides])
    if context.rank:
        first = part.get(WORDS_KEY).decode()
        require(words == first, f"rank {context.rank} was started as {words!r}, but must be as rank 0, {first!r}")
        return make_job(json.loads(part.get(SETTINGS_KEY)), context.world_size, settings)
    if not store.check([SETTINGS_KEY]):
        require(
            context.attempt == 0
            or "output_dir" not in defaults_of(settings)
            or names_folder(options.overrides, settings, options.config),
            "output_dir must be given where torchrun starts ranks anew, as this store does not keep the first one's",
        )
        container = compose(options.overrides, settings, file=options.config)
        restarts = make_job(container, context.world_size, settings).launch.max_restarts
        require(restarts == 0, f"launch.max_restarts={restarts} must be 0 under torchrun: use its own --max-restarts")
        store.set(SETTINGS_KEY, json.dumps(container))
    part.set(WORDS_KEY, words)
    text = store.get(SETTINGS_KEY).decode()
    job: JobConfig = make_job(json.loads(text), context.world_size, settings)
    part.set(SETTINGS_KEY, text)
    return job
