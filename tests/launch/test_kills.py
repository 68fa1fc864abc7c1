"""Ranks that are killed, freeze, are late or refuse a call: who is named, that the job ends, that nothing is lost."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_jobs import (
    APP,
    TIMEOUT_S,
    TINY,
    all_gone,
    environment,
    rank_pids,
    run_two_agents,
    start,
    train_as_rank,
)
from ranks import run_ranks
from tiers import slow

STEPS_PER_ATTEMPT = 6
SAVING = ("train.checkpoint_every=3", "train.eval_every=0", "parallel=ep2")


def draw_kills(seed: int, number: int) -> list[tuple[int, int, str]]:
    """Rank, call and place of each attempt's kill; the call comes before the attempt has taken six steps."""
    draw, kills = random.Random(seed), []
    for _ in range(number):
        rank, place = draw.randrange(2), draw.choice(["step", "step", "fsync", "rename"])
        place = "fsync" if rank == 1 and place == "rename" else place  # which rank 0 does
        most = {"step": STEPS_PER_ATTEMPT, "fsync": 1 if rank == 1 else 5, "rename": 2}[place]
        kills.append((rank, draw.randint(1, most), place))
    return kills


def train_in(folder: Path, kills: list[tuple[int, int, str]], command: list[str], *words: str) -> list[float]:
    folder.mkdir()
    (folder / "text.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "kills.json").write_text(json.dumps(kills))
    settings = [f"data.path={folder}/text.txt", f"output_dir={folder}/run-${{now:%f}}", *TINY, *SAVING, *words]
    job = subprocess.run(
        [sys.executable, *command, "train_and_be_killed", *settings],
        env=environment(), capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert job.returncode == 0, (kills, job.stderr)
    if command[0] == APP:
        died = re.findall(r"error: rank (\d) \(pid \d+\) was killed by SIGKILL", job.stderr)
        assert died == [str(rank) for rank, _, _ in kills], job.stderr
        assert job.stderr.count("all ranks start anew, restart ") == len(kills), job.stderr
    (run,) = folder.glob("run-*")
    return losses_in(run)


def losses_in(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [loss for row in rows for loss in row.get("losses", [])]


@pytest.mark.timeout(3600)  # twenty kills take minutes, more of them on a busy machine
@pytest.mark.parametrize(("launcher", "number"), [slow("comet", 20), slow("torchrun", 2)])
def test_killed_jobs_end_with_the_losses_of_an_undisturbed_one(launcher: str, number: int, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    kills = draw_kills(seed, number)
    print(f"seed {seed}: {kills}")
    steps = f"train.steps={STEPS_PER_ATTEMPT * (number + 1)}"
    command, words = [APP], [f"launch.max_restarts={number}"]
    if launcher == "torchrun":
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={number}"]
        command, words = ["-m", "torch.distributed.run", *options, APP], []
    disturbed = train_in(tmp_path / "disturbed", kills, command, steps, *words)
    calm = tmp_path / "calm"
    calm.mkdir()
    settings = [f"data.path={tmp_path}/disturbed/text.txt", f"output_dir={calm}", *TINY, *SAVING, steps]
    run_ranks(train_as_rank, 2, settings)
    assert disturbed == losses_in(calm)
    assert len(disturbed) == STEPS_PER_ATTEMPT * (number + 1)


DEADLINE_S = 6


def said_by(job: subprocess.Popen[str]) -> list[str]:
    """What a job says of its end; fails where it does not come."""
    try:
        _, err = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    return [line for line in err.splitlines() if "error" in line or "Traceback" in line]


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
