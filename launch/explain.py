"""The ``explain`` task: which setting each point would use and why; starts no ranks, measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comet.config import OverlapConfig
from comet.launch.config import default_ranks, make_job
from comet.launch.sweep import load_models
from comet.tuner import Explained, explain_facts, explain_text, propose, resolve
from comet.tuner.job import job_points
from comet.tuner.machine import H200, Machine
from comet.tuner.model import predict
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileStore


def explain_job(container: Mapping[str, Any]) -> int:
    """Print a table per point and, as the last line, the same as JSON.

    Args:
        container: The composed configuration; settings as for ``tune``.

    Returns:
        0.

    Raises:
        ValueError: If a setting breaks its rule.
    """
    job = make_job(container, default_ranks(container, torch.cuda.device_count()))
    on_h200 = job.tune.machine == "h200"
    device = torch.device("cuda" if on_h200 or torch.cuda.is_available() else "cpu")
    machine = H200 if on_h200 else Machine.of(device)
    if device.type == "cpu":
        sys.stderr.write("comet: no GPU here; tune.machine=h200 tells the times of an H200 in bfloat16\n")
    store = ProfileStore.open(Path(job.tune.profiles), machine.name, job.parallel.world_size)
    facts = []
    for model, problems in job_points(job, load_models(job.tune.models), device).items():
        for problem in problems:
            found = _explained(problem, machine, store, job.overlap)
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
    resolved = resolve(problem, store, machine, forced=forced, default=OverlapConfig())
    return Explained(
        problem=problem,
        machine=machine,
        predictions=predictions,
        resolved=resolved,
        entry=entry,
        profile=store.source(entry),
    )
