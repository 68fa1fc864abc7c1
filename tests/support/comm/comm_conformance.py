"""Checks that every communicator must pass, for any backend; each rank of a group runs them.

A test hands ``run_suite`` to ``run_ranks``. A failing check ends its rank, and the traceback names the check.
Rows encode source, destination and epoch, so a wrong row shows its origin.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from gpus import gpu_of
from torch import Tensor

from comet.comm import CommBackend, Communicator, make_communicator
from comet.comm.base import SymmTensor
from comet.comm.signals import signal, wait
from comet.errors import CommTimeoutError
from comet.kernels.runtime.primitives import PLACE_EXCHANGE, wait_flag
from comet.kernels.runtime.primitives import signal as signal_flag

WIDTH = 1024
NUM_EPOCHS = 200
SEED = 20


@dataclass(frozen=True, slots=True)
class Site:
    """The rank and backend of a check; with ``kernels``, Triton kernels send signals in the host's place."""

    rank: int
    world_size: int
    backend: CommBackend
    kernels: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.backend in ("cpu_shm", "auto") else torch.device(gpu_of(self.rank))

    def open(self, timeout_s: float = 30.0) -> Communicator:
        """This rank's communicator; without a process group, a rank alone."""
        group = dist.group.WORLD if dist.is_initialized() else None
        return make_communicator(self.backend, group, self.device, timeout_s=timeout_s)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self, comm: Communicator) -> None:
        self.synchronize()
        comm.barrier()
        self.synchronize()

    def peers(self) -> list[int]:
        """All ranks, this one included, in an order of its own."""
        return [(self.rank + step) % self.world_size for step in range(self.world_size)]


@triton.jit(do_not_specialize=["slot", "flag", "value", "epoch"])
def put_kernel(row_address, flag_address, slot, flag, value, epoch, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    row = tl.load(row_address).to(tl.pointer_type(tl.int32)) + slot * WIDTH
    tl.store(row + column, value + column)
    signal_flag(tl.load(flag_address).to(tl.pointer_type(tl.int32)) + flag, epoch)


@triton.jit(do_not_specialize=["slot", "flag", "epoch", "timeout_ns"])
def take_kernel(rows, flags, out, fault, slot, flag, epoch, timeout_ns, WIDTH: tl.constexpr, INTERPRET: tl.constexpr):
    wait_flag(flags + flag, epoch, fault, timeout_ns, PLACE_EXCHANGE, flag, slot, INTERPRET)
    tl.debug_barrier()
    column = tl.arange(0, WIDTH)
    tl.store(out + column, tl.load(rows + slot * WIDTH + column))


def row_value(src: int, dst: int, epoch: int) -> int:
    """Return the first element of a row; the other elements count up from this one."""
    return ((src * 16 + dst) * 10_000 + epoch) * WIDTH


def expected_row(src: int, dst: int, epoch: int) -> Tensor:
    return row_value(src, dst, epoch) + torch.arange(WIDTH, dtype=torch.int32)


def send(site: Site, rows: SymmTensor, flags: SymmTensor, dst: int, epoch: int) -> None:
    slot = (epoch % 2) * site.world_size + site.rank
    if site.kernels:
        value = row_value(site.rank, dst, epoch)
        put_kernel[(1,)](rows.pointers[dst:], flags.pointers[dst:], slot, site.rank, value, epoch, WIDTH=WIDTH)
        return
    rows.peers[dst][slot].copy_(expected_row(site.rank, dst, epoch))
    signal(flags.peers[dst], site.rank, epoch)


def receive(site: Site, rows: SymmTensor, flags: SymmTensor, src: int, epoch: int, timeout_s: float) -> Tensor:
    slot = (epoch % 2) * site.world_size + src
    if site.kernels:
        out = torch.zeros(WIDTH, dtype=torch.int32, device=site.device)
        fault = torch.zeros(8, dtype=torch.int64, device=site.device)
        sizes = dict(WIDTH=WIDTH, INTERPRET=site.device.type == "cpu")
        take_kernel[(1,)](rows.local, flags.local, out, fault, slot, src, epoch, int(timeout_s * 1e9), **sizes)
        assert not int(fault[0]), f"rank {site.rank}: row of rank {src}, epoch {epoch}: {fault.tolist()}"
        return out.cpu()
    place = f"conformance, epoch {epoch}"
    wait(flags.local, src, epoch, timeout_s=timeout_s, rank=site.rank, peer=src, place=place)
    return rows.local[slot].clone()


def rows_and_flags(site: Site, comm: Communicator) -> tuple[SymmTensor, SymmTensor]:
    """Two halves of one row per source rank, and one flag per source rank."""
    rows = comm.alloc(2 * site.world_size * WIDTH * 4).view(0, (2 * site.world_size, WIDTH), torch.int32)
    return rows, comm.alloc(site.world_size * 4).view(0, (site.world_size,), torch.int32)


def check_allocate(site: Site) -> None:
    """Memory is zeroed, of the size asked for, and allocations are separate."""
    with site.open() as comm:
        assert (comm.rank, comm.world_size) == (site.rank, site.world_size)
        first, second = comm.alloc(1000), comm.alloc(3)
        for pool, num_bytes in ((first, 1000), (second, 3)):
            assert pool.rank == site.rank
            assert len(pool.peers) == site.world_size
            assert all((peer.shape, peer.dtype) == ((num_bytes,), torch.uint8) for peer in pool.peers)
            assert pool.local.device == site.device
            assert not pool.local.any()
        site.barrier(comm)
        first.local.fill_(7)
        assert not second.local.any()
        site.barrier(comm)
        with pytest.raises(ValueError, match="num_bytes=0 must be at least 1"):
            comm.alloc(0)


def check_peer_access(site: Site) -> None:
    """All ranks read a row that a rank stores locally, and a peer reads a row that a rank stores there."""
    with site.open() as comm:
        rows, _ = rows_and_flags(site, comm)
        rows.local[site.rank] = expected_row(site.rank, site.rank, 1).to(site.device)
        site.barrier(comm)
        for peer in site.peers():
            assert torch.equal(rows.peers[peer][peer].cpu(), expected_row(peer, peer, 1))
        site.barrier(comm)
        for peer in site.peers():
            rows.peers[peer][site.rank] = expected_row(site.rank, peer, 2).to(site.device)
        site.barrier(comm)
        for peer in site.peers():
            assert torch.equal(rows.local[peer].cpu(), expected_row(peer, site.rank, 2))
        site.barrier(comm)


def check_pointer_table(site: Site) -> None:
    """The table holds the address of every peer's copy, also of a window."""
    with site.open() as comm:
        pool = comm.alloc(4096)
        window = pool.view(512, (4, 8), torch.float32)
        for tensor in (pool, window):
            assert (tensor.pointers.shape, tensor.pointers.dtype) == ((site.world_size,), torch.int64)
            assert tensor.pointers.device == site.device
            assert tensor.pointers.tolist() == [peer.data_ptr() for peer in tensor.peers]
            assert all(address % 16 == 0 for address in tensor.pointers.tolist())
        assert (window.pointers - pool.pointers).tolist() == [512] * site.world_size


def check_signal_wait(site: Site) -> None:
    """A row that was signalled is complete; one that never comes is reported with both ranks."""
    with site.open() as comm:
        rows, flags = rows_and_flags(site, comm)
        for dst in site.peers():
            send(site, rows, flags, dst, 1)
        for src in site.peers():
            assert torch.equal(receive(site, rows, flags, src, 1, comm.timeout_s), expected_row(src, site.rank, 1))
        late = (site.rank + 1) % site.world_size
        error, text = (AssertionError, r"\[1, 1, ") if site.kernels else (CommTimeoutError, "epoch 2, saw 1")
        # The interpreter's clock counts polls as 20 us, which take many times as long.
        interpreted = site.kernels and site.device.type == "cpu"
        with pytest.raises(error, match=rf"rank {site.rank}.* rank {late}.*{text}"):
            receive(site, rows, flags, late, 2, timeout_s=0.01 if interpreted else 0.2)
        site.barrier(comm)


def check_many_epochs(site: Site) -> None:
    """With two halves and growing epochs, no delayed rank loses a row that it has yet to read.

    A rank writes epoch n + 2 into the half of epoch n only after it received n + 1 from all, and each of them sent
    n + 1 only after it had read its rows of n.
    """
    delays = random.Random(SEED + site.rank)
    num_epochs = NUM_EPOCHS if site.device.type == "cuda" or not site.kernels else NUM_EPOCHS // 10
    with site.open() as comm:
        rows, flags = rows_and_flags(site, comm)
        for epoch in range(1, num_epochs + 1):
            for dst in site.peers():
                send(site, rows, flags, dst, epoch)
                if delays.random() < 0.05:
                    time.sleep(delays.random() * 0.004)
            for src in site.peers():
                row = receive(site, rows, flags, src, epoch, comm.timeout_s)
                assert torch.equal(row, expected_row(src, site.rank, epoch)), (
                    f"rank {site.rank}, epoch {epoch}, from rank {src}: expected {row_value(src, site.rank, epoch)}, "
                    f"row holds {row.min()} to {row.max()} (seed {SEED})"
                )
        site.barrier(comm)


def check_barrier(site: Site) -> None:
    """No rank leaves before the last arrived, in many epochs, with random delays."""
    delays = random.Random(SEED + site.rank)
    with site.open() as comm:
        steps = comm.alloc(4).view(0, (1,), torch.int32)
        for step in range(1, 51):
            if delays.random() < 0.2:
                time.sleep(delays.random() * 0.004)
            steps.local.fill_(step)
            site.barrier(comm)
            seen = [int(peer[0]) for peer in steps.peers]
            assert seen == [step] * site.world_size, f"rank {site.rank}, step {step}: {seen} (seed {SEED})"
            site.barrier(comm)


def check_late_rank(site: Site) -> None:
    """Waiting for a rank that never comes raises an error that names this rank, and close() still works."""
    late = site.world_size - 1
    # 3 s in nanoseconds need 64 bits, as 30 s do: the kernel is compiled already and no rank is late by compiling it.
    timeout_s = 3.0 if site.device.type == "cuda" else 0.5
    comm = site.open(timeout_s=timeout_s)
    if site.rank == late:
        dist.barrier()
    else:
        # Others may be late as well.
        names = rf"rank {site.rank} waited {timeout_s} s for ranks? (\d, )*{late} \(barrier, epoch 1"
        with pytest.raises(CommTimeoutError, match=names):
            barrier_twice(site, comm)
        dist.barrier()
    comm.close()


def barrier_twice(site: Site, comm: Communicator) -> None:
    """A GPU reports a late rank one call later than the CPU."""
    site.barrier(comm)
    site.barrier(comm)


def check_close(site: Site) -> None:
    """close() is idempotent, any use after it raises, and a new communicator works."""
    for _ in range(3):
        comm = site.open()
        comm.alloc(256).local.fill_(1)
        comm.close()
        comm.close()
        closed = rf"Communicator of rank {site.rank} was used after close"
        with pytest.raises(RuntimeError, match=closed):
            comm.alloc(256)
        with pytest.raises(RuntimeError, match=closed):
            comm.barrier()


def check_too_large(site: Site) -> None:
    """A size that cannot fit says how many bytes are needed, on every rank, and leaves the communicator working."""
    with site.open() as comm:
        with pytest.raises(ValueError, match=r"num_bytes=\d+ .*must fit.* \d+ bytes needed.* bytes free.*max_tokens"):
            comm.alloc(1 << 46)
        comm.alloc(256)
        site.barrier(comm)


def check_unequal_sizes(site: Site) -> None:
    """Ranks that ask for different sizes all get the same error."""
    sizes = [256 + rank // (site.world_size - 1) for rank in range(site.world_size)]
    with site.open() as comm:
        with pytest.raises(
            ValueError, match=rf"num_bytes=\[256, .*257\] of ranks 0 to {site.world_size - 1} must be equal"
        ):
            comm.alloc(sizes[site.rank])
        comm.alloc(256)


ALONE: tuple[Callable[[Site], None], ...] = (
    check_allocate, check_peer_access, check_pointer_table, check_barrier, check_close
)  # fmt: skip
CHECKS = (*ALONE, check_signal_wait, check_many_epochs, check_late_rank, check_too_large, check_unequal_sizes)


def run_suite(rank: int, world_size: int, backend: CommBackend, kernels: bool = False) -> None:
    site = Site(rank, world_size, backend, kernels)
    if site.device.type == "cuda":
        torch.cuda.set_device(site.device)
    for check in CHECKS:
        check(site)
