"""Cores and memory that a process may use: sets of cores, quotas and limits of control groups of both versions."""

import os
from pathlib import Path

import pytest

from comet.kernels.runtime import process
from comet.kernels.runtime.process import free_memory, usable_cores

GIB = 2**30
# Groups of this process, files below /sys/fs/cgroup, usable cores of 16, free GiB of 64.
CASES = {
    "nothing is limited": ("0::/\n", {"cpu.max": "max 100000"}, 16, 64),
    "a container, whose own group is the root": (
        "0::/\n",
        {
            "cpu.max": "450000 100000",
            "memory.max": str(8 * GIB),
            "memory.current": str(5 * GIB),
            "memory.stat": f"anon 3\ninactive_file {2 * GIB}\nactive_file 7\n",
        },
        4,
        5,
    ),
    "a service below a slice, which has the limit": (
        "0::/a.slice/b.service\n",
        {"a.slice/cpu.max": "200000 100000", "a.slice/b.service/cpu.max": "max 100000"},
        2,
        64,
    ),
    "less than one core": ("0::/\n", {"cpu.max": "50000 100000"}, 1, 64),
    "version 1, seen from inside a container": (
        "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n1:name=systemd:/\n0::/\n",
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "300000",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": str(4 * GIB),
            "memory/memory.usage_in_bytes": str(4 * GIB),
            "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
        },
        3,
        1,
    ),
    "version 1 without a quota": (
        "3:cpu:/\n4:memory:/\n",
        {
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": str(2**63 - 4096),
            "memory/memory.usage_in_bytes": str(GIB),
            "memory/memory.stat": "total_inactive_file 0\n",
        },
        16,
        64,
    ),
    "no groups": (None, {}, 16, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_cores_and_memory_of_a_container_are_those_it_may_use(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, files, cores, free = CASES[case]
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(process, "PROC", proc)
    monkeypatch.setattr(process, "GROUPS", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {2**30} kB\nMemFree:  5 kB\nMemAvailable:   {64 * 2**20} kB\n")
    if groups is not None:
        (proc / "self/cgroup").write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    assert (usable_cores(), free_memory()) == (cores, free * GIB)


def test_this_machine_can_be_asked() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    assert free_memory() > 0
