"""Checks before the first step (paths of a resumed run, room on the disk), and progress after the last one."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_cases import MOE, Rank, losses, make_job

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.schedule.choice import Machine, Problem
from comet.schedule.table import Measured, Profile, key_of
from comet.training import checkpoint as checkpoint_module
from comet.training import trainer
from comet.training.checkpoint_folder import Checkpoint, list_checkpoints
from comet.training.trainer import kept_layers, train


def store_plain(folder: Path, moe: MoEConfig, tokens: int) -> None:
    """Leave the profile of a tuning that found the plain path fastest."""
    problem = Problem(moe, ParallelConfig(), tokens, torch.float32)
    key = key_of(problem.columns() | {"device": "cpu", "kernels": "triton"})
    Profile.open(folder, "cpu", 1).put(key, Measured(setting=None, ms=1.0))


def test_a_resumed_run_keeps_the_path_of_its_checkpoint_bit_for_bit(tmp_path, capfd):
    job = make_job(tmp_path, steps=6, checkpoint_every=3)
    job = replace(job, tune=replace(job.tune, profiles=str(tmp_path / "profiles")))
    train(replace(job, output_dir=str(tmp_path / "whole")), Rank())
    whole = losses(tmp_path / "whole")
    first = train(job, Rank())
    assert first["moe_path"] == "twin"
    store_plain(tmp_path / "profiles", MOE, job.step_tokens)
    for path in list_checkpoints(tmp_path / "out")[0][:1]:
        (path.path / "comet.json").unlink()
    resumed = train(replace(job, resume="auto"), Rank())
    assert (resumed["moe_path"], losses(tmp_path / "out")) == ("twin", whole)
    assert train(replace(job, output_dir=str(tmp_path / "new")), Rank())["moe_path"] == "plain", "the profile counts"
    capfd.readouterr()


def saved_by(layers: dict, **layout: int) -> Checkpoint:
    layout = {"world_size": 1, "ep": 1, "tp": 1, **layout}
    return Checkpoint(Path("run/step-000003"), 3, {}, 0.0, layout, {}, "", layers)


def group_on(kind: str, num_nodes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        world_size=1, parallel=ParallelConfig(), device=torch.device(kind), num_nodes=num_nodes, nodes=None
    )


def test_a_kept_split_is_that_of_the_checkpoint_where_device_and_layout_are(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "of", lambda device: Machine(name="GPU" if device.type == "cuda" else "cpu"))
    split, job = OverlapConfig(comm_blocks=8, num_panels=2), make_job(tmp_path)
    layers = {"device": "GPU", "path": "fused", "overlap": {"comm_blocks": 8, "num_panels": 2}}
    assert kept_layers(job, group_on("cuda"), saved_by(layers)) == ("fused", split, [])
    assert kept_layers(job, group_on("cuda", 2), saved_by({**layers, "nodes": 2})) == ("fused", split, [])
    assert kept_layers(job, group_on("cuda"), saved_by({})) == ("auto", None, []), "of an older version"
    assert kept_layers(job, group_on("cuda"), None) == ("auto", None, [])
    own = replace(job, overlap=OverlapConfig(num_panels=1))
    assert kept_layers(own, group_on("cuda"), saved_by(layers)) == ("auto", OverlapConfig(num_panels=1), [])
    plain = {"device": "GPU", "path": "plain", "overlap": None}
    drops = replace(job, model=replace(job.model, moe=replace(job.model.moe, capacity_factor=1.0)))
    assert kept_layers(job, group_on("cuda"), saved_by(plain)) == ("plain", None, [])
    for other in (
        kept_layers(job, group_on("cpu"), saved_by(layers)),
        kept_layers(job, group_on("cuda"), saved_by(layers, world_size=2, ep=2)),
        kept_layers(drops, group_on("cuda"), saved_by(plain)),
        kept_layers(job, group_on("cuda", num_nodes=2), saved_by(layers)),
        kept_layers(job, group_on("cuda"), saved_by({**layers, "nodes": 2})),
    ):
        path, overlap, (note,) = other
        assert (path, overlap) == ("auto", None)
        assert "step-000003 was written on GPU by path " in note


@pytest.mark.parametrize(
    ("steps", "every", "there", "overwrite", "needed"),
    [
        (6, 0, 0, False, 1),
        (6, 3, 0, False, 2),
        (6, 2, 0, False, 3),
        (60, 2, 0, False, 3),
        (6, 2, 2, False, 1),
        (6, 2, 1, False, 2),
        (6, 2, 2, True, 1),
    ],
)
def test_a_disk_too_small_for_the_checkpoints_is_refused_before_the_first_step(
    steps, every, there, overwrite, needed, tmp_path, monkeypatch
):
    job = make_job(tmp_path, steps=steps, checkpoint_every=every, overwrite=overwrite, warmup_steps=0)
    freed = 0
    if there:
        train(replace(job, overwrite=False, train=replace(job.train, steps=2 * there, checkpoint_every=2)), Rank())
        found = list_checkpoints(tmp_path / "out")[0]
        assert len(found) == there
        freed = sum(file.stat().st_size for each in found for file in each.path.iterdir()) if overwrite else 0
        job = job if overwrite else replace(job, resume="auto", resume_changes=("train.steps",))
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    monkeypatch.setattr(trainer.TrainStep, "_backward", lambda *_, **__: pytest.fail("a step was taken"))
    with pytest.raises(ValueError, match=r"^output_dir='.*out' must have [\d,]+ bytes free for checkpoints") as caught:
        train(job, Rank())
    sizes = [
        int(number.replace(",", "")) for number in re.findall(r"[\d,]{3,}", str(caught.value).partition("out' ")[2])
    ]
    assert sizes[1] > 100_000
    if not overwrite:
        assert sizes[0] == needed * sizes[1]
    assert list_checkpoints(tmp_path / "out")[0][:there] or not there, "nothing is removed by a run that is refused"
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=sizes[0] - freed))
    with pytest.raises(pytest.fail.Exception, match="a step was taken"):
        train(job, Rank())


def test_a_run_that_saves_nothing_more_asks_for_no_room(tmp_path, monkeypatch):
    job = make_job(tmp_path)
    train(job, Rank())
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert train(replace(job, resume="auto"), Rank())["steps"] == 6


def test_evaluation_and_sample_show_progress(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    train(make_job(tmp_path, steps=2, warmup_steps=0), Rank())
    err = capfd.readouterr().err
    assert re.search(r"2/2 \[.*evaluating, batch 1 of 3", err), err
    assert re.search(r"2/2 \[.*drawing a sample, byte 3 of 5", err), err


def test_without_a_sample_none_is_told(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    train(make_job(tmp_path, steps=2, warmup_steps=0, sample_bytes=0), Rank())
    assert "drawing a sample" not in capfd.readouterr().err
