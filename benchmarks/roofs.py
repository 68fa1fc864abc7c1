"""What this machine can do at best, measured in the same run: one large matrix product, and copies between peers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.comm import make_communicator
from comet.tuner.timing import max_over_ranks, rank_barrier, time_interleaved

ROUNDS = 10


def gemm_roof_tflops(device: torch.device, process_group: ProcessGroup | None) -> float:
    """Rate of an 8192^3 bf16 product (256^3 float32 on a CPU), all ranks at once, of the slowest rank."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (_median_ms(lambda _: a @ b, device, process_group) * 1e9)


def link_roof_gbs(device: torch.device, process_group: ProcessGroup | None) -> float | None:
    """GB/s of a copy to the next rank, all ranks at once, by the copy engines; ``None`` for a rank alone."""
    if process_group is None:
        return None
    num_bytes = 2**28 if device.type == "cuda" else 2**20
    comm = make_communicator("auto", process_group, device)
    window = comm.alloc(num_bytes)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target: Tensor = window.peers[(comm.rank + 1) % comm.world_size]
    milliseconds = _median_ms(lambda _: target.copy_(source), device, process_group)
    comm.barrier()
    comm.close()
    return num_bytes / (milliseconds * 1e6)


def _median_ms(variant: Callable[[int], object], device: torch.device, process_group: ProcessGroup | None) -> float:
    timings = time_interleaved(
        {"roof": variant},
        rounds=ROUNDS,
        barrier=rank_barrier(device, process_group),
        rotate=1,
        device=device,
        slowest=max_over_ranks(device, process_group),
    )
    return timings["roof"].median_ms
