"""GPUs of the ranks of a test: one for each rank, or several ranks on one, which take turns there.

``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 pytest -m multi_gpu`` runs what needs up to four GPUs on however many
there are. Processes, kernels and mapped memory are the same; NVLink and NCCL have no part in it, and times mean
nothing. torch reads the variable as well, before it maps the memory of such ranks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
MOST_RANKS = 4
ON_GPUS = "gpus"  # a backend of ``run_ranks``, whose ranks have one each: ``cuda``
Result = TypeVar("Result")


def num_gpus(*, own: bool = False) -> int:
    """How many ranks with a GPU there may be; with ``own`` none shares it."""
    found = torch.cuda.device_count()
    return max(found, MOST_RANKS) if found and not own and os.environ.get(SHARING) == "1" else found


def need_gpus(count: int) -> None:
    if num_gpus() < count:
        pytest.skip(f"needs {count} CUDA GPUs, this machine has {num_gpus()}")


def gpu_of(rank: int) -> str:
    """Its device: of three ranks on two GPUs ``cuda:0``, ``cuda:1``, ``cuda:0``."""
    return f"cuda:{rank % torch.cuda.device_count()}"


def captured(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A step as a graph, and where its output is; it runs before, to compile kernels and to take memory it keeps."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        return graph, step()


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever makes the host wait for the device in here raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def take_free_memory() -> list[torch.Tensor]:
    """Tensors of ones (uint8) of many sizes on the current GPU, where memory lies that others have let go of."""
    return [torch.ones(2**bits, dtype=torch.uint8, device="cuda") for bits in range(9, 25) for _ in range(8)]


def backend_of(world_size: int) -> str:
    """Return the backend of a process group; NCCL refuses ranks that share a GPU."""
    return f"cpu:gloo,cuda:{'nccl' if world_size <= torch.cuda.device_count() else 'gloo'}"
