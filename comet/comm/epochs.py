"""The epoch that orders the use of symmetric memory: when it has grown too large.

Signals carry the epoch and are never reset, and kernels wait until what they see is at least the epoch they expect, in
32 bits with a sign. Past 2^31 calls of all layers together a wait would be over at once, whoever is late. Half of that
is the limit here: between the host's looks at it there may be a billion calls. ``CommunicatorBase.restart`` starts it
anew.
"""

from __future__ import annotations

from torch import Tensor

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
