"""What measuring does after a call that failed: the ranks make the group as good as new, and go on with other settings.

For a layer in use a fault is final where a collective broke off, and a restart is its user's to ask for. Where the
ranks meet over a process group after each failure, they come back into step whatever it was.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from comet.comm.lifecycle import settle
from comet.tuner.timing import rank_barrier
from comet.workspace import Workspace


def recover(workspace: Workspace, process_group: ProcessGroup | None) -> None:
    """Forget what failed, and restart all that uses the group's communicator (collective); waits for the device.

    The order counts where ranks differ. A kernel that waits for a failed rank leaves its fault, and may advance the
    epoch, only when it has met its deadline: on each rank all streams end before either is looked at. No note is taken
    away before that is so on all ranks: none leaves another one.

    Args:
        workspace: The pool.
        process_group: The ranks; ``None`` is a rank alone.
    """
    comm = workspace.comm
    meet = rank_barrier(comm.device, process_group)
    settle(comm.device)
    meet()
    settle(comm.device)
    comm.board.clear()
    comm.restart()
    workspace.fault.zero_()
    meet()  # also where ranks of several hosts have no board together
