"""Ranks that recover from a failed call: whatever epoch each was in, and whenever its kernels end, they agree after."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from comet.config import MoEConfig, ParallelConfig
from comet.layer.group import make_expert_group
from comet.layer.workspace import Workspace
from comet.measure import layers as measure
from comet.measure.layers import recover

MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=32, ffn_size=32)
LATE_S = 0.2
FAULT = [1, 4, 3, 5, 9, 8, 1, 77]


def in_epochs(rank: int, world_size: int, epochs: tuple[int, ...], late: int) -> tuple[int, list[int], float, float]:
    """Epoch and fault after ranks recovered that were in ``epochs``; when this one's streams were idle, and its return.

    Where nobody is ``late`` the fault is there before; else a kernel of that rank leaves it, and takes its epoch, while
    the host waits for it.
    """
    parallel = ParallelConfig(ep=world_size)
    group = make_expert_group(MOE, parallel, max_tokens=8, dtype=torch.float32, device="cpu")
    workspace, idle = group.workspace, 0.0

    def settle(device: torch.device) -> None:
        nonlocal idle
        if rank == late:
            time.sleep(LATE_S)
            fail(workspace, epochs[rank])
        idle = time.monotonic()

    measure.settle = settle
    if rank != late:
        fail(workspace, epochs[rank])
    recover(workspace, dist.group.WORLD if world_size > 1 else None)
    end = time.monotonic()
    workspace.check()
    group.close()
    return int(workspace.epoch), workspace.fault.tolist(), idle, end


def fail(workspace: Workspace, epoch: int) -> None:
    workspace.epoch.fill_(epoch)
    workspace.fault.copy_(torch.tensor(FAULT))


@pytest.mark.parametrize("late", [-1, 0, 1])
@pytest.mark.parametrize("epochs", [(7, 9), (9, 7), (0, 0), (5,)])
def test_ranks_recover_only_when_the_streams_of_all_are_idle(epochs: tuple[int, ...], late: int) -> None:
    found = run_ranks(in_epochs, len(epochs), epochs, late)
    assert [(epoch, fault) for epoch, fault, _, _ in found] == [(0, [0] * 8)] * len(epochs)
    last_idle = max(idle for _, _, idle, _ in found)
    assert all(end >= last_idle for _, _, _, end in found), "a rank went on while kernels of another ran"
