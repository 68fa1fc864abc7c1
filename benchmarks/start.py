"""How a benchmark starts, by itself or as one rank of torchrun, what it says, and how it ends.

Mistakes are one line and status 2.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from points import Ranks

from comet.config import ParallelConfig, require
from comet.launch.distributed import (
    current_context,
    leave,
    open_store,
    process_group,
    speaks_for_job,
    started_by_torchrun,
)
from comet.launch.failures import STATUS_USER, is_user_error, one_line, say

SPEAKER_S = 20.0  # rank 0 may still be importing what this rank has


def words(text: str) -> tuple[str, ...]:
    """``comet,plain`` of a command line as ``("comet", "plain")``."""
    return tuple(text.split(","))


def whole_numbers(text: str) -> list[int]:
    """``8,32`` of a command line as ``[8, 32]``."""
    return [int(number) for number in text.split(",")]


def run_and_leave(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run one rank of a benchmark with the words of its command line, and end the process with the status it returns.

    A mistake of the user is one line, as of the command ``comet``. Before the ranks have met all of them find it: rank
    0 says it, while the others wait for torchrun to end them, which it does when the first rank leaves. Afterwards each
    rank that meets one says so. Anything else shows its traceback.
    """
    try:
        status = main(sys.argv[1:])
    except Exception as error:
        if not is_user_error(error):
            raise
        if not (speaks_for_job() or dist.is_initialized()):
            time.sleep(SPEAKER_S)
        say(f"error: {one_line(error)}")
        leave(STATUS_USER)
    leave(status or 0)


def start_ranks(parallel: ParallelConfig, device: str, run: Callable[[Ranks], None]) -> None:
    """Run one rank of a benchmark, which for a rank alone needs no torchrun.

    Args:
        parallel: The ranks asked for.
        device: ``auto`` takes a GPU where there is one, ``cpu`` none.
        run: What a rank does.

    Raises:
        ValueError: If other than ``ep x tp`` ranks were started.
    """
    wanted = parallel.world_size
    if not started_by_torchrun():
        require(wanted == 1, f"ep={parallel.ep} x tp={parallel.tp}: start {wanted} ranks with torchrun")
        on_gpu = device == "auto" and torch.cuda.is_available()
        run(Ranks(0, torch.device("cuda" if on_gpu else "cpu"), None))
        return
    context = current_context()
    if device == "cpu":
        context = replace(context, device=torch.device("cpu"))
    require(context.world_size == wanted, f"nproc={context.world_size} must equal ep x tp = {wanted}")
    with process_group(context, open_store(context)):
        run(Ranks(context.rank, context.device, dist.group.WORLD if wanted > 1 else None))


def tell(ranks: Ranks, line: str) -> None:
    """One line of progress, by rank 0."""
    if ranks.rank == 0:
        print(line, file=sys.stderr, flush=True)
