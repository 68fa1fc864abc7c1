"""The tasks ``tune``, ``sweep`` and ``explain``, with the models of the configuration groups."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comet.config import MoEConfig, OverlapConfig
from comet.jobs.config import JobConfig
from comet.launch.config import compose, default_ranks, make_job
from comet.launch.distributed import LaunchContext
from comet.launch.failures import last_words
from comet.launch.schema import build
from comet.measure import job
from comet.measure.explain import Explained, explain_facts, explain_text
from comet.measure.job import run_sweep, tell_kept
from comet.models.config import ModelConfig
from comet.tuner.choice import resolve
from comet.tuner.model import predict, propose
from comet.tuner.problem import H200, Machine, Problem
from comet.tuner.profile import ProfileStore


def sweep_job(config: JobConfig, context: LaunchContext) -> dict[str, Any]:
    """Sweep (collective); told to stop, rank 0 says where its rows are."""
    with last_words(partial(tell_kept, config)) if context.rank == 0 else nullcontext():
        return run_sweep(config, context, load_models)


def load_models(names: Sequence[str]) -> dict[str, MoEConfig]:
    """The MoE layers of the models called ``names``; raises ``ValueError`` that lists the models for a wrong name."""
    return {name: build(ModelConfig, compose([f"model={name}"])["model"], "model").moe for name in names}


def tune_job(config: JobConfig, context: LaunchContext) -> dict[str, Any]:
    """Tune (collective)."""
    return job.tune_job(config, context, load_models)


def explain_job(container: Mapping[str, Any]) -> int:
    """Print a table per point and, as the last line, the same as JSON."""
    config = make_job(container, default_ranks(container, torch.cuda.device_count()))
    on_h200 = config.tune.machine == "h200"
    device = torch.device("cuda" if on_h200 or torch.cuda.is_available() else "cpu")
    machine = H200 if on_h200 else Machine.of(device)
    if device.type == "cpu":
        sys.stderr.write("comet: no GPU here; tune.machine=h200 tells the times of an H200 in bfloat16\n")
    store = ProfileStore.open(Path(config.tune.profiles), machine.name, config.parallel.world_size)
    facts = []
    for model, problem in job.job_points(config, load_models(config.tune.models), device):
        found = _explained(problem, machine, store, config.overlap)
        sys.stdout.write(f"{model}\n{explain_text(found)}\n\n")
        facts.append({"model": model, **explain_facts(found)})
    sys.stdout.write(json.dumps({"task": "explain", "points": facts}) + "\n")
    return 0


def _explained(problem: Problem, machine: Machine, store: ProfileStore, forced: OverlapConfig | None) -> Explained:
    """What a layer would use; the table has the candidates of ``tune``, and what else was measured."""
    found = store.lookup(problem)
    entry = found[0] if found else None
    predictions = propose(problem, machine)
    known = {item.setting for item in predictions}
    measured = [item.setting for item in entry.measured if item.setting not in known] if entry else []
    predictions += [predict(problem, setting, machine) for setting in measured]
    resolved = resolve(problem, store, machine, forced=forced)
    return Explained(
        problem=problem,
        machine=machine,
        predictions=predictions,
        resolved=resolved,
        entry=entry,
        profile=store.source(entry),
    )
