"""A sweep that is told to stop: wherever it is at that moment, it says which rows it keeps and how it goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from launch_jobs import TIMEOUT_S, start
from training_cases import Rank

from comet.launch.cli import PROGRAM, main
from comet.launch.config import compose, make_job
from comet.launch.failures import last_words
from comet.launch.tasks.tuning import sweep_job
from comet.measure.job import CSV_NAME, tell_kept
from comet.measure.sweep import SweepLog

TOKENS = tuple(range(16, 1040, 16))  # minutes of work: the sweep is not over when it is told to stop
# A lock that a thread waits for twice ends no wait at a signal, as a collective or a wait for a device.
STUCK = """
import ctypes
from comet.launch.failures import last_words
with last_words(lambda: "3 kept"):
    lib, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    lib.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    lib.pthread_mutex_lock(mutex)
"""


def times_in(folder: Path) -> int:
    return sum(item.ms is not None for item in SweepLog.load(folder / CSV_NAME).rows.values())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a mutex of zeros is none")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_last_words_come_at_once_from_a_process_that_cannot_run_python(signum: signal.Signals, tmp_path: Path) -> None:
    process = start(program=("-P", "-c", STUCK), folder=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signum)
    assert process.communicate(timeout=TIMEOUT_S) == ("", "comet: 3 kept\n")
    assert process.returncode == -signum, "it ends as it would have ended without a word"


def test_without_a_signal_nothing_is_said_and_all_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(KeyError), last_words(lambda: "never"):
        raise KeyError("a bug")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == files
    assert capfd.readouterr().err == ""


def test_progress_and_kept_points_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "sweep.tokens=[16,32]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={tmp_path}"]
    job = make_job(compose(words), 1)
    assert tell_kept(job) == f"0 measured points kept in {tmp_path}; the same command with output_dir={tmp_path} " + (
        "measures the others"
    )
    sweep_job(job, Rank())
    first, *shapes, last = capfd.readouterr().err.splitlines()
    assert first == f"comet: sweep of 2 points, 2 to measure in {tmp_path}"
    told = "tiny EP1 TP1, {} tokens: 1 setting timed in one loop, rows at its end"
    assert [line.partition("left; ")[2] for line in shapes] == [told.format(16), told.format(32)]
    assert last.startswith("comet: 2 of 2 shapes measured, ")
    resumed = make_job(compose([*words, f"resume={tmp_path}", "output_dir=unused"]), 1)
    assert tell_kept(resumed) == f"2 measured points kept in {tmp_path}; the same command with resume={tmp_path} " + (
        "measures the others"
    )


def test_the_default_folder_is_named_after_the_task(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for words, folder in [
        (["sweep"], "outputs/sweep-2"), (["train"], "outputs/train-2"), (["sweep", "output_dir=mine"], "mine"),
    ]:  # fmt: skip
        assert main([words[0], "--dry-run", *words[1:]]) == 0
        assert f"\noutput_dir: {folder}" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_sweep_that_is_stopped_says_what_it_kept(signum: signal.Signals, to_all: bool, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal, ``kill`` only the one that is named."""
    words = ("sweep", "nproc=2", f"sweep.tokens={list(TOKENS)}", "sweep.comm_blocks=[8,16]", "sweep.rounds=150")
    process = start(*words, program=PROGRAM, folder=tmp_path)
    deadline = time.monotonic() + TIMEOUT_S
    while not (folders := list((tmp_path / "outputs").glob("sweep-*"))) or not times_in(folders[0]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no row was written"
        time.sleep(0.05)
    (os.killpg if to_all else os.kill)(process.pid, signum)
    out, err = process.communicate(timeout=TIMEOUT_S)
    folder = f"outputs/{folders[0].name}"
    assert (process.returncode, out) == (128 + signum, "")
    told, stopped = sorted(line for line in err.splitlines() if "shape" not in line and "to measure" not in line)
    assert stopped == f"comet: stopped by {signum.name}; all ranks were ended"
    kept, _, rest = told.removeprefix("comet: ").partition(" ")
    assert rest == f"measured points kept in {folder}; the same command with output_dir={folder} measures the others"
    assert 2 <= int(kept) <= times_in(folders[0]) < 2 * len(TOKENS)
    assert int(kept) % 2 == 0, "whole shapes"
