"""A rank that met its deadline goes on until its host asks: the others shall miss it, not take what it has for results.

Rank 1 does one step of the first of two calls only when rank 0 has waited for it in vain and done all that is left of
both calls. So what rank 1 waits for later is there or never comes, and no result depends on who is quick.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, check_call, results
from ranks import run_ranks

from comet.config import MoEConfig, ParallelConfig
from comet.layer.group import make_expert_group
from comet.layer.routed_experts import SymmetricPath
from comet.layer.workspace import Workspace
from comet.moe import MoE
from comet.tuner import layers as measure
from comet.tuner.layers import recover

DEADLINE_S = 0.02
FLAGS = ("ids_flags", "recv_flags", "combine_flags", "barrier_flags")
FORWARD, BACKWARD, NEXT_FORWARD = range(3)  # the calls that are checked, in turn

# Step that rank 1 is late in; when rank 0 hears of it and where it waited; the same of rank 1; flags of rank 0.
STEPS: dict[str, tuple[int, str, int, str, list[int]]] = {
    "plan": (FORWARD, "exchange of top-k ids", FORWARD, "layer 0 dispatch", [1, 0, 0, 0]),
    "dispatch_gemm": (FORWARD, "layer 0 dispatch", FORWARD, "layer 1 combine", [1, 1, 0, 0]),
    "gemm_combine": (FORWARD, "layer 1 combine", BACKWARD, "barrier", [1, 1, 1, 0]),
    "barrier": (BACKWARD, "barrier", BACKWARD, "layer 0 dispatch", [1, 1, 1, 2]),
    "dispatch_dgrad": (BACKWARD, "layer 0 dispatch", BACKWARD, "layer 1 combine", [1, 2, 1, 2]),
    "dgrad_combine": (BACKWARD, "layer 1 combine", NEXT_FORWARD, "exchange of top-k ids", [1, 2, 2, 2]),
}


def run_late(rank: int, world_size: int, step: str) -> tuple[list[str], list[int]]:
    """Two calls with their backward passes; what each check said, and the flags that rank 1 saw of rank 0.

    What no check complains of is compared with the oracle.
    """
    case = LayerCase("ep2", 2, 1, (40, 40))
    moe, said, flags = build_layer(case, rank, "fused"), [], []
    make_late(step, rank, moe, flags)
    for call in range(2):
        inputs = rank_inputs(case, rank, call)
        x, weights = inputs.tokens.requires_grad_(), inputs.top_k_weights.requires_grad_()
        moe.zero_grad()
        y = moe.routed_experts(x, inputs.top_k_ids, weights)
        said.append(complaint(moe))
        if not said[-1]:
            check_call(case, rank, call, {"output": y.detach()})
        y.backward(inputs.grad_output)
        said.append(complaint(moe))
        if not said[-1]:
            found = results(moe, y, x, weights)
            check_call(case, rank, call, {name: found[name] for name in found if name != "output"})
    if rank == 0:
        dist.barrier()
    return said, flags


def make_late(step: str, rank: int, moe: MoE, flags: list[int]) -> None:
    """Both ranks meet before the first time of a step; rank 0 goes on, rank 1 when rank 0 has done everything."""
    path = moe.experts
    assert isinstance(path, SymmetricPath)
    backend = path.backend
    function: Callable[..., Any] = getattr(backend, step)

    def meet(*args: Any, **options: Any) -> Any:
        setattr(backend, step, function)
        dist.barrier()
        if rank == 1:
            dist.barrier()
            flags.extend(int(getattr(moe.group.workspace, name).local[0].max()) for name in FLAGS)
        moe.group.comm.timeout_s = DEADLINE_S
        return function(*args, **options)

    setattr(backend, step, meet)


def complaint(moe: MoE) -> str:
    """Return the failure that a check would raise, or an empty text; after a check no rank could go on."""
    return moe.group.workspace.timeout()


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_failed_is_missed_and_not_believed(step: str) -> None:
    (said, _), (replies, flags) = run_ranks(run_late, 2, step, interpret=True)
    told, place, replied, reply_place, expected = STEPS[step]
    assert said[:told] == [""] * told
    assert all(text.startswith(f"rank 0 waited 0.0 s for rank 1 ({place}, ") for text in said[told:]), said
    assert replies[:replied] == [""] * replied
    assert all(text.startswith(f"rank 1 waited 0.0 s for rank 0 ({reply_place}, ") for text in replies[replied:])
    assert flags == expected, "what rank 0 signalled"


MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=32, ffn_size=32)
LATE_S = 0.2
FAULT = [1, 4, 3, 5, 9, 8, 1, 77]


def in_epochs(rank: int, world_size: int, cases: list[tuple[tuple[int, ...], int]]) -> list[tuple[float, float]]:
    """Ranks that were in ``epochs`` recover; when this one's streams were idle, and when it went on.

    If no rank is ``late``, the fault is there before; else a kernel of that rank leaves it, and takes its epoch, while
    the host waits for it.
    """
    times = []
    for epochs, late in cases:
        parallel = ParallelConfig(ep=world_size)
        group = make_expert_group(MOE, parallel, max_tokens=8, dtype=torch.float32, device="cpu")
        workspace, idle = group.workspace, []

        def settle(device: torch.device, workspace=workspace, idle=idle, epochs=epochs, late=late) -> None:
            if rank == late:
                time.sleep(LATE_S)
                fail(workspace, epochs[rank])
            idle.append(time.monotonic())

        measure.settle = settle
        if rank != late:
            fail(workspace, epochs[rank])
        recover(workspace, dist.group.WORLD if world_size > 1 else None)
        times.append((idle[-1], time.monotonic()))
        workspace.check()
        group.close()
        assert (int(workspace.epoch), workspace.fault.tolist()) == (0, [0] * 8)
    return times


def fail(workspace: Workspace, epoch: int) -> None:
    workspace.epoch.fill_(epoch)
    workspace.fault.copy_(torch.tensor(FAULT))


@pytest.mark.parametrize("cases", [[((7, 9), -1), ((7, 9), 0), ((9, 7), 0), ((0, 0), 1)], [((5,), 0)]])
def test_ranks_recover_only_when_the_streams_of_all_are_idle(cases: list[tuple[tuple[int, ...], int]]) -> None:
    for of_ranks in zip(*run_ranks(in_epochs, len(cases[0][0]), cases), strict=True):
        last_idle = max(idle for idle, _ in of_ranks)
        assert all(end >= last_idle for _, end in of_ranks), "a rank went on while kernels of another ran"
