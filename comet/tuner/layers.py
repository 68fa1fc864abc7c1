"""Time settings of a layer call on this machine through the layer's own paths, by the protocol of ``timing``.

There are two input sets: each more would be another graph to record for each candidate, and all other candidates run
between two calls of one. Fused candidates are replayed as CUDA graphs, because launching one from the host takes as
long as a small layer, whatever its setting. The plain path waits for the host and cannot be captured. On a CPU a wall
clock takes the place of events and the twin that of the kernels; only the machinery can be tried there.

A candidate that fails is out, whatever it leaves in the pool: all ranks recover together (``recover``), and the others
are measured without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import product
from textwrap import shorten
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.comm.base import settle
from comet.comm.handshake import gather, largest
from comet.config import MoEConfig, OverlapConfig, ParallelConfig, require
from comet.errors import StepFailedError
from comet.jobs.config import JobConfig, MeasureConfig, StepJob, activation_dtype
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup, make_expert_group, with_legs
from comet.layer.paths import make_path
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import Biases, RoutedTokens
from comet.schedule.choice import Problem, counted
from comet.schedule.network import node_tokens
from comet.schedule.table import Measured
from comet.training.ranks import RankContext
from comet.tuner.timing import Timing, Variant, capture, rank_barrier, time_interleaved


def problems_of(
    measured: MeasureConfig, job: StepJob, layouts: Sequence[ParallelConfig], device: torch.device
) -> list[Problem]:
    """Every model in every layout with every number of tokens; the job stands in for empty lists."""
    layers, models = {} if measured.models else {job.model.name: job.model.moe}, read_models()
    for name in measured.models:
        require(name in models, f"model={name!r} must be one of {', '.join(models)}")
        layers[name] = MoEConfig(**models[name]["moe"] | {"hidden_size": models[name]["hidden_size"]})
    dtype, tokens = activation_dtype(job.train.dtype, device), measured.tokens or (job.step_tokens,)
    cases = dict.fromkeys(product(layers.items(), layouts, tokens))
    return [Problem(moe, parallel, num, dtype, name) for (name, moe), parallel, num in cases]


def read_models() -> dict[str, dict[str, Any]]:
    """Fields of every ``configs/model/*.yaml``, by its name; references between fields are left as they stand."""
    folder = files("comet.configs") / "model"
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): yaml.safe_load((folder / name).read_text(encoding="utf-8")) for name in names}


def make_group(job: JobConfig, problem: Problem, context: RankContext, *, max_tokens: int = 1) -> ExpertGroup:
    """Join the ranks that measure a layer, over the job's communicator (collective); ``with_pool`` makes room."""
    return make_expert_group(
        problem.moe,
        problem.parallel,
        max_tokens=max_tokens,
        dtype=problem.dtype,
        device=context.device,
        backend=job.comm.backend,
        timeout_s=job.comm.timeout_s,
    )


def with_pool(group: ExpertGroup, problem: Problem) -> ExpertGroup:
    """The group with a pool as a layer for this many tokens has: it decides capacities and kernels (collective)."""
    room = WorkspaceShape.create(problem.moe, group.parallel.world_size, problem.num_tokens, problem.dtype)
    if group.nodes is None:
        return replace(group, workspace=Workspace(group.comm, room))
    node_size = group.parallel.world_size // group.num_nodes
    most = node_tokens(replace(problem, parallel=replace(group.parallel, node_size=node_size)))
    nodes = replace(group.nodes, inner=with_pool(group.nodes.inner, replace(problem, num_tokens=most)))
    return with_legs(replace(group, nodes=nodes, workspace=Workspace(group.comm, room, nodes.inner.workspace)))


def recover(workspace: Workspace, process_group: ProcessGroup | None) -> None:
    """Forget what failed, and restart all that uses the group's communicator (collective); waits for the device.

    The order counts where ranks differ. A kernel that waits for a failed rank leaves its fault, and may advance the
    epoch, only when it has met its deadline: on each rank all streams end before either is looked at. No note is taken
    away before that is so on all ranks: none leaves another one.
    """
    comm = workspace.comm
    meet = rank_barrier(comm.device, process_group)
    settle(comm.device)
    meet()
    settle(comm.device)
    for each in (workspace, workspace.inner):
        if each is not None:
            each.comm.board.clear()
            each.comm.restart()
            each.fault.zero_()
    meet()  # also where ranks of several hosts have no board together


NUM_INPUTS = 2
MOST_LETTERS = 300  # a compiler may say more

Setting = OverlapConfig | None  # None: the plain path
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MeasuredInputs:
    """Sets of tokens ``(T, D)`` with ids and weights ``(T, K)``, and the weights and biases of the experts."""

    routed: list[RoutedTokens]
    w1: Tensor
    w2: Tensor
    biases: Biases | None  # None: the layer has none

    def run(self, path: ExpertPath, index: int) -> Tensor:
        with torch.no_grad():
            return path(self.routed[index], self.w1, self.w2, self.biases)


def make_inputs(problem: Problem, group: ExpertGroup, seed: int) -> MeasuredInputs:
    """Random tokens and weights of this rank, on its device; every expert equally likely; ranks share ``seed``."""
    generator = torch.Generator(group.device).manual_seed(seed * 1_000 + group.rank)
    moe, width = problem.moe, problem.moe.ffn_size // problem.parallel.tp
    local = moe.num_experts // problem.parallel.ep
    drawn: dict[str, Any] = dict(generator=generator, device=group.device, dtype=torch.float32)
    held: dict[str, Any] = dict(device=group.device, dtype=problem.dtype)
    w1 = torch.empty(local, 2 * width, moe.hidden_size, **held)
    w2 = torch.empty(local, moe.hidden_size, width, **held)
    for weight in (w1, w2):
        weight.normal_(0, weight.shape[2] ** -0.5, generator=generator)
    biases = Biases(torch.zeros(w1.shape[:2], **held), torch.zeros(w2.shape[:2], **held)) if moe.expert_bias else None
    routed = []
    for _ in range(NUM_INPUTS):
        tokens = torch.randn(problem.num_tokens, moe.hidden_size, **drawn)
        scores = torch.rand(problem.num_tokens, moe.num_experts, **drawn)
        values, ids = scores.topk(moe.top_k, dim=1)
        routed.append(RoutedTokens(tokens.to(problem.dtype), ids.int(), values / values.sum(1, keepdim=True)))
    return MeasuredInputs(routed, w1, w2, biases)


def measure_layer(
    problem: Problem,
    settings: Sequence[Setting],
    group: ExpertGroup,
    *,
    rounds: int = 20,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Measured, ...]:
    """Time all settings in one interleaved run under uniform routing (collective).

    The problem must fit the group's workspace. ``tell`` gets the state, such as ``compiling candidate 3 of 12``.

    Returns:
        Of each setting the median ms of the slowest rank, or why it failed on some rank; equal on all ranks.
    """
    if group.device.type != "cuda":
        group.resolver.warn("splits change nothing without a GPU: their times differ by noise")
    inputs = make_inputs(problem, group, seed)
    candidates: dict[Setting, Variant] = {}
    failures: dict[Setting, str] = {}
    for number, setting in enumerate(settings, 1):
        tell(f"compiling candidate {number} of {len(settings)}")
        make = partial(_prepare, problem, setting, group, inputs)
        run, failure = attempt(make, group.device, group.process_group, group.workspace, final_ends=True)
        if run is None:
            failures[setting] = failure
        else:
            candidates[setting] = run
    while True:
        timings, culprit = _Watch(group, candidates, tell).time_all(rounds)
        if culprit is None:
            break
        del candidates[culprit[0]]  # The others are timed again without it.
        failures[culprit[0]] = culprit[1]
        recover(group.workspace, group.process_group)
    return tuple(
        Measured(setting=setting, ms=None, failure=failures[setting])
        if setting in failures
        else Measured(setting=setting, ms=timings[setting].median_ms)
        for setting in settings
    )


def _prepare(problem: Problem, setting: Setting, group: ExpertGroup, inputs: MeasuredInputs) -> Variant:
    """Build a path and run it once; returns its call for the number of an input set."""
    path = make_path("plain" if setting is None else "auto", problem.moe, group, setting or OverlapConfig())
    inputs.run(path, 0)
    group.workspace.check()
    run = partial(inputs.run, path)
    return capture(run, rotate=NUM_INPUTS) if group.device.type == "cuda" and setting is not None else run


class _Watch:
    """One timing loop, watched for the first call that leaves a fault, without waiting for the device."""

    def __init__(self, group: ExpertGroup, candidates: Mapping[Setting, Variant], tell: Callable[[str], None]) -> None:
        self.group = group
        self.candidates = candidates
        self.tell = tell
        self.settings: list[Setting] = []  # one for each call
        self.failure = ""  # raised by a call, as the twin's waits do
        self.looks_without_fault = torch.zeros(1, dtype=torch.int64, device=group.device)

    def time_all(self, rounds: int) -> tuple[dict[Setting, Timing], tuple[Setting, str] | None]:
        """Time all candidates; the times mean nothing if there is a culprit (collective).

        That is the candidate of the first call that failed on any rank, and why. Of calls a, b, a the second left a
        fault: two of four looks found none, so it was call 1, that of b.
        """
        timings = time_interleaved(
            {setting: partial(self._call, setting) for setting in self.candidates},
            rounds=rounds,
            device=self.group.device,
            process_group=self.group.process_group,
            rotate=NUM_INPUTS,
            opening=self._before_call,
        )
        self._look()
        own = int(self.looks_without_fault) - 1
        first = -int(largest([-own], self.group.device, self.group.process_group)[0])
        if first == len(self.settings):
            return timings, None
        if not self.failure:
            try:
                self.group.workspace.check()
            except (RuntimeError, ValueError) as error:
                self.failure = reason(error)
        why = first_failure(self.failure if own == first else "", self.group.process_group)
        return timings, (self.settings[first], why)

    def _before_call(self) -> None:
        """Say that a call comes, and look for what the one before left."""
        number = len(self.candidates)
        self.tell(f"timing {counted(number, 'candidate')}, round {len(self.settings) // number + 1}")
        self._look()

    def _call(self, setting: Setting, index: int) -> None:
        """Call a candidate. After a failure only plain runs, whose collectives every rank has to join.

        Calls of other candidates would wait for the other ranks until the deadline.
        """
        self.settings.append(setting)
        try:
            if setting is None or not self.failure:
                self.candidates[setting](index)
        except (RuntimeError, ValueError) as error:
            if self.group.comm.board.is_final:  # the collectives in which ranks would agree what failed, do, too
                raise
            self.failure = self.failure or reason(error)

    def _look(self) -> None:
        """Before each call and after the last: a fault stays."""
        if not self.failure:
            workspace = self.group.workspace
            self.looks_without_fault += (workspace.inner or workspace).fault.eq(0).all()


def attempt(
    action: Callable[[], T],
    device: torch.device,
    process_group: ProcessGroup | None,
    pool: Workspace | None = None,
    failures: tuple[type[Exception], ...] = (RuntimeError, ValueError),
    *,
    final_ends: bool = False,
) -> tuple[T | None, str]:
    """The value of an action if it succeeds on all ranks, else ``None`` and the first failure of any (collective).

    This is also a barrier, and ends the job if a rank is gone.

    Args:
        pool: What a failure may leave something in; the ranks recover from it.
        failures: What an action may raise; anything else is a mistake of ours.
        final_ends: Raise a failure of collectives, by which ranks would agree what failed.
    """
    value, failure = None, ""
    try:
        value = action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except failures as error:
        if final_ends and pool is not None and pool.comm.board.is_final:
            raise
        failure = reason(error)
    failure = first_failure(failure, process_group)
    if failure and pool is not None:
        recover(pool, process_group)
    return (None, failure) if failure else (value, "")


def first_failure(failure: str, process_group: ProcessGroup | None) -> str:
    """The first failure of any rank, "" if there is none (collective; ``None`` is a rank alone)."""
    reasons = gather(process_group, failure)
    found = {rank: reason for rank, reason in enumerate(reasons) if reason}
    # Ranks that only repeat the failure of another one.
    told = {rank for rank, reason in found.items() if reason.startswith(StepFailedError.__name__)}
    first = min(found.keys() - told or found, default=-1)
    reason, is_alone = found.get(first, ""), len(found.keys() - told) < len(reasons)
    return f"rank {first}: {reason}" if reason and is_alone and f"rank {first}" not in reason else reason


def reason(error: Exception) -> str:
    """The error on one line that fits a table."""
    return shorten(f"{type(error).__name__}: {error}", MOST_LETTERS)
