"""What each rank does in a batch of the stress tool: pool after pool, case after case, all in one process."""

from __future__ import annotations

import faulthandler
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from layer_cases import assert_as_close, full_weights, shard
from layer_ranks import poison
from stress_cases import CASES_PER_POOL, Stress, StressCase, expected, stress_inputs
from torch import Tensor

from comet.group import ExpertGroup, make_expert_group
from comet.moe import MoE

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What was wrong with the last case of a batch that ran, nothing if all are right, and the case after it."""

    wrong: list[str]
    stop: int


def run_batch(rank: int, world_size: int, stress: Stress, indices: range, journal: Path) -> Outcome:
    """Run the cases ``indices`` up to the first that fails; the file ``journal``.rank holds the one at work.

    Wrong numbers are returned; whatever else goes wrong ends the rank.
    """
    device = torch.device(stress.device, rank if stress.device == "cuda" else None)
    torch.use_deterministic_algorithms(device.type == "cpu")
    outcome = Outcome([], indices.stop)
    for pool, members in groupby(indices, key=lambda index: index // CASES_PER_POOL):
        cases = list(members)
        begin(cases[0], rank, journal, stress)
        group = join_pool(stress, pool, device)
        for index in cases:
            begin(index, rank, journal, stress)
            case = stress.case(index)
            wrong = wrong_results(case, rank, run_case(rank, case, group, stress))
            if any_rank(bool(wrong)):
                outcome = Outcome(wrong, index + 1)
                break
        leave_pool(group)
        if outcome.stop < indices.stop:
            break
    faulthandler.cancel_dump_traceback_later()
    return outcome


def any_rank(here: bool) -> bool:
    """Whether it is so on some rank."""
    everywhere: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return any(everywhere)


def begin(index: int, rank: int, journal: Path, stress: Stress) -> None:
    """Note the case at work, and give it its time: past that the rank ends, with its stacks in the log."""
    journal.with_suffix(f".{rank}").write_text(str(index))
    faulthandler.dump_traceback_later(stress.case_limit_s, exit=True)


def join_pool(stress: Stress, pool: int, device: torch.device) -> ExpertGroup:
    """One workspace for several layers."""
    case = stress.pool_case(pool)
    return make_expert_group(
        case.config,
        case.parallel,
        max_tokens=case.max_tokens,
        dtype=case.dtype,
        device=device,
        timeout_s=stress.timeout_s,
    )


def leave_pool(group: ExpertGroup) -> None:
    """Give memory and process groups back: a batch joins many pools."""
    group.close()
    for process_group in (group.process_group, group.expert_data_group):
        if process_group is not None:
            dist.destroy_process_group(process_group)


def run_case(rank: int, case: StressCase, group: ExpertGroup, stress: Stress) -> list[Results]:
    """Every call of a case; ranks meet before the first one only."""
    moe = MoE(case.config, group, path=stress.path, overlap=case.overlap, param_dtype=case.dtype)
    with torch.no_grad():
        for parameter, weight in zip(moe.expert_parameters(), shard(case, rank, *full_weights(case)), strict=True):
            parameter.copy_(weight)
    poison(group)
    sleeper = Random(f"{case.seed} delays of rank {rank}")
    results = []
    for number in case.inputs:
        results.append(run_call(moe, case, rank, number, sleeper))
        group.workspace.check()
    return results


def run_call(moe: MoE, case: StressCase, rank: int, number: int, sleeper: Random) -> Results:
    """Forward, and backward if the case has one, with pauses before each."""
    inputs, device = stress_inputs(case, rank, number), moe.group.device
    x, ids, weights = (tensor.to(device) for tensor in (inputs.tokens, inputs.top_k_ids, inputs.top_k_weights))
    if case.strided:
        x, ids, weights = (torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (x, ids, weights))
    pause(case, device, sleeper)
    if not case.backward:
        with torch.no_grad():
            return {"output": moe.routed_experts(x, ids, weights).cpu()}
    x.requires_grad_()
    weights.requires_grad_()
    for parameter in moe.expert_parameters():
        parameter.grad = None
    y = moe.routed_experts(x, ids, weights)
    pause(case, device, sleeper)
    y.backward(inputs.grad_output.to(device))
    leaves = {"grad_tokens": x, "grad_top_k_weights": weights, "grad_w1": moe.w1, "grad_w2": moe.w2}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len(gradients) == len(leaves), f"{case.name}: only {list(gradients)} have gradients"
    return {"output": y.detach().cpu(), **{name: gradient.cpu() for name, gradient in gradients.items()}}


def pause(case: StressCase, device: torch.device, sleeper: Random) -> None:
    """Hold up the host, and on a GPU the stream, each by a random time."""
    if case.delay_s:
        time.sleep(sleeper.random() * case.delay_s)
        if device.type == "cuda":
            torch.cuda._sleep(int(sleeper.random() * case.delay_s * 1e9))


def wrong_results(case: StressCase, rank: int, results: list[Results]) -> list[str]:
    """What differs from the oracle, or between two calls with the same inputs."""
    wrong, first_calls = [], {}
    for call, (number, found) in enumerate(zip(case.inputs, results, strict=True)):
        where = f"rank {rank}, call {call}"
        if number in first_calls:
            earlier = first_calls[number]
            wrong += [
                f"{where}: {name} has other bits than in an earlier call with the same inputs"
                for name, tensor in found.items()
                if not torch.equal(tensor, earlier[name])
            ]
            continue
        first_calls[number] = found
        exact, same = (expected(case, number, dtype) for dtype in (torch.float64, case.dtype))
        for name, tensor in found.items():
            # All ranks' elements tell how far plain torch is off; over the few of one rank that would be luck.
            parts = [tensor if other == rank else part for other, part in enumerate(exact[name])]
            try:
                assert_as_close(*map(joined, (parts, exact[name], same[name])), case.dtype, f"{where}: {name}")
            except AssertionError as error:
                wrong.append(str(error))
    return wrong


def joined(parts: list[Tensor]) -> Tensor:
    """All ranks' tensors as one vector, in float64."""
    return torch.cat([part.flatten().double() for part in parts])
