"""Ranks and other processes that Comet starts end with the one that started them, however early that is killed."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from comet.comm.signals import poll
from comet.kernels.runtime.process import PARENT
from comet.launch.cli import PROGRAM
from comet.launch.distributed import rank_environment
from comet.launch.messages import OF_TORCHRUN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process of its parent's end")

# Stands for a torch that takes long to import, from a slow disk.
SLOW_TORCH = """
import os, pathlib, time
note = pathlib.Path(__file__).with_name("pid")
note.with_suffix(".part").write_text(str(os.getpid()))
note.with_suffix(".part").rename(note)
time.sleep(600)
"""
SLOW_CASES = """
import multiprocessing, os, pathlib, time, types
def aot_cases():
    if multiprocessing.parent_process() is not None:
        note = pathlib.Path(__file__).with_name("pid")
        note.with_suffix(".part").write_text(str(os.getpid()))
        note.with_suffix(".part").rename(note)
        time.sleep(600)
    source = types.SimpleNamespace(hash=lambda: "a hash")
    return [types.SimpleNamespace(kernel="a kernel", name="a case", source=source, options="", expects=())]
"""
STARTER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


def start(folder: Path, words: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
    """A process with such a torch, and where it writes its id."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(SLOW_TORCH)
    environment = {**environment, "PYTHONPATH": str(folder)}
    return subprocess.Popen([sys.executable, *words], env=environment), folder / "torch/pid"


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def environment_of_torchrun() -> dict[str, str]:
    return {**os.environ, **dict.fromkeys(OF_TORCHRUN, "1"), "MASTER_ADDR": "127.0.0.1"}


def environment_of_launcher() -> dict[str, str]:
    """The environment of a rank that its launcher starts; the launcher still has to add its process id."""
    return {**rank_environment(2, 1), "RANK": "0", "LOCAL_RANK": "0"}


def test_a_rank_that_still_imports_ends_with_its_launcher(tmp_path: Path) -> None:
    environment = environment_of_torchrun()  # an agent does not pass its process id
    environment.pop(PARENT, None)
    launcher, note = start(tmp_path, ["-c", STARTER, *PROGRAM, "train", "model=tiny"], environment)
    assert poll(note.exists, 60), "the rank imports torch"
    pid = int(note.read_text())
    assert not gone(pid)
    launcher.kill()
    launcher.wait()
    assert poll(lambda: gone(pid), 60)


def test_a_rank_whose_launcher_is_gone_already_ends_before_it_imports(tmp_path: Path) -> None:
    environment = {**environment_of_launcher(), PARENT: str(os.getppid())}
    rank, note = start(tmp_path, [*PROGRAM, "train", "model=tiny"], environment)
    assert rank.wait(60) == 1
    assert not note.exists()


def test_a_rank_of_a_launcher_that_lives_goes_on(tmp_path: Path) -> None:
    rank, note = start(tmp_path, [*PROGRAM, "train", "model=tiny"], environment_of_launcher())
    try:
        assert poll(lambda: note.exists() or rank.poll() is not None, 60)
        assert rank.poll() is None
    finally:
        rank.kill()
        rank.wait()


def test_compilers_end_with_their_command(tmp_path: Path) -> None:
    """Workers of a pool would wait for work for ever."""
    (tmp_path / "slow_cases.py").write_text(SLOW_CASES)
    words = ["-P", "-m", "comet.launch", "compile", "--modules", "slow_cases", "--jobs", "1"]
    command = subprocess.Popen([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    note = tmp_path / "pid"
    assert poll(note.exists, 120), "the worker has a case"
    pid = int(note.read_text())
    command.kill()
    command.wait()
    assert poll(lambda: gone(pid), 60)
