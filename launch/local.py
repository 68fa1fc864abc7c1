"""Start the ranks of a job on this machine through torchrun's own API, and wait for them."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from comet.launch.distributed import prepare_environment
from comet.launch.failures import STATUS_FAILED, say

SIGNAL_STATUS = 128


def run_local_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run ``command`` once per rank and wait until all have ended; the first failure ends the others.

    Ranks inherit standard output and standard error. Each rank says itself why it failed; only a rank that was killed
    cannot, so that is said here.

    Args:
        command: Arguments for this Python interpreter.
        num_ranks: Ranks to start.

    Returns:
        The exit status: 0, the status of the rank that failed first, 1 when a rank was killed, 128 + signal when this
        process was told to stop (130 for Ctrl-C).
    """
    prepare_environment(num_ranks)
    silence(logging.getLogger("torch.distributed.elastic"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failure:
        return _failed_status(failure)
    except SignalException as stop:
        say(f"stopped by {signal.Signals(stop.sigval).name}; all ranks were ended")
        return SIGNAL_STATUS + int(stop.sigval)
    return 0


def silence(logger: logging.Logger) -> None:
    """Drop what the supervisor logs about failed ranks: the ranks speak for themselves."""
    logger.handlers = [logging.NullHandler()]
    logger.propagate = False


def _failed_status(failure: ChildFailedError) -> int:
    exits = [item.exitcode for item in failure.failures.values() if item.exitcode > 0]
    killed = {rank: item for rank, item in failure.failures.items() if item.exitcode < 0}
    # SIGTERM is how the supervisor ends the others: it explains a failure only when nothing else does.
    causes = {rank: item for rank, item in killed.items() if item.exitcode != -signal.SIGTERM}
    if not (causes or exits):
        causes = killed
    for rank, item in sorted(causes.items()):
        say(f"error: rank {rank} (pid {item.pid}) was killed by {item.signal_name()}; the other ranks were ended")
    return STATUS_FAILED if causes else max(exits)
