"""From the environment to a rank: device, rendezvous store and process group, with guaranteed teardown.

The only place that reads environment variables. They are the ones ``torchrun`` sets for each rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(seconds=300)

GPU_LIBRARIES = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """Who this process is.

    Args:
        rank: Rank in the whole job.
        world_size: Ranks in the whole job.
        local_rank: Rank on this node; the index of its GPU.
        local_world_size: Ranks on this node.
        node: This node's number.
        num_nodes: Nodes of the job.
        device: Where this rank computes.
        attempt: How often torchrun has started the ranks anew; 0 the first time.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int
    device: torch.device
    attempt: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], num_gpus: int) -> LaunchContext:
        """Read what ``torchrun`` says about this rank.

        Args:
            environment: Environment variables.
            num_gpus: Visible GPUs; 0 puts the rank on the CPU.

        Returns:
            The context.

        Raises:
            ValueError: If there are GPUs, but fewer than ranks on this node.
        """
        local_rank, local_world_size = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
        if 0 < num_gpus < local_world_size:
            raise ValueError(f"nproc={local_world_size} must be at most the {num_gpus} visible GPUs of this machine")
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=local_rank,
            local_world_size=local_world_size,
            node=int(environment.get("GROUP_RANK", "0")),
            num_nodes=int(environment.get("GROUP_WORLD_SIZE", "1")),
            device=torch.device("cuda", local_rank) if num_gpus else torch.device("cpu"),
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


def started_by_torchrun() -> bool:
    """Whether this process is one rank of a job (otherwise it has to start the ranks itself)."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def speaks_for_job() -> bool:
    """Whether a message that every rank would print is this process's to print."""
    return os.environ.get("RANK", "0") == "0"


def current_context() -> LaunchContext:
    """The context of this process, from its environment; sets what libraries read when they start on a GPU.

    NVLink multicast stays off (not every deployment may switch it on) and cuBLAS works in fixed memory, so that a run
    resumes bit for bit. What the user already chose is kept.
    """
    for name, value in GPU_LIBRARIES.items():
        os.environ.setdefault(name, value)
    return LaunchContext.from_environment(os.environ, torch.cuda.device_count())


def prepare_environment(num_ranks: int) -> None:
    """Set what the ranks about to be started inherit, unless the user already chose.

    This machine's cores are shared among them, and one that ignores a signal is killed after ten seconds.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_ranks, 1)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")


def end_with_supervisor() -> None:
    """Let this rank end at once on Ctrl-C, also inside a collective, and on Linux when its supervisor is killed.

    Nothing depends on a rank leaving in order: checkpoints appear by renaming, shared memory is unlinked when mapped.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def open_store(context: LaunchContext) -> dist.Store:
    """Connect to the job's rendezvous store."""
    store, _, _ = next(dist.rendezvous("env://", context.rank, context.world_size, timeout=COLLECTIVE_TIMEOUT))
    return store


@contextmanager
def process_group(context: LaunchContext, store: dist.Store) -> Iterator[None]:
    """Set the device and hold the default process group open while the body runs.

    A collective that a living but silent peer keeps waiting fails after five minutes; a dead peer fails it at once.
    The group is destroyed when the body ends well. After an error it is left to ``leave``: destroying it could wait for
    peers that are gone.
    """
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(context.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("comet/group", store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=context.device if on_gpu else None,
    )
    yield
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this rank now, without the shutdown of the interpreter.

    Background threads of a half-broken process group would keep a failed rank alive, and those of a sound one may still
    be dropping a finished collective: one that needs the interpreter while it shuts down aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
