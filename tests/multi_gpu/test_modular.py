"""Modular layers over NVLink: every combination against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_cases import LayerCase
from modular_cases import attacks, run_combinations
from ranks import run_ranks


def on_gpu(rank: int, world_size: int, cases: list[LayerCase]) -> None:
    torch.cuda.set_device(rank)
    run_combinations(rank, world_size, cases, {}, f"cuda:{rank}")


@pytest.mark.multi_gpu(n=2)
def test_every_combination() -> None:
    cases = [*attacks(2, seed=41), LayerCase("tp2", 1, 2, (31, 0), seed=42, calls=2)]
    cases = [replace(case, dtype=torch.bfloat16, hidden_size=128, ffn_size=64) for case in cases]
    run_ranks(on_gpu, 2, cases, backend="cpu:gloo,cuda:nccl", timeout=500)
