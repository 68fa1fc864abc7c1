"""Symmetric memory between processes of one host: one file per allocation, mapped by every rank.

The file is memory without a name (``memfd_create``): the other ranks open it as ``/proc/PID/fd/N`` of the first rank,
and a kill leaves nothing behind. Ranks that do not see each other's ``/proc``, as in two containers, get a file with a
random name in ``/dev/shm``, or in the folder for temporary files where ``/dev/shm`` is too small. Its name is removed
before the file gets its pages. No file is ever removed that this process did not make itself.

Pages are reserved at once: too little memory is an error at ``alloc`` and never a SIGBUS in the middle of a step.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from comet.comm.base import Communicator, SymmTensor, pointer_table
from comet.comm.failures import Board, board_bytes
from comet.comm.handshake import check_size, gather
from comet.comm.signals import fence, poll, signal
from comet.config import require
from comet.errors import CommTimeoutError, UnavailableError
from comet.kernels.runtime.process import free_memory
from comet.layout import round_up

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
FLAG_BYTES = 64  # one cache line, so that ranks polling different flags do not disturb each other

# Path, device and inode of a file, which stands for none where there is a reason, in words, why it cannot be made.
Place = tuple[str, tuple[int, int], str]


class CpuShmCommunicator(Communicator):
    """Ranks are processes of one host; every rank maps every rank's memory."""

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, device, timeout_s)
        self._epoch = 0
        self.board = shared_board(group)
        self._arrived = self.alloc(FLAG_BYTES).view(0, (1,), torch.int32)

    def _alloc(self, num_bytes: int) -> SymmTensor:
        peers = share_memory(self._group, num_bytes)
        return SymmTensor(peers, pointer_table(peers), self.rank)

    def _barrier(self) -> None:
        self._epoch += 1
        signal(self._arrived.local, 0, self._epoch)
        flags = [peer.numpy() for peer in self._arrived.peers]

        def all_came() -> bool:
            self.board.check()
            return all(flag[0] >= self._epoch for flag in flags)

        if not poll(all_came, self.timeout_s):
            late = [str(rank) for rank, flag in enumerate(flags) if flag[0] < self._epoch]
            raise CommTimeoutError(
                f"rank {self.rank} waited {self.timeout_s:.1f} s for rank{'s' if len(late) > 1 else ''} "
                f"{', '.join(late)} (barrier, epoch {self._epoch})"
            )
        fence()

    def _renew(self) -> None:
        self._epoch = 0
        self._arrived.local.zero_()

    def _close(self, in_step: bool) -> bool:
        del self._arrived
        return True


def share_memory(group: ProcessGroup, num_bytes: int) -> tuple[torch.Tensor, ...]:
    """Map ``(num_bytes,)`` uint8 zeroes of each rank into all ranks of one host (collective)."""
    check_size(group, num_bytes)
    rank, world_size = group.rank(), group.size()
    stride = round_up(num_bytes, mmap.PAGESIZE)
    for make in (_nameless, _named):
        pool, errors, lacking = _map_together(group, stride * world_size, make)
        require(
            not lacking,
            f"num_bytes={num_bytes} on each of {world_size} ranks must fit: {lacking}; "
            "lower max_tokens or free some space",
        )
        if not errors:
            return tuple(pool[rank * stride : rank * stride + num_bytes] for rank in range(world_size))
        if make is _nameless and rank == 0:
            logger.info("symmetric memory goes through files, which have names for a moment: %s", "; ".join(errors))
    raise UnavailableError(f"backend='cpu_shm' needs a file system all ranks share, but {'; '.join(errors)}")


def shared_board(group: ProcessGroup) -> Board:
    """The board of the ranks of one host (collective)."""
    return Board(share_memory(group, board_bytes(group.size())), group.rank())


def free_bytes(folder: Path) -> int:
    """Bytes a user may still write under ``folder``; 0 where there is no such folder."""
    if not folder.is_dir():
        return 0
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _map_together(
    group: ProcessGroup, num_bytes: int, make: Callable[[int], AbstractContextManager[Place]]
) -> tuple[torch.Tensor, list[str], str]:
    """Map a file that rank 0 makes (collective): the pool, why ranks cannot map the file, and what it lacks."""
    rank, pool = group.rank(), torch.empty(0, dtype=torch.uint8)
    with ExitStack() as held:
        with ExitStack() as named:
            path, identity, lacking = gather(group, named.enter_context(make(num_bytes)) if rank == 0 else None)[0]
            if lacking:
                return pool, [], lacking
            error = ""
            try:
                descriptor = _open(path, identity)
                held.callback(os.close, descriptor)
                pool = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
            except OSError as failure:
                error = f"rank {rank}: {failure}"
            errors = [text for text in gather(group, error) if text]
        if not errors and rank == 0:
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
            except OSError as failure:
                lacking = f"{num_bytes} bytes needed, {failure.strerror}"
        return pool, errors, gather(group, lacking)[0]


def _open(path: str, identity: tuple[int, int]) -> int:
    """Open the file that rank 0 made; another file may have the same path in another container."""
    state = os.stat(path)
    if (state.st_dev, state.st_ino) != identity:
        raise FileNotFoundError(errno.ENOENT, "it is another file here", path)
    return os.open(path, os.O_RDWR)


def _identity(descriptor: int) -> tuple[int, int]:
    state = os.fstat(descriptor)
    return state.st_dev, state.st_ino


@contextmanager
def _nameless(num_bytes: int) -> Iterator[Place]:
    """Make a file of zeroes in memory; others find it under its path while this is open."""
    try:
        free = free_memory()
        descriptor = os.memfd_create("comet-memory")
    except OSError:  # there is no /proc, or the system refuses such files
        yield "", (0, 0), ""
        return
    try:
        os.ftruncate(descriptor, num_bytes)
        lacking = "" if num_bytes <= free else f"{num_bytes} bytes needed, {free} bytes free in memory"
        yield f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor), lacking
    finally:
        os.close(descriptor)


@contextmanager
def _named(num_bytes: int) -> Iterator[Place]:
    """Make a file of zeroes in the first folder with room; it has a name while this is open."""
    room = {folder: free_bytes(folder) for folder in (SHARED_MEMORY, Path(tempfile.gettempdir()))}
    spaces = ", ".join(f"{free} bytes free in {folder}" for folder, free in room.items())
    folder = next((folder for folder, free in room.items() if num_bytes <= free), None)
    if folder is None:
        yield "", (0, 0), f"{num_bytes} bytes needed, {spaces}"
        return
    if folder != SHARED_MEMORY:
        logger.warning("symmetric memory of %d bytes goes to files: %s", num_bytes, spaces)
    try:
        descriptor, path = tempfile.mkstemp(prefix="comet-", dir=folder)
    except OSError as failure:
        yield "", (0, 0), f"{num_bytes} bytes needed in {folder}, {failure.strerror}"
        return
    try:
        os.ftruncate(descriptor, num_bytes)
        yield path, _identity(descriptor), ""
    finally:
        os.unlink(path)
        os.close(descriptor)
