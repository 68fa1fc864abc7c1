"""The place of a process in a job, decisions of rank 0 for all, and signals to stop: all ranks end after one step."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from comet.comm import handshake
from comet.comm.handshake import largest, this_host, this_rank

Made = TypeVar("Made")

LAG = 2  # steps that a GPU has queued when the host asks about an earlier one, so that it does not run dry
POLL_S = 0.1
STOPPING = (signal.SIGTERM, signal.SIGINT)
PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The place of a process in its job; the process group is initialised when there are several ranks."""

    rank: int
    world_size: int
    device: torch.device
    attempt: int = 0  # how often the ranks have been restarted
    job: str = ""  # what all attempts of the job have in common, and no other job; empty if the launcher forgot it


def gather(value: Any) -> list[Any]:
    return handshake.gather(dist.group.WORLD, value)


def from_first_rank(make: Callable[[], Made]) -> Made:
    """Return or raise on all ranks what ``make`` returns or raises on rank 0 (collective).

    An ``OSError`` without a file becomes a ``ValueError``.
    """
    made: list[Any] = [None, None]
    rank, world_size = this_rank()
    if rank == 0:
        try:
            made[0] = make()
        except (ValueError, OSError) as error:
            is_told = isinstance(error, ValueError) or error.filename
            made[1] = error if is_told else ValueError(str(error) or type(error).__name__)
    if world_size > 1:
        dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    value: Made = made[0]
    return value


def hosts_in_turn(make: Callable[[], Made]) -> Made:
    """Return what ``make`` returns on each rank (collective).

    One rank of each host is first: the others find the files that it has made.
    """
    (rank, _), hosts = this_rank(), gather(this_host().boot_id)
    is_first = hosts.index(hosts[rank]) == rank
    with handshake.patience():
        made = handshake.together(dist.group.WORLD, lambda: [make()] if is_first else [])
        made = handshake.together(dist.group.WORLD, lambda: made or [make()])
    return made[0]


class Stopped(Exception):
    """A rank is asked to stop; raised on all ranks at the same place."""


class StopRequest:
    """Context manager: SIGTERM and Ctrl-C become a request that the ranks agree on; outside, they end the process.

    Every step sums this request over the ranks along with its loss, and ``agreed`` looks at the sum of a step that is
    over: the same one on every rank. A supervisor also sends SIGTERM when a rank has died. No step can end then, so a
    thread, which runs while the main one waits, ends this process if a rank of its host is gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.told = False  # whether this process has got the signal
        self._device, self._on_gpu = device, device.type == "cuda"
        self._sums: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def agreed(self, total: Tensor) -> bool:
        """Whether all ranks stop; ``total`` of them had got a signal when they began the step. Ask after each step."""
        if not self._on_gpu:
            return bool(total)
        event = torch.cuda.Event()
        self._sums.append((torch.empty((), pin_memory=True).copy_(total, non_blocking=True), event))
        event.record()
        if len(self._sums) <= LAG:
            return False
        earlier, ready = self._sums.popleft()
        ready.synchronize()
        return bool(earlier)

    def check(self) -> None:
        """Raise ``Stopped`` on all ranks if one has got a signal (collective)."""
        if largest([float(self.told)], self._device, dist.group.WORLD)[0]:
            raise Stopped

    def __enter__(self) -> StopRequest:
        """Listen to signals that are not ignored, on the main thread, which alone may (collective)."""
        namespace = os.readlink(PID_NAMESPACE) if PID_NAMESPACE.exists() else ""
        mine = (this_host().boot_id, namespace, os.getpid())
        peers = [pid for host, space, pid in gather(mine) if (host, space) == mine[:2] and pid != mine[2]]
        on_main_thread = threading.current_thread() is threading.main_thread()
        heeded = [number for number in STOPPING if on_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
        self._undo = ExitStack()  # undoes the last first
        if not heeded:
            return self
        over, (reader, writer) = threading.Event(), os.pipe()
        os.set_blocking(writer, False)
        watcher = threading.Thread(target=self._watch, args=(reader, heeded, peers, over), daemon=True)
        watcher.start()
        self._undo.callback(os.close, reader)
        self._undo.callback(watcher.join)
        self._undo.callback(os.close, writer)  # This wakes the thread.
        self._undo.callback(over.set)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in heeded:
            self._undo.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told and number == signal.SIGINT:  # A second Ctrl-C does not wait for the checkpoint.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.told = True

    def _watch(self, reader: int, heeded: Sequence[int], peers: Sequence[int], over: threading.Event) -> None:
        while byte := os.read(reader, 1):
            while byte[0] in heeded and not over.is_set():
                if not all(map(psutil.pid_exists, peers)):
                    # The default; Python's own function is for the main thread, which may be waiting for the dead.
                    ctypes.CDLL(None).signal(byte[0], None)
                    os.kill(os.getpid(), byte[0])
                over.wait(POLL_S)
