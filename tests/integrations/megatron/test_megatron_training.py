"""Comet beside Megatron's experts in bf16, as ``test_megatron_multi_gpu.py`` does on GPUs, on CPU ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'comet-moe[megatron]'")

from megatron_training import Size, layers_beside_megatron, train_beside_megatron
from ranks import run_ranks

SIZE = Size(hidden=64, vocabulary=96, sequence=32, batch=2)


@pytest.mark.slow
def test_training() -> None:
    run_ranks(train_beside_megatron, 2, SIZE, [(2, 1, 1), (1, 2, 1)], 3, "cpu", timeout=300)


@pytest.mark.slow
def test_layers_with_parts_of_the_sequence() -> None:
    run_ranks(layers_beside_megatron, 2, SIZE, [(2, 1, 2), (1, 2, 2)], "cpu", timeout=300)
