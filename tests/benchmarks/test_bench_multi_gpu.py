"""Benchmarks over two GPUs: every way to decode is right and in a graph; whole steps run with and without one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import run_on_rank
from gpus import ON_GPUS, backend_of
from ranks import run_ranks

DECODES = {"comet", "local", "own"}
BY_NCCL = {"local_nccl", "own_nccl"}  # NCCL refuses ranks that share a GPU, and gloo cannot be captured
LAYOUTS = ("ep", "tp")


def on_gpu(rank: int, world_size: int, suite: str, commands: list[list[str]]) -> None:
    for words in commands:
        run_on_rank(rank, world_size, suite, words, torch.device("cuda", torch.cuda.current_device()))


def rows_of(suite: str, words: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of runs with experts, and with slices of experts, over two ranks."""
    commands = [[*words, f"--{name}", "2", "--out", str(folder / name)] for name in LAYOUTS]
    run_ranks(on_gpu, 2, suite, commands, backend=ON_GPUS, timeout=300)
    return {name: json.loads((folder / name / f"bench_{suite}.json").read_text())["rows"] for name in LAYOUTS}


@pytest.mark.multi_gpu(n=2)
def test_decode_steps(tmp_path: Path) -> None:
    names = DECODES | (BY_NCCL if "nccl" in backend_of(2) else set())
    words = ["--models", "tiny", "--tokens", "1,3,16", "--rounds", "2", "--variants", ",".join(names)]
    for rows in rows_of("decode", words, tmp_path).values():
        assert [row["tokens"] for row in rows] == [1, 3, 16]
        for row in rows:
            assert (row["failures"], row["no_graph"]) == ({}, {})
            assert set(row["times_us"]) == names
            assert row["own_added_us"] == pytest.approx(row["own_us"] - row["local_us"])


@pytest.mark.multi_gpu(n=2, own=True)
def test_steps_of_whole_models(tmp_path: Path) -> None:
    words = "--model tiny --layers 2 --contexts 8,40 --batch 2 --rounds 1 --steps 4".split()
    for name, rows in rows_of("generate", words, tmp_path).items():
        found = sorted((row["context"], row["path"], row["failure"]) for row in rows)
        assert found == [(context, path, None) for context in (8, 40) for path in ("comet", "comet_graph")]
        assert all(row[name] == 2 and row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.multi_gpu(n=2)
def test_caches_of_two_ranks(tmp_path: Path) -> None:
    words = f"--model tiny --layers 2 --budgets 0.5,1.0 --steps 8 --rounds 1 --ep 2 --out {tmp_path}".split()
    run_ranks(on_gpu, 2, "experts", [words], backend=ON_GPUS, timeout=300)
    _, half, whole, _ = json.loads((tmp_path / "bench_experts.json").read_text())["rows"]
    assert (half["slots"], whole["slots"]) == (2, 4)
    assert half["hits"] < 1 == whole["hits"]
