"""What a job that was killed has left in shared memory goes at the next start; what is in use, or not ours, stays."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from comet.comm import cpu_shm, make_communicator

OLD_S = time.time() - 2 * cpu_shm.LEFT_S


def make(path: Path, modified: float = OLD_S) -> Path:
    path.write_bytes(bytes(100))
    os.utime(path, (modified, modified))
    return path


def test_only_files_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    left, new, other = (
        make(tmp_path / "comet-left"),
        make(tmp_path / "comet-new", time.time()),
        make(tmp_path / "other"),
    )
    used, folder, link = make(tmp_path / "comet-used"), tmp_path / "comet-folder", tmp_path / "comet-link"
    folder.mkdir()
    link.symlink_to(other)
    with used.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cpu_shm.remove_left_files([tmp_path, tmp_path / "missing"])
    assert not left.exists()
    assert all(path.exists() for path in (new, other, used, folder, link))


def test_files_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = make(tmp_path / "comet-left")
    monkeypatch.setattr(os, "getuid", lambda: os.stat(left).st_uid + 1)
    cpu_shm.remove_left_files([tmp_path])
    assert left.exists()


def be_killed(rank: int, world_size: int) -> None:
    """Rank 0 dies while the file has a name; the other must not wait for it."""
    if rank == 0:
        cpu_shm._map = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        make_communicator("cpu_shm", dist.group.WORLD, "cpu")


def open_one(rank: int, world_size: int) -> None:
    make_communicator("cpu_shm", dist.group.WORLD, "cpu").close()


def test_the_next_start_removes_what_a_killed_one_left() -> None:
    before = set(cpu_shm.SHARED_MEMORY.glob("comet-*"))
    run_ranks(be_killed, 2, may_die=[0])
    left = set(cpu_shm.SHARED_MEMORY.glob("comet-*")) - before
    assert left, "the file of the killed rank"
    for path in left:
        os.utime(path, (OLD_S, OLD_S))
    run_ranks(open_one, 2)
    assert not any(path.exists() for path in left)
