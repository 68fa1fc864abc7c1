"""Files of ``sweep`` and ``tune``: a folder that cannot be written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from refusals import refusal
from training_cases import Rank

from comet.config import MoEConfig
from comet.launch.config import compose, make_job
from comet.measure import job
from comet.measure.job import CSV_NAME, run_sweep
from comet.measure.sweep import SweepLog
from comet.utils.shared_file import require_writable

MOE = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)


def test_trying_to_write_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / CSV_NAME
    require_writable(path, "output_dir='x'")
    assert not path.exists()
    path.write_text("content")
    require_writable(path, "output_dir='x'")
    assert path.read_text() == "content"
    assert len(list(path.parent.iterdir())) == 2, "the file and its lock"
    path.unlink()
    path.mkdir()
    with pytest.raises(
        ValueError, match=r"output_dir='x' must be a folder that can be written: .*sweep\.csv is a folder"
    ):
        require_writable(path, "output_dir='x'")


def never(*arguments: object, **named: object) -> NoReturn:
    raise AssertionError("measured before the folder was tried")


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "x")
    monkeypatch.setattr("comet.measure.job.make_expert_group", never)
    config = make_job(compose(["model=tiny", "tune.tokens=[32]", f"tune.profiles={folder}", f"output_dir={folder}"]), 1)
    message = f"={folder!r} must be a folder that can be written: .*Not a directory"
    with pytest.raises(ValueError, match=f"^tune.profiles{message}"):
        job.tune_job(config, Rank(), lambda _: {"small": MOE})
    with pytest.raises(ValueError, match=f"^output_dir{message}"):
        run_sweep(config, Rank(), lambda _: {"small": MOE})
    SweepLog(tmp_path / CSV_NAME).put({})
    (tmp_path / f"{CSV_NAME}.lock").unlink(missing_ok=True)
    (tmp_path / f"{CSV_NAME}.lock").mkdir()
    with pytest.raises(ValueError, match=f"^resume='{tmp_path}' must be a folder that can be written"):
        run_sweep(replace(config, resume=str(tmp_path)), Rank(), lambda _: {"small": MOE})


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_status_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "file").touch()
    said = refusal(capfd, "tune", f"tune.profiles={tmp_path}/file/x", "tune.tokens=[32]")
    assert said.startswith(f"tune.profiles='{tmp_path}/file/x' must be a folder that can be written")
