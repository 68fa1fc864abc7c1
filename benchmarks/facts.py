"""The facts of a run that every benchmark reports, what this machine can do at best, and the one timing protocol."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from points import Ranks
from report import Row
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.comm import make_communicator
from comet.tuner.timing import Name, Timing, Variant, host_ahead, max_over_ranks, rank_barrier, time_interleaved

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


def time_by_protocol(
    variants: Mapping[Name, Variant],
    ranks: Ranks,
    *,
    rounds: int,
    rotate: int,
    opening: Callable[[], None] | None = None,
) -> dict[Name, Timing]:
    """Time variants in turn, the host ahead of the GPU and ranks starting together; the slowest rank counts.

    Args:
        variants: By name, equal on all ranks.
        ranks: Who takes part.
        rounds: Counted calls of each variant.
        rotate: Input sets.
        opening: What comes before each call in the place of the ranks' barrier.
    """
    barrier = rank_barrier(ranks.device, ranks.process_group) if opening is None else opening
    return time_interleaved(
        variants,
        rounds=rounds,
        barrier=host_ahead(barrier, ranks.device),
        rotate=rotate,
        device=ranks.device,
        slowest=max_over_ranks(ranks.device, ranks.process_group),
    )


def gather_facts(ranks: Ranks) -> Row:
    """What a result needs to be repeated, and the roofs of this run; collective."""
    on_gpu = ranks.device.type == "cuda"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "not a git checkout",
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        "ranks": 1 if ranks.process_group is None else dist.get_world_size(ranks.process_group),
        "torch": torch.__version__,
        "gemm_roof_tflops": gemm_roof_tflops(ranks.device, ranks.process_group),
        "link_roof_gbs": link_roof_gbs(ranks.device, ranks.process_group),
    }
