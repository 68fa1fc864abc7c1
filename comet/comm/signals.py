"""Signals between ranks through memory the CPU can see: the host-side twin of ``comet.kernels.runtime.primitives``.

Memory order. Writer: payload stores, then ``signal``. Reader: ``wait``, then read. Both put a fence between payload
and flag, so the order also holds on CPUs that reorder stores. Flags carry the epoch, a number that only grows, so
nothing is ever reset. Every wait has a deadline.

Kernels wait until a flag is at least the epoch that they expect, in signed 32 bits. Past 2^31 calls of all layers
together a wait would end at once, although ranks are late. The limit here is half of that, since a billion calls may
come between two checks by the host. ``Communicator.restart`` sets the epoch back to zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from comet.errors import CommTimeoutError, EpochError

YIELDS = 50  # polls that only give up the core, before the first real sleep
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3


def signal(flags: Tensor, index: int, value: int) -> None:
    """Store ``value``, larger than earlier ones, in a flag in CPU memory after every earlier store of this thread."""
    view = flags.view(-1).numpy()
    fence()
    view[index] = value


def wait(
    flags: Tensor,
    index: int,
    value: int,
    *,
    rank: int,
    peer: int,
    place: str,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Poll one flag until it holds at least ``value``; what the signalling rank stored before is then visible.

    Args:
        place: Where ``rank`` waits for ``peer``, for the message: ``layer 0 dispatch, chunk 17``.
        check: Called at every poll; raises if the wait is in vain, as the group's ``board.check`` does.

    Raises:
        CommTimeoutError: When the deadline passes, for example
            ``rank 2 waited 30.0 s for rank 0 (layer 0 dispatch, chunk 17, epoch 41, saw 40)``.
    """
    view = flags.view(-1).numpy()

    def arrived() -> bool:
        if view[index] >= value:
            return True
        check()
        return False

    if not poll(arrived, timeout_s):
        raise CommTimeoutError(waited(rank, peer, place, timeout_s, value, int(view[index])))
    fence()


def waited(rank: int, peer: int, place: str, timeout_s: float, epoch: int, seen: int) -> str:
    """Return the message for a wait that met its deadline.

    Example: ``waited(1, 0, "panel 3", 2, 5, 4)`` is ``"rank 1 waited 2.0 s for rank 0 (panel 3, epoch 5, saw 4)"``.
    """
    return f"rank {rank} waited {timeout_s:.1f} s for rank {peer} ({place}, epoch {epoch}, saw {seen})"


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Call ``done`` until it is true (return ``True``) or ``timeout_s`` seconds passed (return ``False``).

    Sleeps ever longer between the calls, so that several ranks can share a core.
    """
    deadline = time.monotonic() + timeout_s
    polls, pause = 0, FIRST_SLEEP_S
    while not done():
        if time.monotonic() > deadline:
            return bool(done())  # this thread may itself have been held up past the deadline
        if polls < YIELDS:
            time.sleep(0)
        else:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP_S)
        polls += 1
    return True


def fence() -> None:
    """Order this thread's earlier memory accesses before its later ones.

    Nothing moves down past a lock's release or up past a lock's acquire, and no acquire overtakes an earlier release.
    """
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        pass


MOST_EPOCHS = 2**30


def check_epoch(epoch: Tensor, rank: int) -> None:
    """Raise ``EpochError`` where the epoch, ``(1,)`` int32, has grown past 2^30; waits for the device.

    Example: 1073741824 is 2^30 and passes, 1073741825 does not.
    """
    number = int(epoch)
    if number > MOST_EPOCHS:
        raise EpochError(
            f"epoch={number} of rank {rank} must be at most {MOST_EPOCHS}, because signals compare 32 bits: call "
            "restart() where this check() was called, on all ranks and between two calls"
        )
