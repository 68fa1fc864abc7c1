"""How a benchmark starts, by itself or as one rank of torchrun, what it says, and how it ends; the facts of every run.

Mistakes are one line and status 2. Facts are what this machine can do at best, too; all time by one protocol.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

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

from lib.ranks import Ranks, device_name
from lib.report import Row
from lib.timing import gemm_roofline_tflops, link_roofline_gbs


def gather_facts(ranks: Ranks) -> Row:
    """What a result needs to be repeated, and the rooflines of this run; collective."""
    command, folder = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    commit = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "not a git checkout",
        "command": " ".join(sys.argv),
        "device": device_name(ranks.device),
        "ranks": 1 if ranks.process_group is None else dist.get_world_size(ranks.process_group),
        "torch": torch.__version__,
        "gemm_roofline_tflops": gemm_roofline_tflops(ranks),
        "link_roofline_gbs": link_roofline_gbs(ranks),
    }


SPEAKER_S = 20.0  # rank 0 may still be importing what this rank has


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

    ``device="auto"`` takes a GPU where there is one, ``cpu`` none.
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


@contextmanager
def memory_limit(device: torch.device, num_bytes: float) -> Iterator[None]:
    """Let this process take so many more bytes of a GPU's memory, and no more; on a CPU without a limit.

    What it holds but does not use is given back first. An allocation beyond raises ``torch.OutOfMemoryError``.
    """
    if device.type != "cuda":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(index).total_memory
    share = (torch.cuda.memory_reserved(index) + num_bytes) / total
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
