"""A local job listens on the loopback interface only; half of torchrun's environment is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from launch_jobs import all_gone, rank_pids, start

from comet.launch.cli import main
from comet.launch.distributed import OF_TORCHRUN, LaunchContext


def test_a_local_job_listens_on_the_loopback_interface_only_and_ends_with_its_launcher(tmp_path: Path) -> None:
    job = start("sleep", f"output_dir={tmp_path}")
    try:
        pids = rank_pids(tmp_path, 2, job)
        assert {child.pid for child in psutil.Process(job.pid).children()} == set(pids)
        sockets = [each for pid in (job.pid, *pids) for each in psutil.Process(pid).net_connections()]
        listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
        assert len(listening) >= 3, "the store's and those of the process groups"
        assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        for pid in pids:  # a host may call itself 127.0.0.1, and there is no NCCL here
            chosen = psutil.Process(pid).environ()
            assert {chosen["GLOO_SOCKET_IFNAME"], chosen["NCCL_SOCKET_IFNAME"]} <= {"lo", "lo0"}
    finally:
        job.kill()
        job.communicate()
    if sys.platform == "linux":  # the only one that tells a process of its parent's end
        assert all_gone(pids)


def test_half_of_torchruns_environment_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["train"]) == 2
    assert capfd.readouterr().err.splitlines() == [
        "comet: error: RANK, WORLD_SIZE in the environment must come with LOCAL_RANK, LOCAL_WORLD_SIZE, as torchrun "
        "sets them: start the ranks with torchrun, or unset RANK WORLD_SIZE to start them here"
    ]
    assert main(["train", "--dry-run"]) == 0, "which starts nothing"


def test_a_rank_that_is_no_number_is_refused() -> None:
    environment = dict.fromkeys(OF_TORCHRUN, "1") | {"RANK": "one"}
    with pytest.raises(ValueError, match="RANK='one' in the environment must be a number"):
        LaunchContext.from_environment(environment, 0)
