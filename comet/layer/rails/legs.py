"""Memory between nodes: both directions of a group's rails by kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from comet.comm.link import Link
from comet.kernels.network.legs import Leg
from comet.layer.workspace import Workspace, leg_regions


class Legs(NamedTuple):
    """Both directions, for all layers of a group."""

    out: Leg
    home: Leg
    ranks: Tensor | None  # rail peers' numbers in NVSHMEM; None where their memory is mapped


def make_legs(link: Link, workspace: Workspace, inner_fault: Tensor, peers: tuple[int, ...], node: int) -> Legs:
    """Allocate both directions (collective over the ranks of all nodes).

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
    both = []
    for name in ("out", "home"):
        words, rows, flags = (regions[f"{name}_{part}"] for part in ("words", "rows", "flags"))
        workspace.comm.renew_at_restart(epoch, workspace.fault, [flags.local])
        both.append(
            Leg(
                words=words.local, rows=rows.local, flags=flags.local,
                word_targets=words.targets, row_targets=rows.targets, flag_targets=flags.targets,
                is_home=name == "home", **shared,
            )
        )  # fmt: skip
    return Legs(out=both[0], home=both[1], ranks=link.ranks)
