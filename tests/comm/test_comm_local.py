"""What needs no other rank: signals in plain memory, emulated ranks, windows of a pool, files of killed jobs."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from comm_conformance import ALONE, Site
from emulated import emulated_group
from ranks import run_ranks

from comet.comm import Communicator, cpu_shm, make_communicator
from comet.comm.base import LocalCommunicator, SymmTensor
from comet.comm.signals import signal, wait, waited
from comet.errors import CommTimeoutError, UnavailableError

# ---- a rank alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ALONE, ids=lambda check: check.__name__)
def test_a_rank_alone_needs_no_process_group(check) -> None:
    check(Site(0, 1, "auto", kernels=False))


@pytest.mark.parametrize("backend", ["auto", "cpu_shm"])
def test_a_rank_alone_gets_local_memory(backend) -> None:
    comm = make_communicator(backend, None, "cpu")
    assert isinstance(comm, LocalCommunicator)
    assert isinstance(comm, Communicator)


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_signal_worked_example() -> None:
    flags = torch.zeros(2, 3, dtype=torch.int32)
    signal(flags, 4, 7)
    assert flags.tolist() == [[0, 0, 0], [0, 7, 0]]
    wait(flags, 4, 7, timeout_s=1, rank=1, peer=0, place="here")
    wait(flags, 4, 6, timeout_s=1, rank=1, peer=0, place="here")


def test_wait_names_both_ranks_the_place_and_the_epochs() -> None:
    assert waited(1, 0, "panel 3", 2, 5, 4) == "rank 1 waited 2.0 s for rank 0 (panel 3, epoch 5, saw 4)"
    flags = torch.full((3,), 40, dtype=torch.int32)
    message = "rank 2 waited 0.1 s for rank 0 (layer 0 dispatch, chunk 17, epoch 41, saw 40)"
    place = "layer 0 dispatch, chunk 17"
    with pytest.raises(CommTimeoutError, match=f"^{re.escape(message)}$"):
        wait(flags, 1, 41, timeout_s=0.1, rank=2, peer=0, place=place)


# ---- one process that plays all ranks --------------------------------------------------------------------------------


def test_emulated_ranks_share_memory() -> None:
    group = emulated_group(3, "cpu")
    first = [comm.alloc(600) for comm in group]
    second = [comm.alloc(16) for comm in reversed(group)][::-1]
    for pools in (first, second):
        for rank, pool in enumerate(pools):
            assert pool.rank == rank
            assert pool.pointers.tolist() == pools[0].pointers.tolist()
            pool.peers[(rank + 1) % 3][0] = rank + 1
        assert [int(pool.local[0]) for pool in pools] == [3, 1, 2]
    for comm in group:
        comm.barrier()
        comm.close()
        with pytest.raises(RuntimeError, match=r"EmulatedCommunicator of rank \d was used after close"):
            comm.barrier()


def test_emulated_ranks_must_ask_for_equal_sizes() -> None:
    group = emulated_group(2, "cpu")
    group[0].alloc(256)
    with pytest.raises(ValueError, match=r"num_bytes=512 of rank 1 must equal the 256 bytes of the other ranks"):
        group[1].alloc(512)
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        emulated_group(0, "cpu")


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
