"""An output folder belongs to one job at a time, and nothing in it is given up unless the user says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import Rank, make_job

from comet.launch.config import compose
from comet.launch.config import make_job as job_of_command
from comet.launch.tasks.tuning import sweep_job
from comet.training.report import History
from comet.training.run_folder import LOCK, OWNER
from comet.training.trainer import train

HOLD = """
import sys
from pathlib import Path
from comet.training.run_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]), "mine")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def last_step(folder: Path) -> int:
    history = History(None)
    history.start(folder, 1000)
    return history.windows[-1].step


def test_another_run_is_not_removed_unless_the_user_says_so(tmp_path):
    out = tmp_path / "out"
    train(make_job(tmp_path, steps=4, checkpoint_every=2), Rank())
    before = names(out)
    with pytest.raises(ValueError, match=rf"output_dir='{out}' holds a run: resume={out} continues it, overwrite=true"):
        train(make_job(tmp_path), Rank())
    with pytest.raises(ValueError, match=r"overwrite=true removes what resume=.*step-000002 is to continue"):
        train(make_job(tmp_path, resume=str(out / "step-000002"), overwrite=True), Rank())
    assert names(out) == before
    assert last_step(out) == 4
    (out / "step-by-step").mkdir()
    (out / "step-by-step" / "notes.txt").write_text("mine")
    (out / "step-000004" / "notes.txt").write_text("mine")
    (out / "step-000077").write_text("mine")
    train(make_job(tmp_path, steps=3, overwrite=True), Rank())
    assert last_step(out) == 3
    left = {"step-by-step", "step-000004", "step-000077"}
    assert names(out) == (before - {"step-000002"}) | left | {"step-000003"}
    assert names(out / "step-000004") == {"notes.txt"}


def test_foreign_things_named_like_checkpoints_are_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "step-notes").write_text("mine")
    (out / "step-000004").write_text("mine")
    for name in ("step-000006", "step-000002.tmp", "step-x.tmp"):
        (out / name).mkdir()
        (out / name / "notes.txt").write_text("mine")
    result = train(make_job(tmp_path, checkpoint_every=2), Rank())
    assert Path(result["checkpoint"]) == out / "step-000006-2"
    assert names(out) >= {"step-notes", "step-000004", "step-000006", "step-000002.tmp", "step-x.tmp", "step-000004-2"}
    assert names(out / "step-000006") == names(out / "step-000002.tmp") == {"notes.txt"}
    assert train(make_job(tmp_path, resume="auto"), Rank())["checkpoint"] == result["checkpoint"]


def test_two_jobs_in_one_folder_at_once_are_refused_until_the_first_is_killed(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-c", HOLD, str(out)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        message = rf"output_dir='{out}' is in use by another job \(.*\"pid\": {owner.pid}.*\)"
        for resume in (None, "auto"):
            with pytest.raises(ValueError, match=message):
                train(make_job(tmp_path, resume=resume), Rank())
        words = ("sweep.tokens=[16]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={out}")
        with pytest.raises(ValueError, match=message):
            sweep_job(job_of_command(compose(["model=tiny", *words]), 1), Rank())
        assert names(out) == {LOCK, OWNER}
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert train(make_job(tmp_path), Rank())["steps"] == 6
        assert OWNER not in names(out)
    finally:
        owner.kill()
        owner.communicate()


def test_ranks_that_start_anew_go_on_by_themselves(tmp_path, capsys):
    train(make_job(tmp_path, steps=3), Rank())
    job = make_job(tmp_path, steps=3, overwrite=True)
    assert train(job, Rank(attempt=1))["steps"] == 3
    assert f"continuing {tmp_path}/out/step-000003 from step 3" in capsys.readouterr().err
