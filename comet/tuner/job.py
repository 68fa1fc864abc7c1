"""The ``tune`` task: measure the candidates of each point on all ranks and keep the winners."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from comet.comm.base import require_memory
from comet.config import MoEConfig, require
from comet.errors import NothingMeasuredError
from comet.group import ExpertGroup, make_expert_group
from comet.progress import Measuring
from comet.training.config import JobConfig
from comet.training.ranks import RankContext, from_first_rank
from comet.training.run import activation_dtype
from comet.tuner.choice import resolve
from comet.tuner.explain import Explained, Tuned, explain_facts, explain_text, regret_text, regrets
from comet.tuner.layers import effective
from comet.tuner.machine import Machine
from comet.tuner.measure import measure_layer
from comet.tuner.model import predict, propose
from comet.tuner.problem import Problem
from comet.tuner.profile import Kernels, ProfileEntry, ProfileKey, ProfileStore, profile_path
from comet.tuner.shared_file import require_writable
from comet.version import comet_version
from comet.workspace import Workspace, WorkspaceShape

LoadModels = Callable[[Sequence[str]], Mapping[str, MoEConfig]]


def tune_job(config: JobConfig, context: RankContext, load_models: LoadModels) -> dict[str, Any]:
    """Tune every point of the job (collective); each winner is stored as soon as it is measured.

    Args:
        config: Layer, layout, communicator and ``tune`` settings.
        context: This rank.
        load_models: From names to layers; called on rank 0.

    Returns:
        The facts of all points, and ``regrets``; equal on all ranks but for seconds. Rank 0 has printed the tables and,
        as the last line, these facts.

    Raises:
        ValueError: If the store cannot be written, or a setting breaks its rule.
        NothingMeasuredError: If no candidate of any point runs; where one of a point's does not, the point is told.
        UnavailableError: If the group spans several nodes.
    """
    start = time.perf_counter()
    require_this_machine(config)
    models = from_first_rank(lambda: load_models(config.tune.models))
    points = job_points(config, models, context.device)
    machine, store = from_first_rank(lambda: _open_store(config, context.device))
    first = next(iter(points.values()))[0]
    group = make_expert_group(
        first.moe,
        config.parallel,
        max_tokens=1,  # each point has a pool of its own
        dtype=first.dtype,
        device=context.device,
        backend=config.comm.backend,
        timeout_s=config.comm.timeout_s,
    )
    require_memory(group.comm, "tune", "there is nothing to tune between nodes, which run path 'plain'")
    tuned: list[Tuned] = []
    facts: list[dict[str, Any]] = []
    progress = Measuring(sum(map(len, points.values())), "point", enabled=context.rank == 0)
    for model, problem in ((model, problem) for model, problems in points.items() for problem in problems):
        begin = time.perf_counter()
        progress.begin(f"{model}, {problem.num_tokens} tokens")
        try:
            tuned.append(_tune_point(problem, machine, store, group, config.tune.rounds, progress.tell))
        except NothingMeasuredError as error:
            facts.append({"model": model, "tokens": problem.num_tokens, "failure": str(error)})
            progress.end(f"{model}, {problem.num_tokens} tokens: {error}\n")
            continue
        explained, seconds = _explained(tuned[-1], machine, store), time.perf_counter() - begin
        facts.append({"model": model, "seconds": round(seconds, 2), **explain_facts(explained)})
        progress.end(f"{model}, {seconds:.1f} s\n{explain_text(explained)}\n")
    progress.close()
    group.close()
    total, found = round(time.perf_counter() - start, 2), regrets(tuned, store, machine)
    result = {"task": "tune", "profile": str(store.path), "seconds": total, "regrets": found, "points": facts}
    if context.rank == 0:
        sys.stdout.write(f"{regret_text(found)}\n\n{json.dumps(result)}\n")
    if not tuned:
        raise NothingMeasuredError(f"tune: none of {len(facts)} points ran, the first: {facts[0]['failure']}")
    return result


def require_this_machine(config: JobConfig) -> None:
    """Raise ``ValueError`` if another machine is named, of which ``explain`` alone can tell."""
    machine = config.tune.machine
    require(machine == "this", f"tune.machine={machine!r} must be 'this': tune measures where it runs")


def job_points(config: JobConfig, models: Mapping[str, MoEConfig], device: torch.device) -> dict[str, list[Problem]]:
    """The points of a job by model: one per number of tokens, under uniform routing.

    Args:
        config: Whose model counts where ``models`` is empty.
        models: The layers of ``config.tune.models``, by name.
        device: Decides the element type.

    Raises:
        ValueError: If a model does not divide over the ranks.
    """
    dtype = activation_dtype(config.train.dtype, device)
    tokens = dict.fromkeys(config.tune.tokens or (config.train.batch_size * config.model.context,))
    layers = models or {config.model.name: config.model.moe}
    return {name: [Problem.create(moe, config.parallel, num, dtype) for num in tokens] for name, moe in layers.items()}


def _open_store(config: JobConfig, device: torch.device) -> tuple[Machine, ProfileStore]:
    """Of the first rank: the candidates depend on both, and ranks have to agree on them."""
    machine = Machine.of(device)
    folder, ranks = Path(config.tune.profiles), config.parallel.world_size
    require_writable(profile_path(folder, machine.name, ranks), f"tune.profiles={config.tune.profiles!r}")
    return machine, ProfileStore.open(folder, machine.name, ranks)


def _tune_point(
    problem: Problem,
    machine: Machine,
    store: ProfileStore,
    group: ExpertGroup,
    rounds: int,
    tell: Callable[[str], None],
) -> Tuned:
    """Measure and store: as in a layer made for this many tokens, which decides between kernels."""
    shape = WorkspaceShape.create(problem.moe, problem.world_size, problem.num_tokens, problem.dtype)
    group = replace(group, workspace=Workspace(group.comm, shape))
    machine = replace(machine, cuda_kernels=machine.cuda_kernels and group.cuda_kernels)
    predictions = propose(problem, machine)
    stored = resolve(problem, store, machine).setting  # of other tokens, or of an earlier run
    if stored is not None:
        taken = effective(stored, problem, machine)
        if all(item.setting != taken for item in predictions):
            predictions.append(predict(problem, taken, machine))
    measured = measure_layer(problem, [item.setting for item in predictions], group, rounds=rounds, tell=tell)
    if all(item.ms is None for item in measured):
        raise NothingMeasuredError(f"none of {len(measured)} settings ran, the first: {measured[0].failure}")
    date = datetime.now(UTC).date().isoformat()
    kernels: Kernels = "auto" if machine.cuda_kernels else "triton"
    key = ProfileKey.create(problem, machine.name)
    entry = ProfileEntry(key=key, measured=measured, commit=comet_version(), date=date, kernels=kernels)
    if group.world_rank == 0:
        store.put(entry)
    else:
        store.entries[entry.key] = entry
    return Tuned(problem=problem, predictions=predictions, entry=entry)


def _explained(point: Tuned, machine: Machine, store: ProfileStore) -> Explained:
    return Explained(
        problem=point.problem,
        machine=machine,
        predictions=point.predictions,
        resolved=resolve(point.problem, store, machine),
        entry=point.entry,
        profile=store.path,
    )
