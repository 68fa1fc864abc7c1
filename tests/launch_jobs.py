"""Jobs of the launcher as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

APP = str(Path(__file__).parent / "launch_app.py")
TIMEOUT_S = 180


def environment() -> dict[str, str]:
    """Ranks of these tests compute on the CPU, also on a machine with GPUs."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(*words: str, program: Sequence[str] = (APP,), stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, *program, *words]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )


def run(*words: str, program: Sequence[str] = (APP,)) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of standard output, lines of standard error."""
    process = start(*words, program=program)
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), err.splitlines()


def rank_pids(folder: Path, num_ranks: int, job: subprocess.Popen[str] | None = None) -> list[int]:
    """Wait until every rank has noted its process id; a job that ends before says why."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("pid.*"))) < num_ranks or not all(file.read_text() for file in folder.glob("pid.*")):
        if job is not None and job.poll() is not None:
            pytest.fail(f"the job ended with {job.returncode} before its ranks started: {job.communicate()}")
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int((folder / f"pid.{rank}").read_text()) for rank in range(num_ranks)]


def all_gone(pids: Sequence[int]) -> bool:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    return not alive
