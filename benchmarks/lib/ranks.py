"""The ranks that measure: how they start, alone or by torchrun, what becomes of a failure on one, and how they end."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from triton import TritonError

from comet.comm.handshake import largest
from comet.config import MoEConfig, ParallelConfig, require
from comet.launch.distributed import current_context, leave, open_store, process_group
from comet.launch.messages import STATUS_USER, is_user_error, one_line, say, speaks_for_job, started_by_torchrun
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.workspace import Workspace
from comet.tuner import layers
from comet.utils.choices import CommBackend

# A variant may fail by these without ending the run; anything else is a mistake of the benchmark itself.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, LookupError, TritonError)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank, its device and the group; the group is ``None`` for a rank alone."""

    rank: int
    device: torch.device
    process_group: ProcessGroup | None

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is measured: bf16 on GPUs; float32 on CPUs, which are there to try the benchmark."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def worst(self, value: float) -> float:
        return largest([value], self.device, self.process_group)[0]

    def make_group(
        self, config: MoEConfig, parallel: ParallelConfig, max_tokens: int, backend: str = "auto"
    ) -> ExpertGroup:
        return make_expert_group(
            config,
            parallel,
            max_tokens=max_tokens,
            dtype=self.dtype,
            device=self.device,
            backend=cast(CommBackend, backend),
        )


def tell(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, file=sys.stderr, flush=True)


def release(ranks: Ranks) -> None:
    """Give back the memory of what is gone; graphs are gone before the communicators they recorded."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def differs_over_ranks(output: Tensor, ranks: Ranks) -> bool:
    first = output.clone()
    if ranks.process_group is not None:
        dist.broadcast(first, src=0, group=ranks.process_group)
    return bool(ranks.worst(float(not torch.equal(first, output))))


def attempt(action: Callable[[], T], ranks: Ranks, pool: Workspace | None = None) -> tuple[T | None, str]:
    return layers.attempt(action, ranks.device, ranks.process_group, pool, FAILURES)


SPEAKER_S = 20.0  # rank 0 may still be importing what this rank has


def run_and_leave(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run one rank of a benchmark with the words of its command line, and end the process with the status it returns.

    A mistake of the user is one line, as of the command ``comet``. Before the ranks have met, all find it: rank 0 says
    so and leaves, and torchrun ends the others. Afterwards each rank says so. Other errors show their traceback.
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

    Unused memory is given back first. An allocation beyond the limit raises ``torch.OutOfMemoryError``.
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
