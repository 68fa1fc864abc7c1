"""Comet inside Megatron-core on two GPUs, against Megatron's own experts and dispatch; skipped without Megatron-core.

Whole models have no TP: without Transformer Engine and Apex, Megatron-core has no norm for parts of a sequence.
"""

from pathlib import Path

import pytest
from gpus import ON_GPUS

pytest.importorskip("megatron.core", reason="needs pip install 'comet-moe[megatron]'")

from megatron_cases import Size, save_and_load, train_beside_megatron
from ranks import run_ranks

SIZE = Size(hidden=1024, vocabulary=8192, sequence=512, batch=2)
STEPS = 12


@pytest.mark.multi_gpu(n=2)
def test_training() -> None:
    """NCCL (gloo where ranks share a GPU) reduces gradients while the layer's kernels run, on one rank later."""
    layouts = [(2, 1, 1), (1, 2, 1)]
    run_ranks(train_beside_megatron, 2, SIZE, layouts, STEPS, "cuda", backend=ON_GPUS)


@pytest.mark.multi_gpu(n=2, own=True)
def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, tmp_path, "cuda", backend=ON_GPUS, timeout=100)
