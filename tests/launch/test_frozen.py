"""Ranks that freeze, are late, or refuse a call while the others wait: who is named, and that the job ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from launch_jobs import TIMEOUT_S, all_gone, rank_pids, run_two_agents, start, wait_for_checkpoint
from tiers import slow

from comet.launch.cli import PROGRAM

DEADLINE_S = 6
TINY = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.context=32",
    "model.moe.ffn_size=32", "train.batch_size=2", "train.warmup_steps=0", "train.eval_batches=1",
    "train.steps=1000000", "train.checkpoint_every=5", f"comm.timeout_s={DEADLINE_S}",
)  # fmt: skip


def processes_of(job: subprocess.Popen[str]) -> dict[int, int]:
    """The process id of each rank of a local job."""
    children = psutil.Process(job.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child.pid for child in children if "RANK" in child.environ()}


def start_training(folder: Path, *words: str) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A job of two ranks that trains."""
    (folder / "text.txt").write_bytes(bytes(range(256)) * 40)
    settings = [f"data.path={folder}/text.txt", f"output_dir={folder}/run", "parallel=ep2", *TINY, *words]
    job = start("train", *settings, program=PROGRAM)
    wait_for_checkpoint(job, folder / "run")
    return job, processes_of(job)


def said_by(job: subprocess.Popen[str]) -> list[str]:
    """What a job says of its end; fails where it does not come."""
    try:
        _, err = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    return [line for line in err.splitlines() if "error" in line or "Traceback" in line]


@pytest.mark.parametrize("path", [slow("plain"), slow("reference"), slow("twin")])
def test_a_frozen_rank_is_named_on_every_path(path: str, tmp_path: Path) -> None:
    job, ranks = start_training(tmp_path, f"moe_path={path}")
    frozen = 1 if path == "plain" else 0
    os.kill(ranks[frozen], signal.SIGSTOP)
    (line,) = said_by(job)
    assert re.fullmatch(
        rf"comet: error: rank {frozen} \(pid {ranks[frozen]}, .*\) is frozen: no sign of life for \d+ s;.*", line
    )
    assert job.returncode == 1
    assert all_gone(list(ranks.values()))


@pytest.mark.slow
def test_a_rank_that_is_late_but_alive_is_named_with_what_it_does(tmp_path: Path) -> None:
    job = start("late", f"output_dir={tmp_path}", f"comm.timeout_s={DEADLINE_S}")
    (line,) = said_by(job)
    assert re.fullmatch(
        r"comet: error: rank 0 waited too long in .*; rank 1 is alive, in late \(launch_app.py:\d+\)", line
    )
    assert job.returncode == 1


@pytest.mark.slow
def test_a_rank_that_refuses_ends_the_others_of_another_node_at_once(tmp_path: Path) -> None:
    """The other rank waits in what has no deadline of its own."""
    results = run_two_agents("refuse_while_others_wait", f"output_dir={tmp_path}", "comm.timeout_s=1000")
    ours = [line for _, _, err in results for line in err if line.startswith("comet:")]
    assert ours == ["comet: error: tokens=7 must please everyone"]
    assert all_gone(rank_pids(tmp_path, 2))


@pytest.mark.slow
def test_two_agents_name_the_rank_that_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # what torchrun gives a rank that is stopped
    results = run_two_agents("freeze", f"output_dir={tmp_path}", f"comm.timeout_s={DEADLINE_S}", ranks=2)
    ours = [line for _, _, err in results for line in err if line.startswith("comet:")]
    pid = rank_pids(tmp_path, 4)[2]
    assert len(ours) == 1, ours
    assert re.match(rf"comet: error: rank 2 \(pid {pid}, .*\) is frozen: no sign of life for \d+ s", ours[0])
