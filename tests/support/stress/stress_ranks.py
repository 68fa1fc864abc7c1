"""What each rank does in a batch of the stress tool: family after family, case after case, all in one process."""

from __future__ import annotations

import faulthandler
import os
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Self

import torch
import torch.distributed as dist
from fp8_cases import compare
from gpus import gpu_of
from kinds import grad_hidden_in, layer0_in, layer1_in, weights_in
from layer_cases import RankInputs, assert_as_close, shard
from stress_cases import LAYERS, Stress, StressCase
from stress_numbers import (
    FullWeights,
    expected,
    gradient,
    gradient_units,
    stress_inputs,
    wrong_gradient,
)
from torch import Tensor

from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import make_path
from comet.moe import MoE
from comet.quantization.formats import FP8, quantize_fp8

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What was wrong with the last case of a batch that ran, nothing if all are right, and the case after it."""

    wrong: list[str]
    stop: int


class Journal:
    """Tells the parent which case a rank is at; a case that takes too long ends it, with its stacks in the log."""

    def __init__(self, path: Path, rank: int, case_limit_s: float) -> None:
        self.file = os.open(path.with_suffix(f".{rank}"), os.O_WRONLY | os.O_CREAT)
        self.case_limit_s = case_limit_s

    def begin(self, index: int) -> None:
        os.pwrite(self.file, f"{index:<20}".encode(), 0)
        faulthandler.dump_traceback_later(self.case_limit_s, exit=True)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self.file)


@dataclass(frozen=True)
class Family:
    """The layers of a family on the pool they share, as one rank has them."""

    group: ExpertGroup
    layers: list[tuple[MoE, FullWeights]]

    @classmethod
    def join(cls, stress: Stress, family: int, device: torch.device) -> Self:
        pool = stress.family_case(family)
        group = make_expert_group(
            pool.config,
            pool.parallel,
            max_tokens=pool.max_tokens,
            dtype=pool.dtype,
            device=device,
            timeout_s=stress.timeout_s,
        )
        layers = [make_layer(stress.layer_case(family, layer), stress.path, group) for layer in range(LAYERS)]
        return cls(group, layers)

    def leave(self) -> None:
        """Give memory and process groups back: a batch joins many families."""
        self.group.close()


def make_layer(layer: StressCase, path: str, group: ExpertGroup) -> tuple[MoE, FullWeights]:
    moe = MoE(layer.config, group, path=path, overlap=layer.overlap, param_dtype=layer.dtype)
    weights = FullWeights.draw(layer, group.device)
    with torch.no_grad():
        mine = shard(layer, group.rank, weights.w1, weights.w2)
        for part, weight in zip(moe.expert_weights(), mine, strict=True):
            part.copy_(weight)
    return moe, weights


def run_batch(rank: int, world_size: int, stress: Stress, indices: range, journal: Path) -> Outcome:
    """Run the cases ``indices`` up to the first that fails, or until time is up; ``journal`` tells the one at work.

    Wrong numbers are returned; whatever else goes wrong ends the rank.
    """
    device = torch.device(gpu_of(rank) if stress.device == "cuda" else stress.device)
    torch.use_deterministic_algorithms(device.type == "cpu")
    notes = Journal(journal, rank, stress.case_limit_s)
    layer0, layer1 = stress.layer0, stress.layer1
    with layer0_in(layer0), grad_hidden_in(layer0), layer1_in(layer1), weights_in(layer1):
        outcome = run_families(rank, stress, indices, device, notes)
    notes.close()
    return outcome


def run_families(rank: int, stress: Stress, indices: range, device: torch.device, notes: Journal) -> Outcome:
    outcome = Outcome([], indices.stop)
    for number, members in groupby(indices, key=stress.family_of):
        cases = list(members)
        notes.begin(cases[0])
        family = Family.join(stress, number, device)
        for index in cases:
            notes.begin(index)
            wrong = check_case(stress.case(index), rank, family, stress.path)
            if any_rank(bool(wrong) or time.time() > stress.until):
                outcome = Outcome(wrong, index + 1)
                break
        family.leave()
        if outcome.stop < indices.stop:
            break
    return outcome


def any_rank(here: bool) -> bool:
    anywhere = torch.tensor([here], dtype=torch.int32)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    return bool(anywhere)


def check_case(case: StressCase, rank: int, family: Family, path: str) -> list[str]:
    (moe, weights), group = family.layers[case.layer], family.group
    moe.experts = make_path(path, case.config, group, case.overlap)
    of_ranks = {
        number: [stress_inputs(case, source, number, group.device) for source in range(case.world_size)]
        for number in set(case.inputs)
    }
    sleeper = Random(f"{case.seed} delays of rank {rank}")
    in_fp8 = quantised(*moe.expert_weights()) if case.fp8 else None  # which waits for the GPU, unlike a call
    results = [run_call(moe, case, of_ranks[number][rank], sleeper, in_fp8) for number in case.inputs]
    group.workspace.check()
    return wrong_results(case, rank, results, of_ranks, weights)


def quantised(w1: Tensor, w2: Tensor) -> tuple[FP8, FP8]:
    """``(e, 2, F/TP, D)`` and ``(e, D, F/TP)`` in block FP8."""
    return quantize_fp8(w1.flatten(1, 2)), quantize_fp8(w2)


def run_call(
    moe: MoE, case: StressCase, inputs: RankInputs, sleeper: Random, in_fp8: tuple[FP8, FP8] | None
) -> Results:
    """Forward, and backward if the case has one, with pauses before each; through weights ``in_fp8`` if given."""
    x, ids, weights = inputs.tokens.clone(), inputs.top_k_ids, inputs.top_k_weights.clone()
    if case.strided:
        x, ids, weights = (torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (x, ids, weights))
    pause(case, moe.group.device, sleeper)
    poison_received(moe.group)
    if in_fp8 is not None:
        return {"output": moe.experts.fp8(x, ids, weights, *in_fp8)}
    if not case.backward:
        with torch.no_grad():
            return {"output": moe.routed_experts(x, ids, weights)}
    x.requires_grad_()
    weights.requires_grad_()
    for parameter in moe.expert_parameters():
        parameter.grad = None
    y = moe.routed_experts(x, ids, weights)
    pause(case, moe.group.device, sleeper)
    poison_received(moe.group)
    y.backward(inputs.grad_output)
    leaves = {"grad_tokens": x, "grad_top_k_weights": weights, "grad_w1": moe.w1, "grad_w2": moe.w2}
    return {"output": y.detach(), **{name: gradient(leaf) for name, leaf in leaves.items()}}


def poison_received(group: ExpertGroup) -> None:
    """Fill where rows land with NaN, in stream order: what is read unwritten, or too early, shows in the result.

    No rank need wait: the others write to this one only after it has sent ids, or come to the barrier of a backward.
    """
    for received in (group.workspace.recv_rows, group.workspace.combine_rows, group.workspace.combine_grads):
        received.local.fill_(float("nan"))


def pause(case: StressCase, device: torch.device, sleeper: Random) -> None:
    """Hold up the host, and on a GPU the stream, each by a random time, half of the times at all."""
    if case.delay_s and sleeper.random() < 0.5:
        time.sleep(sleeper.random() * case.delay_s)
        if device.type == "cuda":
            torch.cuda._sleep(int(sleeper.random() * case.delay_s * 1e9))


def wrong_results(
    case: StressCase,
    rank: int,
    results: list[Results],
    of_ranks: dict[int, list[RankInputs]],
    weights: FullWeights,
) -> list[str]:
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
        if case.fp8:
            shards = [quantised(*shard(case, holder, weights.w1, weights.w2)) for holder in range(case.world_size)]
            inputs = of_ranks[number][rank]
            try:
                compare(case, inputs, inputs.top_k_ids, shards, found["output"], f"{where}: output")
            except AssertionError as error:
                wrong.append(str(error))
            continue
        exact, same = (expected(case, of_ranks[number], weights, dtype) for dtype in (torch.float64, case.dtype))
        units = gradient_units(case, of_ranks[number], weights, rank) if case.backward else {}
        for name, unit in units.items():
            complaints = wrong_gradient(found[name], exact[name][rank], unit)
            wrong += [f"{where}: {name}: {complaint}" for complaint in complaints]
        for name in ("output", "grad_tokens") if case.backward else ("output",):
            # All ranks' elements tell how far plain torch is off; over the few of one rank that would be luck.
            parts = [found[name] if other == rank else part for other, part in enumerate(exact[name])]
            try:
                assert_as_close(*map(joined, (parts, exact[name], same[name])), case.dtype, f"{where}: {name}")
            except AssertionError as error:
                wrong.append(str(error))
    return wrong


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten().double() for part in parts])
