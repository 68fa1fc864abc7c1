"""Resuming needs nothing but the folder, and what would change the run is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from training_cases import Rank, make_text

from comet.launch.config import compose, make_job
from comet.training.checkpoint_folder import read_settings
from comet.training.report import History
from comet.training.trainer import train

TINY = ["model=tiny", "model.hidden_size=32", "model.moe.hidden_size=32", "model.moe.ffn_size=32", "model.context=32"]
SIZES = ["model.num_layers=1", "model.dense_layers=0", "train.eval_batches=1", "train.sample_bytes=0"]
RUN = [*TINY, *SIZES, "train.lr=0.01", "train.seed=3", "train.batch_size=2", "train.steps=6", "nproc=1"]


def start(*words: str) -> dict:
    return train(make_job(compose(words), 1), Rank())


def losses(folder: Path) -> list[float]:
    history = History(None)
    history.start(folder, 100)
    return [loss for window in history.windows for loss in window.losses]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Output folder of a run with the checkpoints step-000003 and step-000006."""
    folder = tmp_path_factory.mktemp("run")
    start(*RUN, f"data.path={make_text(folder)}", f"output_dir={folder}/out", "train.checkpoint_every=3")
    return folder / "out"


def test_a_run_goes_on_as_it_would_have_gone_on(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start(f"resume={run}/step-000003", "output_dir=more", "train.checkpoint_every=5")
    assert losses(tmp_path / "more") == losses(run)
    assert read_settings(tmp_path / "more")["train"] == {**read_settings(run)["train"], "checkpoint_every": 5}


def test_what_is_not_named_comes_from_the_folder(run, tmp_path):
    found = compose([f"resume={run}", "train.eval_every=7"])
    assert (found["train"]["lr"], found["train"]["seed"], found["train"]["batch_size"]) == (0.01, 3, 2)
    assert found["train"]["eval_every"] == 7
    assert (found["model"]["hidden_size"], found["output_dir"]) == (32, str(run))
    assert (found["nproc"], found["parallel"]["ep"]) == (1, 1)
    other = compose([f"resume={run}/step-000003", "nproc=4", f"output_dir={tmp_path}"])
    assert (other["nproc"], other["parallel"]["ep"], other["output_dir"]) == (4, None, str(tmp_path))


def test_the_settings_of_a_run_start_it_again(run, tmp_path):
    saved = read_settings(run)
    assert saved["output_dir"] == str(run)
    again = make_job({**saved, "output_dir": str(tmp_path), "resume": None}, saved["nproc"])
    train(again, Rank())
    assert losses(tmp_path) == losses(run)


def test_settings_that_differ_are_named_until_the_user_insists(run, tmp_path):
    words = [f"resume={run}/step-000003", f"output_dir={tmp_path}/out", "train.lr=0.001", "train.seed=4", "nproc=1"]
    message = r"train\.lr=0\.001 differs from 0\.01, train\.seed=4 differs from 3 of the run .*step-000003"
    with pytest.raises(ValueError, match=message + r".*resume_changes=\[train\.lr,train\.seed\]"):
        start(*words)
    with pytest.raises(ValueError, match=r"resume: train\.seed=4 differs"):
        start(*words, "resume_changes=[train.lr]")
    with pytest.raises(ValueError, match=r"resume_changes=\['train\.lrr'\] must name settings"):
        start(*words, "resume_changes=[train.lrr]")
    assert not (tmp_path / "out").exists()
    start(*words, "resume_changes=[train.lr,train.seed]")
    assert losses(tmp_path / "out")[:3] == losses(run)[:3]
    assert losses(tmp_path / "out")[3:] != losses(run)[3:]
    assert read_settings(tmp_path / "out")["train"]["lr"] == 0.001


def test_another_text_is_noticed_wherever_it_is(run, tmp_path):
    words = [f"resume={run}/step-000003", f"output_dir={tmp_path}/out", f"data.path={make_text(tmp_path)}"]
    start(*words)
    (tmp_path / "text.txt").write_bytes(b"something else " * 500)
    words[1] = f"output_dir={tmp_path}/more"
    with pytest.raises(ValueError, match=r"the text of data\.path=.*text\.txt' differs.*resume_changes=\[data\.path\]"):
        start(*words)
    start(*words, "resume_changes=[data.path]")


def test_a_checkpoint_of_an_older_version_goes_on_with_the_command_line(run, tmp_path, capsys):
    old = tmp_path / "step-000003"
    old.mkdir()
    manifest = json.loads((run / old.name / "comet.json").read_text())
    manifest["files"] = {name: file["bytes"] for name, file in manifest["files"].items() if name != "comet.yaml"}
    del manifest["text"]
    (old / "comet.json").write_text(json.dumps({**manifest, "format": 1}))
    for name in manifest["files"]:
        (old / name).write_bytes((run / old.name / name).read_bytes())
    text = read_settings(run)["data"]["path"]
    start(*RUN, f"resume={old}", f"output_dir={tmp_path}/out", f"data.path={text}")
    assert losses(tmp_path / "out") == losses(run)[3:]  # no history beside it
    assert f"{old} keeps no settings: those of the command line are taken" in capsys.readouterr().err


def test_settings_that_no_longer_exist_are_left_out(run, tmp_path, capsys):
    old = tmp_path / "step-000003"
    shutil.copytree(run / old.name, old)
    settings = read_settings(old)
    settings["overlap"] |= {"transport": "copy"}
    (old / "comet.yaml").write_text(yaml.safe_dump(settings))
    manifest = json.loads((old / "comet.json").read_text())
    manifest["files"]["comet.yaml"] = (old / "comet.yaml").stat().st_size
    (old / "comet.json").write_text(json.dumps(manifest))
    start(f"resume={old}", f"output_dir={tmp_path}/out")
    assert losses(tmp_path / "out")[-1:] == losses(run)[-1:]
    said = f"{old} was written with settings that no longer exist: overlap.transport=copy left out"
    assert said in capsys.readouterr().err


def test_broken_settings_are_a_mistake_of_one_line(run, tmp_path):
    (tmp_path / "comet.yaml").write_text("train: [")
    with pytest.raises(ValueError, match=r"comet\.yaml must hold the settings of a run"):
        compose([f"resume={tmp_path}"])
