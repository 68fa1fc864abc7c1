"""Time candidates on this machine through the layer's own paths, by the protocol of ``comet.tuner.timing``.

There are two input sets: each more would be another graph to record for each candidate, and all other candidates run
between two calls of one. Fused candidates are replayed as CUDA graphs, because launching one from the host takes as
long as a small layer, whatever its setting; the plain path, which waits for the host, cannot be. On a CPU a wall clock
takes the place of events and the twin that of the kernels; only the machinery can be tried there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from comet.config import OverlapConfig, require
from comet.group import ExpertGroup
from comet.paths import ExpertPath, make_path
from comet.tuner.problem import Problem
from comet.tuner.timing import host_ahead, max_over_ranks, rank_barrier, time_interleaved
from comet.tuner.tune import Measure

NUM_INPUTS = 2

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """``NUM_INPUTS`` sets of tokens ``(T, D)``, ids and weights ``(T, K)``; one set of expert weights."""

    tokens: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    w1: Tensor
    w2: Tensor

    def run(self, path: ExpertPath, index: int) -> Tensor:
        """One layer call."""
        with torch.no_grad():
            return path(self.tokens[index], self.ids[index], self.weights[index], self.w1, self.w2)


def measure_layer(
    problem: Problem, settings: Sequence[OverlapConfig | None], group: ExpertGroup, *, rounds: int = 20, seed: int = 0
) -> Measure:
    """Time all candidates in one interleaved run under uniform routing (collective).

    Args:
        problem: Shape and tokens; must fit the group's workspace.
        settings: Candidates, equal on all ranks; ``None`` is the plain path.
        group: The ranks.
        rounds: Counted calls of each candidate.
        seed: Of inputs and weights.

    Returns:
        A function for ``comet.tuner.tune``: the median ms of a candidate, the slowest rank counting in every round; it
        raises ``RuntimeError`` with the reason for one that failed on some rank.

    Raises:
        ValueError: If ``rounds`` is below 1.
    """
    require(rounds >= 1, f"rounds={rounds} must be at least 1")
    inputs = _make_inputs(problem, group, seed)
    candidates: dict[OverlapConfig | None, list[Call]] = {}
    failures: dict[OverlapConfig | None, str] = {}
    for setting in settings:
        calls, failure = _try_setting(problem, setting, group, inputs)
        if calls is None:
            failures[setting] = failure
        else:
            candidates[setting] = calls
    timings = time_interleaved(
        {setting: partial(_call, calls) for setting, calls in candidates.items()},
        rounds=rounds,
        barrier=host_ahead(rank_barrier(group.device, group.process_group), group.device),
        rotate=NUM_INPUTS,
        device=group.device,
        slowest=max_over_ranks(group.device, group.process_group),
    )
    group.workspace.check()

    def measure(setting: OverlapConfig | None) -> float:
        if setting in failures:
            raise RuntimeError(failures[setting])
        return timings[setting].median_ms

    return measure


def _call(calls: Sequence[Call], index: int) -> None:
    calls[index]()


def _make_inputs(problem: Problem, group: ExpertGroup, seed: int) -> _Inputs:
    generator = torch.Generator(group.device).manual_seed(seed * 1_000 + group.rank)
    moe, width, local = problem.moe, problem.width, problem.experts_local
    inputs = _Inputs(
        [], [], [],
        torch.empty(local, 2 * width, moe.hidden_size, device=group.device, dtype=problem.dtype),
        torch.empty(local, moe.hidden_size, width, device=group.device, dtype=problem.dtype),
    )  # fmt: skip
    for weight in (inputs.w1, inputs.w2):
        weight.normal_(0, weight.shape[2] ** -0.5, generator=generator)
    for _ in range(NUM_INPUTS):
        tokens = torch.randn(problem.num_tokens, moe.hidden_size, generator=generator, device=group.device)
        scores = torch.rand(problem.num_tokens, moe.num_experts, generator=generator, device=group.device)
        values, ids = scores.topk(moe.top_k, dim=1)
        inputs.tokens.append(tokens.to(problem.dtype))
        inputs.ids.append(ids.int())
        inputs.weights.append(values / values.sum(1, keepdim=True))
    return inputs


def _try_setting(
    problem: Problem, setting: OverlapConfig | None, group: ExpertGroup, inputs: _Inputs
) -> tuple[list[Call] | None, str]:
    """Build a path and run it once; its call for every input set, or ``None`` and the reason if any rank failed."""
    calls: list[Call] = []
    failure = ""
    try:
        name = "plain" if setting is None else "auto"
        path = make_path(name, problem.moe, group, setting or OverlapConfig())
        inputs.run(path, 0)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.workspace.check()
        calls = [partial(inputs.run, path, index) for index in range(NUM_INPUTS)]
        if group.device.type == "cuda" and setting is not None:
            calls = _as_graphs(calls)
    except (RuntimeError, ValueError) as error:
        failure = f"{type(error).__name__}: {str(error).strip()}"
    failed = max_over_ranks(group.device, group.process_group)(torch.tensor([float(bool(failure))]))
    return (None, failure or "failed on another rank") if failed.item() else (calls, "")


def _as_graphs(calls: Sequence[Call]) -> list[Call]:
    """The same calls recorded; they share the memory of what they compute, which nobody reads."""
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in calls]
    for graph, call in zip(graphs, calls, strict=True):
        with torch.cuda.graph(graph, pool=pool):
            call()
    return [graph.replay for graph in graphs]
