"""Training on a GPU: bfloat16 products, float32 weights, and a resume that repeats every bit."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import ON_GPUS, gpu_of
from ranks import in_ranks
from training_cases import MODEL, MOE, Rank, losses, make_job

from comet.training import trainer
from comet.training.ranks import LAG
from comet.training.trainer import train

MODEL_GPU = replace(MODEL, context=64, hidden_size=128, moe=replace(MOE, hidden_size=128, ffn_size=128))
WIDER = replace(MODEL_GPU, moe=replace(MODEL_GPU.moe, ffn_size=256))


@pytest.mark.gpu
@pytest.mark.parametrize("balance", ["aux", "bias"])
def test_replayed_steps_learn_the_same_and_resume(tmp_path, balance):
    gpu = Rank(device=torch.device("cuda", 0))
    moe = replace(MODEL_GPU.moe, balance=balance, shared_ffn_size=128)
    settings = {"model": replace(MODEL_GPU, moe=moe), "steps": 40, "checkpoint_every": 20, "batch_size": 8}
    eager = train(make_job(tmp_path, **settings, cuda_graph="off"), gpu)
    replayed = train(make_job(tmp_path, **settings, cuda_graph="on", output_dir=str(tmp_path / "graphs")), gpu)
    assert (eager["cuda_graph"], replayed["cuda_graph"]) == (False, True)
    assert eager["dtype"] == "bfloat16"
    assert eager["heldout_nats_per_byte"] < 3.5
    assert losses(tmp_path / "graphs") == losses(tmp_path / "out")
    assert replayed["heldout_nats_per_byte"] == eager["heldout_nats_per_byte"]
    halfway = str(tmp_path / "out" / "step-000020")
    train(make_job(tmp_path, **settings, cuda_graph="on", resume=halfway, output_dir=str(tmp_path / "resumed")), gpu)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "out")


@pytest.mark.gpu
def test_a_stopped_run_of_replayed_steps_goes_on_bit_for_bit(tmp_path, monkeypatch):
    gpu = Rank(device=torch.device("cuda", 0))
    settings = {"model": MODEL_GPU, "steps": 20, "batch_size": 8, "cuda_graph": "on"}
    train(make_job(tmp_path, **settings, output_dir=str(tmp_path / "whole")), gpu)
    step = trainer.TrainStep.__call__

    def stop(self, number, **rest):
        if number == 6:
            signal.raise_signal(signal.SIGTERM)
        return step(self, number, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainStep, "__call__", stop)
        stopped = train(make_job(tmp_path, **settings), gpu)
    assert (stopped["stopped"], stopped["steps"]) == ("SIGTERM", 8 + LAG)  # step 8 shares the signal of step 7
    train(make_job(tmp_path, **settings, resume=str(tmp_path / "out")), gpu)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


@pytest.mark.gpu
def test_float32_on_a_gpu_agrees_with_the_cpu(tmp_path):
    (tmp_path / "cpu").mkdir()
    settings = {"model": MODEL_GPU, "steps": 5, "dtype": "float32"}
    train(make_job(tmp_path, **settings), Rank(device=torch.device("cuda", 0)))
    train(make_job(tmp_path, **settings, output_dir=str(tmp_path / "cpu")), Rank())
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "out")), torch.tensor(losses(tmp_path / "cpu")), rtol=1e-2, atol=1e-2
    )


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (1, 1)])
@in_ranks(2, backend=ON_GPUS, timeout=240)
def test_ranks_learn_the_same_by_replayed_steps(rank: int, world_size: int, tmp_path: Path, ep: int, tp: int) -> None:
    context = Rank(rank, world_size, device=torch.device(gpu_of(rank)))
    found = {}
    for mode in ("off", "on"):
        output = tmp_path / mode
        settings = {"model": WIDER, "steps": 12, "batch_size": 8, "cuda_graph": mode, "output_dir": str(output)}
        job = make_job(tmp_path, ep=ep, tp=tp, **settings)
        result = train(job, context)
        assert result["cuda_graph"] is (mode == "on")
        found[mode] = losses(output), result["heldout_nats_per_byte"]
    assert len(found["on"][0]) == 12
    assert found["on"] == found["off"], f"rank {rank}"
