"""Cores and memory that this process may use, which a container may limit, and its end with its parent."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PARENT = "COMET_PARENT"  # variable of a process's environment: its parent's process id
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may keep busy: at most those it may run on, and its groups' quotas."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder in _groups("cpu"):
        if numbers := _numbers(folder, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
            cores = min(cores, max(numbers[0] // numbers[1], 1))
    return cores


def free_memory() -> int:
    """Return how many bytes this process can still get without swapping or exceeding a limit of its groups."""
    free = 1024 * int(re.findall(r"MemAvailable:\s*(\d+)", (PROC / "meminfo").read_text())[0])
    for folder in _groups("memory"):
        names = ("memory.max", "memory.limit_in_bytes", "memory.current", "memory.usage_in_bytes")
        if numbers := _numbers(folder, *names):
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, max(numbers[0] - numbers[1] + int(cached[-1]), 0))
    return free


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux only).

    Args:
        parent: Process id of the parent, which may have ended before this call; then this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups (versions 1 and 2), from its own up to the root."""
    file = PROC / "self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else ():
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            root = GROUPS / names
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _numbers(folder: Path, *names: str) -> list[int]:
    """Return the two numbers in those of a group's files that exist; none where a file is missing or sets no limit."""
    words = " ".join(file.read_text() for file in map(folder.joinpath, names) if file.is_file()).split()
    return [int(word) for word in words] if len(words) == 2 and all(map(str.isdecimal, words)) else []
