"""The nodes of a job: ranks that reach each other's memory, on one host or on hosts that NVLink joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.comm.fabric import domains_of
from comet.comm.handshake import gather, this_host


@dataclass(frozen=True, slots=True)
class Node:
    """Ranks of the job that reach each other's memory."""

    host: str  # name of its host, or names of the hosts of an NVLink domain
    number: int | None  # of a declared node
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{ranks_in_words(self.ranks)} on {self.host}" + (
            "" if self.number is None else f" (node {self.number})"
        )


def nodes_of(group: ProcessGroup, node_size: int | None, device: torch.device) -> list[Node]:
    """The nodes that the ranks of a group run on, in the order of their first ranks (collective).

    Args:
        node_size: Consecutive ranks of the job that are a node; ``None``: the ranks of a host, or of hosts that NVLink
            joins.

    Example: of four ranks on one host with ``node_size=2``: "ranks 0 to 1 on host-a (node 0)" and "ranks 2 to 3 on
    host-a (node 1)". Two hosts that NVLink joins are one node: "ranks 0 to 3 on host-a, host-b".
    """
    names: dict[tuple[int, int | None], list[str]] = {}
    ranks_of: dict[tuple[int, int | None], list[int]] = {}
    hosts = gather(group, this_host())
    boot_ids = [host.boot_id for host in hosts]
    domains = [boot_ids.index(boot_id) for boot_id in boot_ids]
    if len(set(domains)) > 1 and device.type == "cuda":
        of_ranks = domains_of(group, device)
        of_host = {
            first: {each for each, host in zip(of_ranks, domains, strict=True) if host == first} for first in domains
        }
        domains = [min(of_host[first]) if len(of_host[first]) == 1 else first for first in domains]
    for rank, host, domain in zip(dist.get_process_group_ranks(group), hosts, domains, strict=True):
        key = (domain, None if node_size is None else rank // node_size)
        ranks_of.setdefault(key, []).append(rank)
        of_node = names.setdefault(key, [])
        of_node += [host.name] if host.name not in of_node else []
    return [Node(", ".join(names[key]), key[1], tuple(ranks)) for key, ranks in ranks_of.items()]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 7``, or ``ranks 0, 2`` where they do not follow each other."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
