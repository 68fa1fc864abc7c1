"""The facts of a run that every benchmark reports."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from points import Ranks
from report import Row
from roofs import gemm_roof_tflops, link_roof_gbs


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
