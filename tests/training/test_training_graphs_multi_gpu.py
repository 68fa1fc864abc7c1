"""Training steps replayed from a CUDA graph on several ranks: bit for bit those that are launched kernel by kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import ON_GPUS, gpu_of
from ranks import run_ranks
from training_cases import MODEL, MOE, Rank, losses, make_job

from comet.training.trainer import train

MODEL_GPU = replace(MODEL, context=64, hidden_size=128, moe=replace(MOE, hidden_size=128, ffn_size=256))


def on_gpu(rank: int, world_size: int, folder: str, ep: int, tp: int) -> None:
    torch.cuda.set_device(gpu_of(rank))
    context = Rank(rank, world_size, device=torch.device(gpu_of(rank)))
    found = {}
    for mode in ("off", "on"):
        output = Path(folder) / mode
        job = make_job(
            Path(folder), model=MODEL_GPU, ep=ep, tp=tp, steps=12, batch_size=8, cuda_graph=mode, output_dir=str(output)
        )
        result = train(job, context)
        assert result["cuda_graph"] is (mode == "on")
        found[mode] = losses(output), result["heldout_nats_per_byte"]
    assert len(found["on"][0]) == 12
    assert found["on"] == found["off"], f"rank {rank}"


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (1, 1)])
def test_replayed_steps_learn_the_same(tmp_path: Path, ep: int, tp: int) -> None:
    run_ranks(on_gpu, 2, str(tmp_path), ep, tp, backend=ON_GPUS, timeout=240)
