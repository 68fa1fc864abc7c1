"""All time by one protocol, and by it what this machine can do at best, which is among the facts of every run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comet.comm import make_communicator
from comet.experts.cache import CacheReport
from comet.schedule.choice import Machine
from comet.tuner.timing import Name, Timing, Variant, time_interleaved

from lib.ranks import Ranks
from lib.report import Row

ROUNDS = 10
NO_COMMIT = "not a git checkout"
ROOF_BYTES = 2**32
LINK_BYTES = 2**28


def time_by_protocol(
    variants: Mapping[Name, Variant], ranks: Ranks, *, rounds: int = ROUNDS, **protocol: Any
) -> dict[Name, Timing]:
    return time_interleaved(variants, rounds=rounds, device=ranks.device, process_group=ranks.process_group, **protocol)


def run_facts(ranks: Ranks) -> Row:
    command, folder = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    commit = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or NO_COMMIT,
        "command": " ".join(sys.argv),
        "device": Machine.of(ranks.device).name,
        "ranks": 1 if ranks.process_group is None else dist.get_world_size(ranks.process_group),
        "torch": torch.__version__,
    }


def gather_facts(ranks: Ranks) -> Row:
    rooflines = {"gemm_roofline_tflops": gemm_roofline_tflops(ranks), "link_roofline_gbs": link_roofline_gbs(ranks)}
    return run_facts(ranks) | rooflines


def gemm_roofline_tflops(ranks: Ranks) -> float:
    """Rate of an 8192^3 bf16 product (256^3 float32 on a CPU), all ranks at once, of the slowest rank."""
    size = 8192 if ranks.device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=ranks.device).to(ranks.dtype) for _ in range(2))
    timings = time_by_protocol({"roofline": lambda _: a @ b}, ranks, leads=False)
    return 2 * size**3 / (timings["roofline"].median_ms * 1e9)


def link_roofline_gbs(ranks: Ranks) -> float | None:
    """GB/s of a copy to the next rank, all ranks at once, by the copy engines; ``None`` for a rank alone."""
    device = ranks.device
    if ranks.process_group is None:
        return None
    num_bytes = 2**28 if device.type == "cuda" else 2**20
    comm = make_communicator("auto", ranks.process_group, device)
    window = comm.alloc(num_bytes)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target: Tensor = window.peers[(comm.rank + 1) % comm.world_size]
    timings = time_by_protocol({"roofline": lambda _: target.copy_(source)}, ranks, leads=False)
    comm.barrier()
    comm.close()
    return num_bytes / (timings["roofline"].median_ms * 1e6)


def read_roofline_tbs(ranks: Ranks) -> float:
    """TB/s of adding up a large array, the fastest of three ways: what reading memory can reach here (collective)."""
    device = ranks.device
    num_bytes = ROOF_BYTES if device.type == "cuda" else 2**20
    data = torch.ones(num_bytes // 4, device=device)
    readers: dict[str, Variant] = {
        "sum": lambda _: data.sum(),
        "rows": lambda _: data.view(-1, 4096).sum(dim=1),
        "bf16": lambda _: data.view(torch.bfloat16).view(-1, 8192).amax(dim=1),
    }
    timings = time_by_protocol(readers, ranks, leads=False)
    return num_bytes / (min(timing.median_ms for timing in timings.values()) * 1e9)


def link_gbs(device: torch.device) -> float:
    if device.type == "cpu":
        return float("nan")
    host = torch.empty(LINK_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(host, device=device)
    timed = {"copy": lambda _: target.copy_(host, non_blocking=True)}
    timing = time_interleaved(timed, rounds=5, device=device, leads=False)
    return LINK_BYTES / (timing["copy"].median_ms * 1e6)


def link_bytes(spent: CacheReport) -> int:
    """Bytes that came over the link; of experts half there when their step began, the first half counts twice."""
    return spent.fetched_bytes + spent.prefetched_bytes
