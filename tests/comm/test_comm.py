"""Communicators on the CPU: the conformance suite, signals, windows of a pool, files of killed jobs."""

import os
import re
import signal as unix_signal
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import comm_conformance
import pytest
import torch
import torch.distributed as dist
from comm_conformance import ALONE, Site, run_suite
from ranks import in_ranks, logged, run_ranks

from comet.comm import Communicator, cpu_shm, handshake, make_communicator, nodes
from comet.comm.base import LocalCommunicator, SymmTensor
from comet.comm.signals import poll, wait, waited
from comet.errors import CommTimeoutError, UnavailableError


@pytest.mark.parametrize("world_size", [2, 4])
def test_conformance_of_cpu_shm(world_size: int) -> None:
    run_ranks(run_suite, world_size, "cpu_shm")


@in_ranks(2, interpret=True)
def test_cpu_shm_carries_the_signals_of_interpreted_kernels(rank: int, world_size: int) -> None:
    site = Site(rank, world_size, "cpu_shm", kernels=True)
    comm_conformance.check_signal_wait(site)
    comm_conformance.check_many_epochs(site)


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


def test_without_nvshmem4py_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from comet.comm.nvshmem import import_nvshmem

    monkeypatch.setitem(__import__("sys").modules, "nvshmem", None)
    with pytest.raises(UnavailableError, match=r"pip install 'comet-moe\[nvshmem\]'"):
        import_nvshmem()


# ---- what happens on ranks: one start of them serves all that need as many -----------------------------------------


def two_subgroups_do_not_see_each_other(rank: int) -> None:
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    with make_communicator("cpu_shm", groups[rank % 2 == 0], "cpu") as comm:
        assert (comm.rank, comm.world_size) == (rank // 2, 2)
        pool = comm.alloc(16)
        pool.peers[1 - comm.rank][0] = 100 + rank
        comm.barrier()
        assert [int(peer[0]) for peer in pool.peers] == [102 + rank % 2, 100 + rank % 2]


def all_late_ranks_are_named(rank: int) -> None:
    comm = make_communicator("cpu_shm", dist.group.WORLD, "cpu", timeout_s=0.5)
    if rank == 2:
        with pytest.raises(CommTimeoutError, match=r"^rank 2 waited 0\.5 s for ranks 0, 1, 3 \(barrier, epoch 1\)$"):
            comm.barrier()
    dist.barrier()


def memory_outlives_close_as_long_as_a_tensor_does(rank: int) -> None:
    comm = make_communicator("cpu_shm", dist.group.WORLD, "cpu")
    local = comm.alloc(1 << 20).local
    local.fill_(rank + 1)
    comm.barrier()
    comm.close()
    time.sleep(0.1 * rank)
    assert bool((local == rank + 1).all())


def ranks_of_two_pid_namespaces_share_a_file_whose_name_goes(rank: int) -> None:
    free, named = {cpu_shm.SHARED_MEMORY: 64 << 10}, []
    free_bytes, make, messages = cpu_shm.free_bytes, tempfile.mkstemp, logged("comet")
    with make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", os.getppid)
        patch.setattr(tempfile, "mkstemp", lambda **options: named.append(make(**options)) or named[-1])
        patch.setattr(cpu_shm, "free_bytes", lambda folder: free.get(folder, free_bytes(folder)))
        comm.alloc(4096)
        assert not any("goes to files" in message for message in messages)
        pool = comm.alloc(1 << 20)
        pool.peers[1 - rank].fill_(rank + 1)
        comm.barrier()
        assert bool((pool.local == 2 - rank).all())
        free[Path(tempfile.gettempdir())] = 1000
        with pytest.raises(
            ValueError, match=r"2097152 bytes needed, 65536 bytes free in /dev/shm, 1000 bytes free in "
        ):
            comm.alloc(1 << 20)
    said = "symmetric memory of 2097152 bytes goes to files: 65536 bytes free in /dev/shm"
    assert [said in message for message in messages].count(True) == (rank == 0)
    folders = [str(Path(path).parent) for _, path in named]
    assert folders == ["/dev/shm", tempfile.gettempdir()] * (rank == 0)
    assert not any(Path(path).exists() for _, path in named)


def memory_that_the_machine_lacks_is_refused(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        patch.setattr(cpu_shm, "free_memory", lambda: 1000)
        with pytest.raises(ValueError, match="8192 bytes needed, 1000 bytes free in memory; lower max_tokens"):
            comm.alloc(100)


def two_hosts_are_refused(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "this_host", lambda: handshake.Host(f"node{rank}", f"boot{rank}"))
        with pytest.raises(UnavailableError, match="on one node, but there are rank 0 on node0, rank 1 on node1; use"):
            make_communicator("cpu_shm", dist.group.WORLD, "cpu")


def memory_without_pages_is_refused(rank: int) -> None:
    def fail(*args: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(ValueError, match=r"8192 bytes needed, No space left on device; lower max_tokens"):
            comm.alloc(100)


def ranks_without_common_files_are_refused(rank: int) -> None:
    def fail(path: str, identity: object) -> int:
        raise FileNotFoundError(2, "No such file", path)

    with pytest.MonkeyPatch.context() as patch, make_communicator("cpu_shm", dist.group.WORLD, "cpu") as comm:
        if rank == 1:
            patch.setattr(cpu_shm, "_open", fail)
        with pytest.raises(UnavailableError, match=r"a file system all ranks share, but rank 1: .*No such file"):
            comm.alloc(100)


def gpu_memory_is_refused_without_gpus(rank: int) -> None:
    if torch.cuda.is_available():
        return
    for backend in ("symm_mem", "auto"):
        with pytest.raises(UnavailableError, match=r"needs a CUDA GPU; use backend='nvshmem', or backend='cpu_shm'"):
            make_communicator(backend, dist.group.WORLD, "cuda")


CASES = {
    2: (
        memory_outlives_close_as_long_as_a_tensor_does,
        ranks_of_two_pid_namespaces_share_a_file_whose_name_goes,
        memory_that_the_machine_lacks_is_refused,
        two_hosts_are_refused,
        memory_without_pages_is_refused,
        ranks_without_common_files_are_refused,
        gpu_memory_is_refused_without_gpus,
    ),
    4: (two_subgroups_do_not_see_each_other, all_late_ranks_are_named),
}


def run_cases(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        case(rank)


@pytest.mark.parametrize("world_size", CASES)
def test_cases_of_ranks(world_size: int) -> None:
    before = shared_files()
    run_ranks(run_cases, world_size)
    assert no_new_file(before)


def shared_files() -> set[Path]:
    """Files of symmetric memory that still have a name."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {file for folder in folders for file in folder.glob("comet-*") if file.is_file()}


def no_new_file(before: set[Path]) -> bool:
    """Whether nothing stays behind; files of other jobs come and go."""
    return poll(lambda: shared_files() <= before, timeout_s=60)


def die_at_the_barrier(rank: int, world_size: int) -> None:
    comm = make_communicator("cpu_shm", dist.group.WORLD, "cpu", timeout_s=60.0)
    flags = comm.alloc(4 * world_size).view(0, (world_size,), torch.int32)
    comm.barrier()
    comm.timeout_s = 1.0
    if rank == 1:
        os.kill(os.getpid(), unix_signal.SIGKILL)
    with pytest.raises(
        CommTimeoutError, match=rf"^rank {rank} waited 1\.0 s for ranks? (0, )?1(, 2)? \(barrier, epoch 2\)$"
    ):
        comm.barrier()
    with pytest.raises(CommTimeoutError, match=rf"^rank {rank} waited 0\.5 s for rank 1 \(exchange, epoch 3, saw 0\)$"):
        wait(flags.local, 1, 3, timeout_s=0.5, rank=rank, peer=1, place="exchange")
    comm.close()


def test_a_killed_rank_hangs_nobody_and_leaves_no_file() -> None:
    before = shared_files()
    run_ranks(die_at_the_barrier, 3, may_die=[1])
    assert no_new_file(before)


# ---- the barrier of the GPU backends, under the interpreter ----------------------------------------------------------


@in_ranks(3, interpret=True)
def test_device_barrier_orders_ranks_and_names_a_late_one(rank: int, world_size: int) -> None:
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
        if rank != 1:
            hasty = DeviceBarrier(flags[1], 0.002, interpret=True)  # the interpreter's clock counts 100 polls
            hasty.arrive()
            late = {0: "1", 2: "[01]"}[rank]  # rank 0 may be late as well, after so short a deadline
            said = rf"^rank {rank} waited 0\.0 s for rank {late} \(barrier, epoch 1, saw 0\)$"
            with pytest.raises(CommTimeoutError, match=said):
                hasty.arrive()
        dist.barrier()


# ---- what needs no other rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ALONE, ids=lambda check: check.__name__)
def test_a_rank_alone_needs_no_process_group(check) -> None:
    check(Site(0, 1, "auto", kernels=False))


@pytest.mark.parametrize("backend", ["auto", "cpu_shm"])
def test_a_rank_alone_gets_local_memory(backend) -> None:
    comm = make_communicator(backend, None, "cpu")
    assert isinstance(comm, LocalCommunicator)
    assert isinstance(comm, Communicator)


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_wait_names_both_ranks_the_place_and_the_epochs() -> None:
    assert waited(1, 0, "panel 3", 2, 5, 4) == "rank 1 waited 2.0 s for rank 0 (panel 3, epoch 5, saw 4)"
    flags = torch.full((3,), 40, dtype=torch.int32)
    message = "rank 2 waited 0.1 s for rank 0 (layer 0 dispatch, chunk 17, epoch 41, saw 40)"
    place = "layer 0 dispatch, chunk 17"
    with pytest.raises(CommTimeoutError, match=f"^{re.escape(message)}$"):
        wait(flags, 1, 41, timeout_s=0.1, rank=2, peer=0, place=place)


# ---- windows of a pool -----------------------------------------------------------------------------------------------


def test_view_refuses_what_does_not_fit() -> None:
    pool: SymmTensor = LocalCommunicator(torch.device("cpu")).alloc(1024)
    with pytest.raises(ValueError, match="offset=128 must be a non-negative multiple of 256"):
        pool.view(128, (4,), torch.float32)
    with pytest.raises(ValueError, match=r"offset=768 \+ 260 bytes must fit the pool of 1024 bytes"):
        pool.view(768, (65,), torch.float32)
    with pytest.raises(ValueError, match=r"dtype=torch.float32 of the pool must be torch.uint8"):
        pool.view(0, (4,), torch.float32).view(0, (4,), torch.int32)


# ---- GPUs that cannot reach each other, as far as a CPU can tell -----------------------------------------------------


def test_symm_mem_says_what_to_use_where_gpus_cannot_map_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from comet.comm import symm_mem

    def rendezvous(tensor: torch.Tensor, group_name: str) -> None:
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(symm_mem.torch_symm_mem, "rendezvous", rendezvous)
    rank = object.__new__(symm_mem.SymmMemCommunicator)
    rank.device, rank._group, rank._shared = torch.device("cuda", 1), SimpleNamespace(group_name="moe"), ""
    with pytest.raises(
        UnavailableError, match=r"cuda:1 cannot map .*peer access is not supported.*use backend='nvshmem'"
    ):
        rank._exchange(torch.zeros(8))
    rank._shared = "ranks 0 and 1 share one GPU"
    with pytest.raises(
        ValueError, match=r"needs one GPU per rank, but ranks 0 and 1 share one GPU \(peer access is not"
    ):
        rank._exchange(torch.zeros(8))


def test_nvshmem_says_what_to_change_where_a_gpu_is_out_of_reach() -> None:
    from comet.comm.nvshmem import NvshmemCommunicator

    class NvshmemError(Exception):
        pass

    def get_peer_tensor(tensor: torch.Tensor, rank: int) -> None:
        raise NvshmemError("no pointer")

    rank = object.__new__(NvshmemCommunicator)
    rank.rank, rank.device = 0, torch.device("cuda", 0)
    rank._nvshmem = SimpleNamespace(NvshmemError=NvshmemError, get_peer_tensor=get_peer_tensor)
    with pytest.raises(UnavailableError, match=r"rank 0 cannot address the GPU of rank 9 .*lower parallel.ep"):
        rank._peer(torch.zeros(8), 9)


def be_killed(rank: int, world_size: int, where: str) -> None:
    """Rank 0 dies while others open the file, or while it reserves pages; the other must not wait for it."""
    if rank == 0:
        setattr(cpu_shm if where == "_open" else os, where, lambda *_: os.kill(os.getpid(), 9))
    with pytest.raises(RuntimeError):
        make_communicator("cpu_shm", dist.group.WORLD, "cpu")


def open_one(rank: int, world_size: int) -> None:
    make_communicator("cpu_shm", dist.group.WORLD, "cpu").close()


def test_a_start_removes_no_file_and_a_kill_leaves_none() -> None:
    """A start keeps old files with Comet's names that no process has open: they belong to the user."""
    number = uuid.uuid4().hex
    folders = (cpu_shm.SHARED_MEMORY, Path(tempfile.gettempdir()))
    names = (f"comet-{number}.log", f"comet-{number}.json", f"comet-{number}", f"comet-memory-{number}")
    users = [folder / name for folder in folders for name in names]
    try:
        for path in users:
            path.write_bytes(bytes(100))
            os.utime(path, (0, 0))
        before = shared_files()
        run_ranks(be_killed, 2, "_open", may_die=[0])
        run_ranks(be_killed, 2, "posix_fallocate", may_die=[0])
        run_ranks(open_one, 2)
        assert [path.name for path in users if not path.exists()] == []
        assert no_new_file(before)
    finally:
        for path in users:
            path.unlink(missing_ok=True)
