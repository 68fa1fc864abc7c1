"""Symmetric memory between processes of one host: one shared file per allocation, mapped by every rank.

The file lives in ``/dev/shm``, or in the folder for temporary files where ``/dev/shm`` is too small (containers often
have 64 MiB). Its name is removed as soon as every rank has mapped it; the memory itself goes when the last tensor over
it is gone. Rank 0 holds a lock on the file while it has a name, so one that a kill left behind is known by having none,
and the next allocation removes it. Pages are reserved at once: a full disk is an error at ``alloc`` and never a SIGBUS
in the middle of a step.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from comet.comm.base import Communicator, SymmTensor, pointer_table
from comet.comm.failures import Board, board_bytes
from comet.comm.handshake import check_size, gather
from comet.comm.signals import fence, poll, signal
from comet.config import require
from comet.errors import CommTimeoutError, UnavailableError
from comet.layout import round_up

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "comet-"
LEFT_S = 60.0  # a file is locked right after it was made, so without a lock one of this age was left behind
FLAG_BYTES = 64  # one cache line, so that ranks polling different flags do not disturb each other


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
    """``(num_bytes,)`` uint8 zeroes of each rank, mapped by all ranks of one host (collective)."""
    check_size(group, num_bytes)
    rank, world_size = group.rank(), group.size()
    stride = round_up(num_bytes, mmap.PAGESIZE)
    with ExitStack() as held:
        path, lacking = gather(group, _create(stride * world_size, held) if rank == 0 else None)[0]
        require(
            not lacking,
            f"num_bytes={num_bytes} on each of {world_size} ranks must fit: {lacking}; "
            "lower max_tokens or free some space",
        )
        try:
            pool, error = _map(path, stride * world_size), ""
        except OSError as failure:
            pool, error = torch.empty(0, dtype=torch.uint8), f"rank {rank}: {failure}"
        errors = [text for text in gather(group, error) if text]
    if errors:
        raise UnavailableError(f"backend='cpu_shm' needs a file system all ranks share, but {'; '.join(errors)}")
    return tuple(pool[rank * stride : rank * stride + num_bytes] for rank in range(world_size))


def shared_board(group: ProcessGroup) -> Board:
    """The board of the ranks of one host (collective)."""
    return Board(share_memory(group, board_bytes(group.size())), group.rank())


def free_bytes(folder: Path) -> int:
    """Bytes a user may still write under ``folder``; 0 where there is no such folder."""
    if not folder.is_dir():
        return 0
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _create(num_bytes: int, held: ExitStack) -> tuple[str, str]:
    """The path of a file of zeroes in the first folder with room, named until ``held`` ends, or why there is none."""
    folders = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    remove_left_files(folders)
    room = {folder: free_bytes(folder) for folder in folders}
    spaces = ", ".join(f"{free} bytes free in {folder}" for folder, free in room.items())
    folder = next((folder for folder, free in room.items() if num_bytes <= free), None)
    if folder is None:
        return "", f"{num_bytes} bytes needed, {spaces}"
    if folder != SHARED_MEMORY:
        logger.warning("symmetric memory of %d bytes goes to files: %s", num_bytes, spaces)
    try:
        return _reserve(folder, num_bytes, held), ""
    except OSError as failure:
        return "", f"{num_bytes} bytes needed in {folder}, {failure.strerror}"


def _reserve(folder: Path, num_bytes: int, held: ExitStack) -> str:
    """Path of a new locked file of ``num_bytes`` zeroes; nothing stays behind if the pages cannot be had."""
    descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    held.callback(os.close, descriptor)
    held.callback(os.unlink, path)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.posix_fallocate(descriptor, 0, num_bytes)
    return path


def remove_left_files(folders: Iterable[Path]) -> None:
    """Remove this user's files that jobs which were killed have left, and nobody else's."""
    for path in (path for folder in folders for path in folder.glob(f"{PREFIX}*")):
        with suppress(OSError):  # gone meanwhile, or in use
            state = path.lstat()
            is_left = path.is_file() and state.st_uid == os.getuid() and time.time() - state.st_mtime > LEFT_S
            if is_left and not path.is_symlink():
                with path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _map(path: str, num_bytes: int) -> torch.Tensor:
    """The file as ``(num_bytes,)`` uint8, mapped shared; the mapping lives as long as a tensor over it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED), dtype=torch.uint8)
    finally:
        os.close(descriptor)
