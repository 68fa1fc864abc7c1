"""A rank's part of a batch of the stress tool: family after family, case after case, all in one process."""

import faulthandler
import time
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Self

import torch
import torch.distributed as dist
from fp8_cases import compare, fp8_shard
from layer_cases import RankInputs, complaints, full_weights, oracles_of, rank_inputs, wrong_numbers
from layer_ranks import Results, make_layer, open_group, run_call
from stress_cases import LAYERS, Stress, StressCase
from torch import Tensor

import comet.layer.nodes
import comet.schedule.network
from comet.kernels.runtime.limits import CHUNK_ROWS
from comet.layer.group import ExpertGroup
from comet.layer.paths import make_path
from comet.moe import MoE
from comet.quantization.formats import FP8
from comet.schedule.choice import Problem
from comet.schedule.network import Runs, ring_slots

CASE_S = 1800.0  # a rank that spends longer on a case ends with its stacks in the log


@dataclass(frozen=True)
class Outcome:
    """Errors of the last case that ran, empty if all cases are right, and the index of the next case."""

    wrong: list[str]
    stop: int


@dataclass(frozen=True)
class Layer:
    """One rank's layer, the weights of all experts, and all ranks' weights if these are in block FP8."""

    moe: MoE
    weights: tuple[Tensor, Tensor]
    in_fp8: list[tuple[FP8, FP8]]

    @classmethod
    def make(cls, case: StressCase, rank: int, path: str, group: ExpertGroup) -> Self:
        device = group.device
        w1, w2 = (weight.to(device) for weight in full_weights(case))
        in_fp8 = [fp8_shard(case, holder, device) for holder in range(case.world_size if case.fp8 else 0)]
        return cls(make_layer(case, rank, path, group), (w1, w2), in_fp8)


def runs_by_size(problem: Problem, *_: object, joins: bool = True) -> Runs:
    """One run, few or many, by the size of the pool."""
    chunks = problem.num_tokens // CHUNK_ROWS
    if joins and chunks % 2 and ring_slots(problem.num_nodes, problem.num_tokens) == problem.num_nodes - 1:
        return Runs(0, is_split=False)
    return Runs(1 + chunks % 2, is_split=chunks > 1)


def run_batch(rank: int, world_size: int, stress: Stress, indices: range) -> Outcome:
    """Run the cases ``indices`` up to the first that fails, or until time is up, each with its command in the log.

    Wrong numbers are returned; whatever else goes wrong ends the rank.
    """
    device = torch.device(stress.device)
    comet.layer.nodes.best_runs = comet.schedule.network.best_runs = runs_by_size
    torch.use_deterministic_algorithms(device.type == "cpu")
    outcome = Outcome([], indices.stop)
    for number, members in groupby(indices, key=stress.family_of):
        cases = list(members)
        group = open_group(stress.family_case(number), device, stress.timeout_s)
        layers = [Layer.make(stress.layer_case(number, each), rank, stress.path, group) for each in range(LAYERS)]
        for index in cases:
            print(stress.command(indices.start, index), flush=True)
            faulthandler.dump_traceback_later(CASE_S, exit=True)
            case = stress.case(index)
            wrong = check_case(case, rank, layers[case.layer], stress.path)
            if any_rank(bool(wrong) or time.time() > stress.until):
                outcome = Outcome(wrong, index + 1)
                break
        group.close()  # memory and process groups: a batch joins many families
        if outcome.stop < indices.stop:
            break
    faulthandler.cancel_dump_traceback_later()
    return outcome


def any_rank(here: bool) -> bool:
    anywhere = torch.tensor([here], dtype=torch.int32)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    return bool(anywhere)


def check_case(case: StressCase, rank: int, layer: Layer, path: str) -> list[str]:
    """Return the differences from the oracle, and between two calls with the same inputs."""
    group, ranks = layer.moe.group, range(case.world_size)
    layer.moe.experts = make_path(path, case.config, group, case.overlap)
    of_ranks = {number: [rank_inputs(case, each, number, group.device) for each in ranks] for number in {*case.inputs}}
    sleeper, in_fp8 = Random(f"{case.seed} delays of rank {rank}"), layer.in_fp8[rank] if case.fp8 else None
    found = [run_call(layer.moe, case, of_ranks[number][rank], sleeper, in_fp8) for number in case.inputs]
    group.workspace.check()
    wrong: list[str] = []
    for call, number in enumerate(case.inputs):
        first, where = case.inputs.index(number), f"rank {rank}, call {call}"
        if first == call:
            wrong += wrong_results(case, rank, found[call], of_ranks[number], layer, where)
            continue
        differ = [name for name, tensor in found[call].items() if not torch.equal(tensor, found[first][name])]
        wrong += [f"{where}: {name} has other bits than in an earlier call with the same inputs" for name in differ]
    return wrong


def wrong_results(
    case: StressCase, rank: int, found: Results, inputs: list[RankInputs], layer: Layer, where: str
) -> list[str]:
    if not case.fp8:
        oracles = (oracles_of(case, inputs, layer.weights, dtype) for dtype in (torch.float64, case.dtype))
        return wrong_numbers(case, rank, found, *oracles, where)
    return complaints(compare, case, inputs[rank], layer.in_fp8, found["output"], f"{where}: output")
