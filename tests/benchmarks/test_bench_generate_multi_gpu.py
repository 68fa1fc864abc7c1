"""The generation benchmark over two GPUs: both of Comet's paths run, captured or not, with equal bits on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpus import ON_GPUS, gpu_of
from ranks import run_ranks

import suites.generate
from lib.ranks import Ranks

SMALL = "--model tiny --layers 2 --contexts 8,40 --batch 2 --rounds 1 --steps 4".split()


def on_gpu(rank: int, world_size: int, commands: list[list[str]]) -> None:
    torch.cuda.set_device(gpu_of(rank))
    for words in commands:
        suites.generate.run(suites.generate.parse(words), Ranks(rank, torch.device(gpu_of(rank)), dist.group.WORLD))


@pytest.mark.multi_gpu(n=2, own=True)
def test_experts_and_slices_over_two_ranks(tmp_path: Path) -> None:
    layouts = {"ep": ["--ep", "2"], "tp": ["--tp", "2"]}
    commands = [[*SMALL, *layout, "--out", str(tmp_path / name)] for name, layout in layouts.items()]
    run_ranks(on_gpu, 2, commands, backend=ON_GPUS, timeout=300)
    for name in layouts:
        rows = json.loads((tmp_path / name / "bench_generate.json").read_text())["rows"]
        found = sorted((row["context"], row["path"], row["failure"]) for row in rows)
        assert found == [(context, path, None) for context in (8, 40) for path in ("comet", "comet_graph")]
        assert all(row[name] == 2 and row["tokens_per_s"] > 0 for row in rows)
