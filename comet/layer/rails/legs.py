"""Memory between nodes: all legs of a group's rails by kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from comet.comm.link import Link
from comet.kernels.network.legs import Leg
from comet.kernels.runtime.faults import Place
from comet.layer.workspace import Workspace, leg_regions


class Legs(NamedTuple):
    """The legs of all layers of a group."""

    out: Leg
    home: Leg
    room: Leg | None  # for words that a receiver has room for guests; None where all slots have memory
    ranks: Tensor | None  # rail peers' numbers in NVSHMEM; None where their memory is mapped


def make_legs(link: Link, workspace: Workspace, inner_fault: Tensor, peers: tuple[int, ...], node: int) -> Legs:
    """Allocate all legs (collective over the ranks of all nodes).

    Args:
        inner_fault: Fault of the workspace inside this node.
        peers: Rail peers' numbers in the group, one of each node.
    """
    workspace.rail_peers = peers
    regions = link.alloc(leg_regions(workspace.shape, len(peers)))
    epoch = torch.zeros(1, dtype=torch.int32, device=workspace.comm.device)
    shared: dict[str, Any] = dict(
        epoch=epoch, fault=workspace.fault, inner_fault=inner_fault, node=node, timeout_ns=workspace.timeout_ns
    )

    def leg(name: str, place: Place) -> Leg:
        words, flags = regions[f"{name}_words"], regions[f"{name}_flags"]
        rows = regions.get(f"{name}_rows", words)
        workspace.comm.renew_at_restart(epoch, workspace.fault, [flags.local])
        return Leg(
            words=words.local, rows=rows.local, flags=flags.local,
            word_targets=words.targets, row_targets=rows.targets, flag_targets=flags.targets, place=place, **shared,
        )  # fmt: skip

    room = leg("room", Place.ROOM) if "room_words" in regions else None
    return Legs(out=leg("out", Place.GUESTS), home=leg("home", Place.SUMS), room=room, ranks=link.ranks)
