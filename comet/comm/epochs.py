"""The epoch that orders the use of symmetric memory: when it has grown too large, and how it starts anew.

Signals carry the epoch and are never reset, and kernels wait until what they see is at least the epoch they expect, in
32 bits with a sign. Past 2^31 calls of all layers together a wait would be over at once, whoever is late. Half of that
is the limit here: between the host's looks at it there may be a billion calls.

Why it may start anew: once all ranks, and all streams of each, have met, nobody waits for a signal and nobody sends
one. So each zeroes the signals that lie in its own memory, and when all have met again they expect what they did first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from comet.comm.base import Communicator
from comet.errors import EpochError

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


def restart_epoch(comm: Communicator, epoch: Tensor, signals: Iterable[Tensor]) -> None:
    """Zero an epoch and the signals that carry it (collective); waits for the device.

    Args:
        comm: The ranks.
        epoch: ``(1,)`` int32 on the device.
        signals: This rank's copies, all of those that are compared with this epoch.

    Raises:
        CommTimeoutError: If a rank did not come in time.
    """
    _meet(comm)
    for numbers in (epoch, *signals):
        numbers.zero_()
    _meet(comm)


def _meet(comm: Communicator) -> None:
    """Return when every rank is here, its streams idle; on a GPU the second barrier says if the first was late."""
    for _ in range(2):
        settle(comm.device)
        comm.barrier()
    settle(comm.device)


def settle(device: torch.device) -> None:
    """Wait for all streams of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
