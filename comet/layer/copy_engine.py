"""Dispatch by copy engines: all rows of this rank to every other rank, without a thread block (transport ``copy``).

Row t of rank s arrives as row ``s*M + t`` of every rank, one contiguous copy per rank, down the ring: every rank
receives from one source at a time, in the order in which its phases need them. A rank's rows are one copy, not several:
a tile gathers tokens from all over a source, so an earlier flag for the first of them would start next to nothing.

Why the flags are copies, too. They have to follow the rows in stream order, carry the epoch, which a replayed CUDA
graph finds on the device, and must not need a multiprocessor: layer 0's compute blocks take all registers of all of
them and spin on flags that other ranks raise the same way, so a kernel behind the copies might start on no rank. A
stream's own memory operation would have its value fixed when the graph is captured.

Why the copies are launched before layer 0, although layer 0 could be launched first and wait for them: it would wait
for the host, which can be held up by something that waits for the device (an allocation, another thread), and that on
all ranks at the same time. Behind the plan copies wait for nobody. They start when their rank has seen the ids of all
ranks, as pushes would, and end before its stream leaves layer 0; so ``comet.layer.workspace``'s argument holds, why no
row is overwritten that is still read. A rank may leave a layer before rows have arrived that it computes nothing from:
these are written where only their source writes, in its order, and nobody reads them before the flag of a later epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from comet.comm.signals import signal
from comet.layer.plan import Plan
from comet.layer.workspace import Workspace
from comet.layout import CHUNK_ROWS
from comet.utils.streams import SideStream


def start_copies(x: Tensor, plan: Plan, workspace: Workspace, stream: SideStream) -> Callable[[], None]:
    """Launch the copies of ``x`` to all other ranks beside what the caller launches next.

    Args:
        x: ``(T, D)`` this rank's tokens, contiguous, of the pool's type.
        plan: Of this call; its ids have been exchanged.
        workspace: The pool: rows go to ``recv_rows``, the epoch to ``recv_flags``, per 128 tokens.
        stream: Where the copies run.

    Returns:
        To be called once: makes the caller's stream wait for this rank's copies.
    """
    # On the caller's stream: behind it, this kernel could find all multiprocessors taken.
    epochs = workspace.epoch.expand(-(-x.shape[0] // CHUNK_ROWS)).contiguous()
    copied = stream.start(partial(copy_rows, plan=plan, workspace=workspace), x, epochs)
    return partial(_join, copied, x, epochs)


def _join(copied: Callable[[], None], *_inputs: Tensor) -> None:
    """Join the copies and only then let go of their inputs, whose memory might become another tensor's before."""
    copied()


def copy_rows(x: Tensor, epochs: Tensor, plan: Plan, workspace: Workspace) -> None:
    """Copy ``x (T, D)``, then its flags, to one rank after the other.

    Args:
        x: As for ``start_copies``.
        epochs: ``(C,)`` int32, the epoch for each of the C chunks of ``x``.
        plan: As for ``start_copies``.
        workspace: As for ``start_copies``.
    """
    rank, num_ranks = plan.layout.rank, plan.layout.world_size
    landing, flags = workspace.recv_rows.with_columns(x.shape[1]), workspace.recv_flags
    rows = slice(rank * plan.max_tokens, rank * plan.max_tokens + x.shape[0])
    if not x.shape[0]:
        return
    for hop in range(1, num_ranks):
        target = (rank - hop) % num_ranks
        landing.peers[target][rows].copy_(x, non_blocking=True)
        _raise_flags(flags.peers[target], rank, epochs)


def _raise_flags(flags: Tensor, rank: int, epochs: Tensor) -> None:
    """Publish the epoch in the first flags of ``rank``'s row of ``flags (W, C)``, after all earlier copies."""
    if flags.device.type == "cuda":
        flags[rank, : epochs.numel()].copy_(epochs, non_blocking=True)
        return
    for chunk, epoch in enumerate(epochs.tolist()):
        signal(flags, rank * flags.shape[1] + chunk, epoch)
