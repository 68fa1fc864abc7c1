"""The ``tune`` task: measure the candidates of each point on all ranks and keep the winners."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from comet.group import ExpertGroup, make_expert_group
from comet.training.config import JobConfig
from comet.training.run import RankContext, activation_dtype
from comet.tuner.choice import resolve
from comet.tuner.explain import explain_facts, explain_text
from comet.tuner.machine import Machine
from comet.tuner.measure import measure_layer
from comet.tuner.model import propose
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileStore
from comet.tuner.tune import tune


def tune_job(config: JobConfig, context: RankContext) -> dict[str, Any]:
    """Tune every point of the job (collective); each winner is stored as soon as it is measured.

    Args:
        config: Layer, layout, communicator and ``tune`` settings.
        context: This rank.

    Returns:
        The facts of all points, equal on all ranks; rank 0 has printed the tables and, as the last line, these facts.

    Raises:
        ValueError: If no candidate of a point runs, or a setting breaks its rule.
    """
    points = job_problems(config, context.device)
    machine = Machine.of(context.device)
    group = make_expert_group(
        config.model.moe,
        config.parallel,
        max_tokens=max(point.num_tokens for point in points),
        dtype=points[0].dtype,
        device=context.device,
        backend=config.comm.backend,
        timeout_s=config.comm.timeout_s,
    )
    store = ProfileStore.open(Path(config.tune.profiles), machine.name, config.parallel.world_size)
    facts = [_tune_point(point, machine, store, group, config.tune.rounds) for point in points]
    group.close()
    regrets = [point["regret"] for point in facts if point["regret"] is not None]
    result = {"task": "tune", "profile": str(store.path), "mean_regret": mean(regrets) if regrets else None}
    result["points"] = facts
    if context.rank == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    return result


def job_problems(config: JobConfig, device: torch.device) -> list[Problem]:
    """The points of a job: one per number of tokens, under uniform routing."""
    dtype = activation_dtype(config.train.dtype, device)
    tokens = config.tune.tokens or (config.train.batch_size * config.model.context,)
    return [Problem.create(config.model.moe, config.parallel, num, dtype) for num in dict.fromkeys(tokens)]


def _tune_point(
    problem: Problem, machine: Machine, store: ProfileStore, group: ExpertGroup, rounds: int
) -> dict[str, Any]:
    predictions = propose(problem, machine)
    settings = [item.setting for item in predictions]
    measure = measure_layer(problem, settings, group, rounds=rounds)
    date = datetime.now(UTC).date().isoformat()
    entry = tune(problem, settings, measure, device=machine.name, commit=_version(), date=date)
    if group.world_rank == 0:
        store.put(entry)
    else:
        store.entries[entry.key] = entry
    resolved = resolve(problem, store, machine)
    if group.world_rank == 0:
        sys.stdout.write(explain_text(problem, predictions, resolved, entry) + "\n\n")
    return explain_facts(problem, predictions, resolved, entry)


def _version() -> str:
    try:
        return version("comet-moe")
    except PackageNotFoundError:  # a source tree on the path
        return "unknown"
