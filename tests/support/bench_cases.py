"""Runs of the benchmarks on CPUs: as users start them, and as one of the ranks that tests start."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import completed

from lib.ranks import Ranks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ALONE = Ranks(0, CPU, None)
TINY = ["--device", "cpu", "--models", "tiny", "--rounds", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_bench(*words: str, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(TORCHRUN if torchrun else []), str(ROOT / "benchmarks" / "bench.py"), *words]
    return completed(command, os.environ, timeout_s=240)


def report_of(*words: str, torchrun: bool = False) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The last line of a run that has to end well, which is its report, and all that it said."""
    done = run_bench(*words, torchrun=torchrun)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done


def run_on_rank(rank: int, world_size: int, suite: str, words: list[str], device: torch.device = CPU) -> None:
    importlib.import_module(f"suites.{suite}").Run.parse(words).run(Ranks(rank, device, dist.group.WORLD))
