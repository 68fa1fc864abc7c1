"""Comet inside Megatron-core on two GPUs, against Megatron's own experts and dispatch; skipped without Megatron-core.

Whole models have no TP: without Transformer Engine and Apex, Megatron-core has no norm for parts of a sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import ON_GPUS, gpu_of

pytest.importorskip("megatron.core", reason="needs pip install 'comet-moe[megatron]'")

from megatron_cases import Size, layers_beside_megatron, save_and_load, train_beside_megatron
from ranks import run_ranks

SIZE = Size(hidden=1024, vocabulary=8192, sequence=512, batch=2)
STEPS = 12


def train(rank: int, world_size: int) -> None:
    """NCCL (gloo where ranks share a GPU) reduces gradients beside the layer's kernels, later on one rank."""
    torch.cuda.set_device(gpu_of(rank))
    train_beside_megatron(rank, world_size, SIZE, [(2, 1, 1), (1, 2, 1)], STEPS, gpu_of(rank))


def layers(rank: int, world_size: int) -> None:
    torch.cuda.set_device(gpu_of(rank))
    layers_beside_megatron(rank, world_size, SIZE, [(2, 1, 2), (1, 2, 2)], gpu_of(rank))


def checkpoints(rank: int, world_size: int, folder: Path) -> None:
    torch.cuda.set_device(gpu_of(rank))
    save_and_load(rank, world_size, folder, gpu_of(rank))


def on_gpus(function: Any, *args: Any, timeout: float = 100) -> None:
    run_ranks(function, 2, *args, backend=ON_GPUS, timeout=timeout)


@pytest.mark.multi_gpu(n=2)
def test_training() -> None:
    on_gpus(train, timeout=300)


@pytest.mark.multi_gpu(n=2, own=True)
def test_layers_with_parts_of_the_sequence() -> None:
    on_gpus(layers)


@pytest.mark.multi_gpu(n=2, own=True)
def test_checkpoints(tmp_path: Path) -> None:
    on_gpus(checkpoints, tmp_path)
