"""Layer 1's backward up to hidden: dispatch || grouped GEMM.

Dispatch, the copy of rows that w2's gradient needs, and a GEMM over the copy, one after the other; or, as layer 0, one
kernel in CUDA C++, and the copy after it (see ``runs_fc2_dgrad``).
"""

from dataclasses import dataclass, replace

from torch import Tensor

from ...gemm.gather_rows import OwnRows, gather_rows
from ...gemm.group_gemm import GemmConfig, group_gemm
from ...runtime.arguments import TileTable, Wire
from ..dispatch_gemm import fc2_dgrad_cuda, runs_fc2_dgrad
from .dispatch import DispatchConfig, Sends, dispatch


@dataclass(frozen=True, kw_only=True, slots=True)
class GradHiddenConfig:
    """How rows move and are multiplied.

    Args:
        dispatch: Of the dispatch alone.
        gemm: Of the GEMM alone.
        colocated: Let warps beside those that compute push rows, on every SM, where that kernel runs.
    """

    dispatch: DispatchConfig
    gemm: GemmConfig
    colocated: bool = True


def grad_hidden(
    grad_y: Tensor,
    w2: Tensor,
    grads: Tensor,
    out: Tensor,
    wire: Wire,
    sends: Sends,
    table: TileTable,
    phase_tiles: Tensor,
    config: GradHiddenConfig,
) -> None:
    """Send this rank's gradients, receive the others', and multiply those of all routed rows by their expert's w2.

    Args:
        grad_y: ``(T, D)`` gradients of this rank's outputs.
        w2: ``(e, D, F)``, same dtype.
        grads: ``(Q, D)`` receives the gradient of each routed row.
        out: ``(Q, F)`` receives it times w2, rounded once; rows of no tile are undefined in both results.
        wire: Receive rows and flags.
        sends: Send lists.
        table: Tiles by expert, and the received row of each routed row.
        phase_tiles: ``(max_tiles, 4)`` the same tiles by phase.
        config: How.
    """
    if config.colocated and runs_fc2_dgrad(w2, wire, table):
        fc2_dgrad_cuda(grad_y, w2, out, wire, sends, replace(table, tiles=phase_tiles))
        own = OwnRows(rows=grad_y, first=wire.rank * wire.max_tokens)
        gather_rows(wire.rows, grads, table.row_ids, table, own)
        return
    dispatch(grad_y, wire, sends, table.counters, config.dispatch)
    gather_rows(wire.rows, grads, table.row_ids, table)
    group_gemm(grads, w2, out, table, gather=False, layout="kn", config=config.gemm)
