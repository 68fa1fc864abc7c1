"""Training on a GPU: bfloat16 products, float32 weights, and a resume that repeats every bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training_cases import MODEL, MOE, Rank, make_job

from comet.training.history import History
from comet.training.run import train

pytestmark = pytest.mark.gpu

MODEL_GPU = replace(MODEL, context=64, hidden_size=128, moe=replace(MOE, hidden_size=128, ffn_size=128))


def read_losses(folder):
    history = History(None)
    history.start(folder, 1000)
    return [loss for window in history.windows for loss in window.losses]


def test_bfloat16_job_learns_and_resumes_bit_for_bit(tmp_path):
    gpu = Rank(device=torch.device("cuda", 0))
    settings = {"model": MODEL_GPU, "steps": 40, "checkpoint_every": 20, "batch_size": 8}
    whole = train(make_job(tmp_path, **settings, output_dir=str(tmp_path / "whole")), gpu)
    assert whole["dtype"] == "bfloat16"
    assert whole["heldout_nats_per_byte"] < 3.5
    resumed = train(make_job(tmp_path, **settings, resume=str(tmp_path / "whole" / "step-000020")), gpu)
    assert read_losses(tmp_path / "out") == read_losses(tmp_path / "whole")
    assert resumed["heldout_nats_per_byte"] == whole["heldout_nats_per_byte"]


def test_float32_on_a_gpu_agrees_with_the_cpu(tmp_path):
    (tmp_path / "cpu").mkdir()
    settings = {"model": MODEL_GPU, "steps": 5, "dtype": "float32"}
    train(make_job(tmp_path, **settings), Rank(device=torch.device("cuda", 0)))
    train(make_job(tmp_path, **settings, output_dir=str(tmp_path / "cpu")), Rank())
    torch.testing.assert_close(
        torch.tensor(read_losses(tmp_path / "out")), torch.tensor(read_losses(tmp_path / "cpu")), rtol=1e-2, atol=1e-2
    )
