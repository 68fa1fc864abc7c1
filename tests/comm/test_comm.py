"""Communicators on the CPU: the conformance suite for ``cpu_shm``, and what only a CPU can show.

Cases of the same number of ranks share one start of them (``cases_of_two``, ``cases_of_four``).
"""

from __future__ import annotations

import logging
import os
import re
import signal as unix_signal
import tempfile
import time
from pathlib import Path
from typing import Any

import comm_conformance
import pytest
import torch
import torch.distributed as dist
from comm_conformance import CHECKS, Site, run_suite
from ranks import run_ranks

from comet.comm import cpu_shm, handshake, make_communicator
from comet.comm.signals import poll, wait
from comet.errors import CommTimeoutError, UnavailableError


@pytest.fixture(scope="module", params=[2, 4], ids=["2-ranks", "4-ranks"])
def passed(request: pytest.FixtureRequest) -> list[list[str]]:
    """The checks that passed on each rank; one start of the processes serves them all."""
    return run_ranks(run_suite, request.param, "cpu_shm")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_cpu_shm(passed: list[list[str]], check) -> None:
    assert all(check.__name__ in names for names in passed)


def kernel_signals(rank: int, world_size: int) -> None:
    site = Site(rank, world_size, "cpu_shm", kernels=True)
    comm_conformance.check_signal_wait(site)
    comm_conformance.check_many_epochs(site)


def test_cpu_shm_carries_the_signals_of_interpreted_kernels() -> None:
    run_ranks(kernel_signals, 2, interpret=True)


# ---- what make_communicator refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "device", "timeout_s", "message"),
    [
        ("nccl", "cpu", 30.0, "backend='nccl' must be one of auto, nvshmem, symm_mem, cpu_shm"),
        ("symm_mem", "cpu", 30.0, "device=cpu must be 'cuda' for backend='symm_mem'"),
        ("nvshmem", "cpu", 30.0, "device=cpu must be 'cuda' for backend='nvshmem'"),
        ("cpu_shm", "cuda:0", 30.0, "device=cuda:0 must be 'cpu' for backend='cpu_shm'"),
        ("auto", "cpu", 0.0, "timeout_s=0.0 must be a positive number of seconds"),
        ("auto", "cpu", float("inf"), "timeout_s=inf must be a positive number of seconds"),
    ],
)
def test_make_communicator_refuses(backend, device: str, timeout_s: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_communicator(backend, None, device, timeout_s=timeout_s)


def refuse_without_gpu(rank: int, world_size: int) -> None:
    if torch.cuda.is_available():
        return
    for backend in ("symm_mem", "auto"):
        with pytest.raises(UnavailableError, match=r"needs a CUDA GPU; use backend='nvshmem', or backend='cpu_shm'"):
            make_communicator(backend, dist.group.WORLD, "cuda")


def test_without_nvshmem4py_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from comet.comm.nvshmem import import_nvshmem

    monkeypatch.setitem(__import__("sys").modules, "nvshmem", None)
    with pytest.raises(UnavailableError, match=r"pip install 'comet-moe\[nvshmem\]'"):
        import_nvshmem()


# ---- cases of four ranks ---------------------------------------------------------------------------------------------


def two_subgroups(rank: int, world_size: int) -> tuple[int, int, list[int]]:
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    mine = groups[0] if rank in (1, 3) else groups[1]
    with make_communicator("cpu_shm", mine, "cpu") as comm:
        pool = comm.alloc(16)
        pool.peers[1 - comm.rank][0] = 100 + rank
        comm.barrier()
        return comm.rank, comm.world_size, [int(peer[0]) for peer in pool.peers]


def several_late(rank: int, world_size: int) -> str:
    comm = make_communicator("cpu_shm", dist.group.WORLD, "cpu", timeout_s=0.5)
    message = ""
    if rank == 2:
        with pytest.raises(CommTimeoutError) as caught:
            comm.barrier()
        message = str(caught.value)
    dist.barrier()
    return message


CASES_OF_FOUR = (two_subgroups, several_late)


def run_cases_of_four(rank: int, world_size: int) -> dict[str, Any]:
    return {case.__name__: case(rank, world_size) for case in CASES_OF_FOUR}


@pytest.fixture(scope="module")
def cases_of_four() -> list[dict[str, Any]]:
    return run_ranks(run_cases_of_four, 4)


def test_subgroups_do_not_see_each_other(cases_of_four) -> None:
    assert [results["two_subgroups"] for results in cases_of_four] == [
        (0, 2, [102, 100]),
        (0, 2, [103, 101]),
        (1, 2, [102, 100]),
        (1, 2, [103, 101]),
    ]


def test_all_late_ranks_are_named(cases_of_four) -> None:
    assert cases_of_four[2]["several_late"] == "rank 2 waited 0.5 s for ranks 0, 1, 3 (barrier, epoch 1)"


# ---- a rank that is killed -------------------------------------------------------------------------------------------


def die_at_the_barrier(rank: int, world_size: int) -> tuple[str, str]:
    comm = make_communicator("cpu_shm", dist.group.WORLD, "cpu", timeout_s=60.0)
    flags = comm.alloc(4 * world_size).view(0, (world_size,), torch.int32)
    comm.barrier()
    comm.timeout_s = 1.0
    if rank == 1:
        os.kill(os.getpid(), unix_signal.SIGKILL)
    with pytest.raises(CommTimeoutError) as barrier:
        comm.barrier()
    with pytest.raises(CommTimeoutError) as waiting:
        wait(flags.local, 1, 3, timeout_s=0.5, rank=rank, peer=1, place="exchange")
    comm.close()
    return str(barrier.value), str(waiting.value)


def test_a_killed_rank_hangs_nobody_and_leaves_no_file() -> None:
    before = shared_files()
    first, killed, last = run_ranks(die_at_the_barrier, 3, may_die=[1])
    assert killed is None
    for rank, (barrier, waiting) in ((0, first), (2, last)):
        assert re.fullmatch(rf"rank {rank} waited 1\.0 s for ranks? (0, )?1(, 2)? \(barrier, epoch 2\)", barrier)
        assert waiting == f"rank {rank} waited 0.5 s for rank 1 (exchange, epoch 3, saw 0)"
    assert no_new_file(before)


def shared_files() -> set[Path]:
    """Files of symmetric memory that still have a name."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {file for folder in folders for file in folder.glob("comet-*") if file.is_file()}


def no_new_file(before: set[Path]) -> bool:
    """Whether nothing stays behind; files of other jobs come and go."""
    return poll(lambda: shared_files() <= before, timeout_s=60)


# ---- cases of two ranks ----------------------------------------------------------------------------------------------


def memory_outlives_close(rank: int, world_size: int) -> list[int]:
    comm = make_communicator("cpu_shm", dist.group.WORLD, "cpu")
    local = comm.alloc(1 << 20).local
    local.fill_(rank + 1)
    comm.barrier()
    comm.close()
    time.sleep(0.1 * rank)
    return [int(local.min()), int(local.max())]


def two_hosts(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "this_host", lambda: handshake.Host(f"node{rank}", f"boot{rank}"))
        with pytest.raises(UnavailableError, match="on one node, but there are rank 0 on node0, rank 1 on node1; use"):
            make_communicator("cpu_shm", dist.group.WORLD, "cpu")


def small_shared_memory(rank: int, world_size: int) -> list[str]:
    free = {cpu_shm.SHARED_MEMORY: 64 << 10}
    free_bytes, messages = cpu_shm.free_bytes, []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("comet").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch, make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        patch.setattr(cpu_shm, "free_bytes", lambda folder: free.get(folder, free_bytes(folder)))
        comm.alloc(4096)
        assert not messages
        pool = comm.alloc(1 << 20)
        pool.peers[1 - rank].fill_(rank + 1)
        comm.barrier()
        assert bool((pool.local == 2 - rank).all())
        free[Path(tempfile.gettempdir())] = 1000
        with pytest.raises(
            ValueError, match=r"2097152 bytes needed, 65536 bytes free in /dev/shm, 1000 bytes free in "
        ):
            comm.alloc(1 << 20)
    return messages


def no_pages(rank: int, world_size: int) -> None:
    def fail(*args: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(
            ValueError, match=r"8192 bytes needed in /dev/shm, No space left on device; lower max_tokens"
        ):
            comm.alloc(100)


def no_common_files(rank: int, world_size: int) -> None:
    def fail(path: str, num_bytes: int) -> None:
        raise FileNotFoundError(2, "No such file", path)

    with pytest.MonkeyPatch.context() as patch, make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        if rank == 1:
            patch.setattr(cpu_shm, "_map", fail)
        with pytest.raises(UnavailableError, match=r"a file system all ranks share, but rank 1: .*No such file"):
            comm.alloc(100)


CASES_OF_TWO = (
    memory_outlives_close,
    two_hosts,
    small_shared_memory,
    no_pages,
    no_common_files,
    refuse_without_gpu,
)


def run_cases_of_two(rank: int, world_size: int) -> dict[str, Any]:
    return {case.__name__: case(rank, world_size) for case in CASES_OF_TWO}


@pytest.fixture(scope="module")
def cases_of_two() -> list[dict[str, Any]]:
    before = shared_files()
    results = run_ranks(run_cases_of_two, 2)
    assert no_new_file(before)
    return results


@pytest.mark.parametrize(
    "case", [two_hosts, no_pages, no_common_files, refuse_without_gpu], ids=lambda case: case.__name__
)
def test_refused_on_all_ranks_with_the_reason(cases_of_two, case) -> None:
    if case is refuse_without_gpu and torch.cuda.is_available():
        pytest.skip("shows what happens without a GPU")
    assert all(case.__name__ in results for results in cases_of_two)


def test_memory_outlives_close_as_long_as_a_tensor_does(cases_of_two) -> None:
    assert [results["memory_outlives_close"] for results in cases_of_two] == [[1, 1], [2, 2]]


def test_a_small_shared_memory_falls_back_to_files_and_says_so_once(cases_of_two) -> None:
    logged, silent = (results["small_shared_memory"] for results in cases_of_two)
    assert len(logged) == 1
    assert "symmetric memory of 2097152 bytes goes to files: 65536 bytes free in /dev/shm" in logged[0]
    assert silent == []


# ---- the barrier of the GPU backends, under the interpreter ----------------------------------------------------------


def device_barrier(rank: int, world_size: int) -> str:
    from comet.comm.device_barrier import DeviceBarrier

    with make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        flags = [comm.alloc(4 * world_size).view(0, (world_size,), torch.int32) for _ in range(2)]
        steps = comm.alloc(4).view(0, (1,), torch.int32)
        patient = DeviceBarrier(flags[0], 30.0, interpret=True)
        for step in range(1, 11):
            steps.local.fill_(step)
            patient.arrive()
            assert [int(peer[0]) for peer in steps.peers] == [step] * world_size
            patient.arrive()
        patient.check()
        message = ""
        if rank != 1:
            hasty = DeviceBarrier(flags[1], 0.002, interpret=True)  # the interpreter's clock counts 100 polls
            hasty.arrive()
            with pytest.raises(CommTimeoutError) as caught:
                hasty.arrive()
            message = str(caught.value)
        dist.barrier()
        return message


def test_device_barrier_orders_ranks_and_names_a_late_one() -> None:
    messages = run_ranks(device_barrier, 3, interpret=True)
    for rank, late_ranks in ((0, "1"), (2, "[01]")):  # rank 0 may be late as well, after so short a deadline
        text = rf"rank {rank} waited 0\.0 s for rank {late_ranks} \(barrier, epoch 1, saw 0\)"
        assert re.fullmatch(text, messages[rank])
