"""The decode benchmark over two GPUs: every way to decode is right and in a graph, for tokens of either kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpus import ON_GPUS, backend_of, gpu_of
from ranks import run_ranks

import suites.decode
from lib.ranks import Ranks

SMALL = "--models tiny --tokens 1,3,16 --rounds 2 --variants".split()
DECODES = {"comet", "local", "own"}
BY_NCCL = {"local_nccl", "own_nccl"}  # which refuses ranks that share a GPU; gloo cannot be captured


def on_gpu(rank: int, world_size: int, commands: list[list[str]]) -> None:
    torch.cuda.set_device(gpu_of(rank))
    for words in commands:
        suites.decode.run(suites.decode.parse(words), Ranks(rank, torch.device(gpu_of(rank)), dist.group.WORLD))


@pytest.mark.multi_gpu(n=2)
def test_experts_and_slices_over_two_ranks(tmp_path: Path) -> None:
    names = DECODES | (BY_NCCL if "nccl" in backend_of(2) else set())
    layouts = {"ep": ["--ep", "2"], "tp": ["--tp", "2"]}
    commands = [[*SMALL, ",".join(names), *layout, "--out", str(tmp_path / name)] for name, layout in layouts.items()]
    run_ranks(on_gpu, 2, commands, backend=ON_GPUS, timeout=300)
    for name in layouts:
        rows = json.loads((tmp_path / name / "bench_decode.json").read_text())["rows"]
        assert [row["tokens"] for row in rows] == [1, 3, 16]
        for row in rows:
            assert (row["failures"], row["no_graph"]) == ({}, {})
            assert set(row["times_us"]) == names
            assert row["own_added_us"] == pytest.approx(row["own_us"] - row["local_us"])
