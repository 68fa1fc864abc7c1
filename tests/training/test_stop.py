"""SIGTERM to any rank: the step under way ends, all ranks save the same step, and the run goes on from there."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from launch_jobs import TIMEOUT_S, start
from ranks import run_ranks
from tiers import slow
from training_cases import Rank, make_job

from comet.launch.config import compose
from comet.launch.config import make_job as make_job_of
from comet.training import trainer as training
from comet.training.report import History
from comet.training.trainer import train

PROGRAM = ("-P", "-m", "comet.launch")
SMALL = ["model=tiny", "model.num_layers=1", "model.hidden_size=32", "model.moe.hidden_size=32", "model.context=32"]


def losses(folder: Path) -> list[float]:
    history = History(None)
    history.start(folder, 100)
    return [loss for window in history.windows for loss in window.losses]


def stop_in_a_step(rank, world_size, job, told):
    """Train while rank ``told`` gets SIGTERM in its step 4, counted from 1; also whether the handler is restored."""

    class Told(training.TrainStep):
        def _backward(self, step, told_to_stop):
            if step == 3 and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
            return super()._backward(step, told_to_stop)

    training.TrainStep = Told
    before = signal.getsignal(signal.SIGTERM)
    result = train(job, Rank(rank, world_size))
    return result, signal.getsignal(signal.SIGTERM) == before


def run_job(rank, world_size, job):
    return train(job, Rank(rank, world_size))


@pytest.mark.parametrize(("world_size", "told"), [slow(1, 0), (2, 1)])
def test_all_ranks_stop_after_the_same_step_and_go_on_bitwise(world_size, told, tmp_path):
    job = make_job(tmp_path, ep=world_size, steps=9, eval_every=2)
    whole = run_ranks(run_job, world_size, replace(job, output_dir=str(tmp_path / "whole")))
    ends = run_ranks(stop_in_a_step, world_size, job, told)
    assert ends == [ends[0]] * world_size
    result, restored = ends[0]
    assert restored
    assert (result["stopped"], result["steps"]) == ("SIGTERM", 5)  # told in step 4, which the others learn in step 5
    assert result["checkpoint"] == str(tmp_path / "out" / "step-000005")
    resumed = run_ranks(run_job, world_size, replace(job, resume=str(tmp_path / "out")))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert resumed[0]["heldout_nats_per_byte"] == whole[0]["heldout_nats_per_byte"]
    assert "stopped" not in resumed[0]


def stop_in_the_last_step(rank, world_size, job):
    class Told(training.TrainStep):
        def _backward(self, step, told_to_stop):
            if step == self.config.steps - 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super()._backward(step, told_to_stop)

    training.TrainStep = Told
    return train(job, Rank(rank, world_size))


def test_a_run_that_is_over_anyway_ends_as_ever(tmp_path):
    for result in run_ranks(stop_in_the_last_step, 2, make_job(tmp_path, ep=2)):
        assert (result["steps"], "stopped" in result) == (6, False)
        assert result["heldout_nats_per_byte"] > 0


def go_on(rank, world_size, words):
    """What ``comet train`` does in a rank; its result and what it says of its start."""
    with redirect_stderr(io.StringIO()) as said:
        return train(make_job_of(compose(words), world_size), Rank(rank, world_size)), said.getvalue()


@pytest.mark.parametrize("whom", ["the launcher", slow("rank 1")])
def test_the_command_saves_when_it_is_told_to_stop(whom, tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 40)
    out = tmp_path / "out"
    settings = [f"data.path={tmp_path}/text.txt", f"output_dir={out}", "train.steps=100000", "train.eval_every=0"]
    job = start("train", *SMALL, *settings, "parallel=ep2", program=PROGRAM)
    try:
        while not (out / "metrics.jsonl").exists() or not losses(out):
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)
        children = psutil.Process(job.pid).children(recursive=True)
        ranks = {int(child.environ()["RANK"]): child.pid for child in children if "RANK" in child.environ()}
        os.kill(ranks[1] if whom == "rank 1" else job.pid, signal.SIGTERM)
        printed, errors = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    assert job.returncode == 143, errors
    *_, words, last = printed.splitlines()
    result = json.loads(last)
    assert result["stopped"] == "SIGTERM"
    step, checkpoint = result["steps"], result["checkpoint"]
    resume = f"comet train resume={out} continues"
    assert words == f"stopped by SIGTERM after step {step}, checkpoint {checkpoint}; {resume}"
    assert "Traceback" not in errors
    assert "error" not in errors
    words = [f"resume={out}", f"train.steps={step + 2}", "train.sample_bytes=0", "resume_changes=[train.steps]"]
    (result, said), _ = run_ranks(go_on, 2, words)
    assert result["steps"] == step + 2
    assert f"continuing {checkpoint} from step {step}" in said
