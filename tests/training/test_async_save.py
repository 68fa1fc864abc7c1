"""Checkpoints written in the background: of the step they were asked for, whole at the end; failures are named."""

import errno
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks
from training_cases import Rank, losses, make_job

from comet.jobs.config import TrainJob
from comet.training import trainer
from comet.training.checkpoint_files import Writer
from comet.training.checkpoint_folder import list_checkpoints
from comet.training.trainer import train

WAIT_S = 120


def save_late(rank: int, world_size: int, job: TrainJob, until: int, stop: int | None) -> dict:
    """Train while no file is written before step ``until`` has begun; SIGTERM arrives in step ``stop``."""
    begun, write, step = threading.Event(), Writer.write_data, trainer.TrainStep.__call__

    def late(self, *arguments):
        assert begun.wait(WAIT_S)
        return write(self, *arguments)

    def noted(self, number, **rest):
        if number == until:
            begun.set()
        if number == stop and rank == 0:
            signal.raise_signal(signal.SIGTERM)
        return step(self, number, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "write_data", late)
        patch.setattr(trainer.TrainStep, "__call__", noted)
        return train(job, Rank(rank, world_size))


def whole_and_resumed(
    rank: int, world_size: int, job: TrainJob, whole: TrainJob, until: int, stop: int | None
) -> list[dict]:
    first = save_late(rank, world_size, job, until, stop)
    resume = first["checkpoint"] if "stopped" in first else str(Path(job.output_dir) / "step-000002")
    again = replace(job, resume=resume, output_dir=f"{job.output_dir}-again")
    return [first, train(again, Rank(rank, world_size)), train(whole, Rank(rank, world_size))]


@pytest.mark.parametrize(("world_size", "stop"), [(2, None), (1, 2), (2, 2)])
def test_a_save_in_the_background_holds_the_step_it_was_asked_for_and_is_waited_for(tmp_path, world_size, stop):
    """The first save is written two steps later, or, if the run is stopped then, before its end."""
    job = make_job(
        tmp_path, ep=world_size, steps=9 if stop else 4, checkpoint_every=2, async_save=True, fsdp=bool(stop)
    )
    whole = replace(job, output_dir=str(tmp_path / "whole"), train=replace(job.train, async_save=False))
    ends = run_ranks(whole_and_resumed, world_size, job, whole, 3, stop)
    first, again, undisturbed = ends[0]
    assert first.get("stopped") == ("SIGTERM" if stop else None)
    found, skipped = list_checkpoints(tmp_path / "out")
    assert first["checkpoint"] == str(found[0].path)
    assert [each.step for each in found] == [4, 2]
    assert skipped == []
    assert again["heldout_nats_per_byte"] == undisturbed["heldout_nats_per_byte"]
    assert losses(tmp_path / "out-again") == losses(tmp_path / "whole")
    assert not list(tmp_path.glob("*/*.tmp"))


def fail_to_save(rank: int, world_size: int, job: TrainJob) -> tuple[str, int]:
    """Return the error and the number of steps of a run in which the second save finds the disk of rank 1 full."""
    saves, steps, write, step = [], [], Writer.write_data, trainer.TrainStep.__call__

    def full(self, *arguments):
        saves.append(self)
        if len(saves) == 2 and rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return write(self, *arguments)

    def noted(self, number, **rest):
        steps.append(number)
        return step(self, number, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "write_data", full)
        patch.setattr(trainer.TrainStep, "__call__", noted)
        with pytest.raises(ValueError, match="cannot be written") as caught:
            train(job, Rank(rank, world_size))
    return str(caught.value), len(steps)


def test_a_save_in_the_background_that_fails_ends_the_run_after_a_step_and_the_last_whole_one_stays(tmp_path):
    job = make_job(tmp_path, ep=2, steps=2000, checkpoint_every=20, async_save=True)
    (message, begun), other = run_ranks(fail_to_save, 2, job)
    assert other == (message, begun)
    out = tmp_path / "out"
    assert message.startswith(f"checkpoint {out}/step-000040 cannot be written: No space left on device: it needs")
    assert message.endswith(f"the last whole one is {out}/step-000020")
    assert begun <= 60, "the next save waits for this one, and a step usually comes before"
    assert [each.name for each in out.glob("step-*")] == ["step-000020"]


def test_a_run_that_fails_waits_for_the_save_in_the_background(tmp_path, monkeypatch):
    step = trainer.TrainStep.__call__

    def failing(self, number, **rest):
        if number == 3:
            raise ValueError("a mistake")
        return step(self, number, **rest)

    monkeypatch.setattr(trainer.TrainStep, "__call__", failing)
    with pytest.raises(ValueError, match="a mistake"):
        train(make_job(tmp_path, checkpoint_every=2, async_save=True), Rank())
    assert [each.step for each in list_checkpoints(tmp_path / "out")[0]] == [2]
