"""The tasks ``tune`` and ``explain`` as users run them, on two CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comet.launch.cli import main
from comet.launch.tasks import TASKS
from comet.tuner import H200, ProfileStore


def comet(*words: str) -> tuple[int, list[str], str]:
    command = [sys.executable, "-P", "-m", "comet.launch", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def explain(capfd: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    """The points of the task ``explain``, which starts no ranks."""
    capfd.readouterr()
    assert main(["explain", *words]) == 0
    points: list[dict] = json.loads(capfd.readouterr().out.splitlines()[-1])["points"]
    return points


def test_tune_then_explain(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    settings = (f"tune.profiles={tmp_path}", "tune.tokens=[48,8]", "parallel.ep=2")
    assert [point["source"] for point in explain(capfd, *settings)] == ["default", "default"]

    status, lines, errors = comet("tune", "tune.rounds=2", *settings)
    assert status == 0, errors
    tuned = json.loads(lines[-1])
    assert tuned["mean_regret"] >= 1
    assert sum(line.startswith("candidate ") for line in lines) == 2
    for point in tuned["points"]:
        times = [candidate["measured_ms"] for candidate in point["candidates"]]
        assert point["source"] == "profile"
        assert times == sorted(times), "every candidate ran, the fastest first"
        assert point["candidates"][0]["setting"] == point["chosen"]
    path = tmp_path / "cpu_x2.json"
    assert tuned["profile"] == str(path)
    assert {key.tokens for key in ProfileStore.load(path, "cpu").entries} == {64, 8}
    assert not ProfileStore.load(path, H200.name).entries

    after = explain(capfd, *settings[:1], "tune.tokens=[48,9,100000]", "parallel.ep=2")
    assert [point["source"] for point in after] == ["profile", "profile", "default"]
    assert [point["chosen"] for point in after[:2]] == [point["chosen"] for point in tuned["points"]]


def test_mistakes_are_one_line() -> None:
    status, lines, errors = comet("explain", "tune.tokens=[0]")
    assert status == 2
    assert not lines
    assert errors.strip().splitlines() == ["comet: error: tune: tokens=(0,) must each be at least 1"]
    assert {"tune", "explain"} <= TASKS.keys()
