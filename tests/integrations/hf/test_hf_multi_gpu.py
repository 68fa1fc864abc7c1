"""Hugging Face models over two GPUs: block FP8 folders, dequantised and kept, against the stock model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpus import ON_GPUS, gpu_of

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_fp8_cases import RAGGED, WHOLE, load_on_ranks, published
from ranks import run_ranks
from torch import Tensor


def on_gpu(rank: int, world_size: int, folders: dict[str, Path]) -> list[dict[str, Tensor]]:
    torch.cuda.set_device(gpu_of(rank))
    return [load_on_ranks(rank, world_size, folders, ep, tp, gpu_of(rank)) for ep, tp in ((2, 1), (1, 2))]


@pytest.mark.multi_gpu(n=2)
def test_two_ranks_read_their_own_experts(tmp_path: Path) -> None:
    folders = {"ragged": published(tmp_path / "ragged", RAGGED), "whole": published(tmp_path / "whole", WHOLE)}
    first, second = run_ranks(on_gpu, 2, folders, backend=ON_GPUS, timeout=400)
    for found, other in zip(first, second, strict=True):
        assert len(found) == 3
        for what, logits in found.items():
            assert torch.equal(logits, other[what]), f"{what}: ranks 0 and 1 differ"
