"""What measuring does after a call that failed: the ranks make the pool as good as new, and go on with other settings.

For a layer in use a fault is final, because its ranks are out of step (``comet.workspace``). Where they meet over a
process group after each failure, they come back into step.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from comet.comm.lifecycle import settle
from comet.tuner.timing import max_over_ranks
from comet.workspace import Workspace


def recover(workspace: Workspace, process_group: ProcessGroup | None) -> None:
    """Forget a fault, and agree on an epoch that no flag has seen yet (collective); waits for the device.

    The order counts where ranks differ. A kernel that waits for a failed rank leaves its fault, and may advance the
    epoch, only when it has met its deadline: on each rank all streams end before either is looked at. No maximum is
    known before that is so on all ranks: who goes on meets no kernel of an earlier epoch, and need not wait again.

    Args:
        workspace: The pool.
        process_group: The ranks; ``None`` is a rank alone.

    Example: rank 0 failed in epoch 7, before rank 1 in epoch 9. Both are at 10 then, and the next call takes 11.
    """
    epoch = workspace.epoch
    settle(epoch.device)
    epoch.copy_(max_over_ranks(epoch.device, process_group)(epoch + 1))
    workspace.fault.zero_()
    workspace.comm.board.clear()
