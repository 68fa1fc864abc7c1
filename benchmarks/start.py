"""How a benchmark that also runs on a rank alone starts: by itself, or as one rank of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from points import Ranks

from comet.config import ParallelConfig, require
from comet.launch.distributed import current_context, open_store, process_group, started_by_torchrun


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
