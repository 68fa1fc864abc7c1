"""Measurements that all ranks of a group know alike, so that all of them choose the same setting."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.config import OverlapConfig
from comet.tuner.choice import Resolver
from comet.tuner.machine import Machine
from comet.tuner.profile import ProfileStore


def shared_resolver(
    folder: Path | None, device: torch.device, world_size: int, process_group: ProcessGroup | None
) -> Resolver:
    """What the layers of a group ask for their setting (collective).

    The first rank alone reads the profiles, warns of what is wrong with them and tells the others: files may differ
    from node to node. Where nothing was measured the default setting is used, not the model's: over 20 points on two
    GPUs (EP2, 512 to 8192 tokens) it took 1.4 % longer than the best measured, at worst 3.7 %, the model's choice
    7.0 %, at worst 49.9 %. Since the model was fitted to these points its choice there takes 0.9 % longer, at worst
    3.7 %; no run has measured others since.

    Args:
        folder: Of the user's profiles; ``None`` reads those shipped with Comet only.
        device: This rank's device.
        world_size: Ranks of the group.
        process_group: The group; ``None`` for a rank alone.
    """
    machine = Machine.of(device)
    is_first = process_group is None or dist.get_rank(process_group) == 0
    found = [ProfileStore.open(folder, machine.name, world_size) if is_first else None]
    if process_group is not None and world_size > 1:
        dist.broadcast_object_list(found, group=process_group, group_src=0)
    return Resolver(found[0], machine, default=OverlapConfig(), logs=is_first)
