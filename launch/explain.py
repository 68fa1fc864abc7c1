"""The ``explain`` task: which setting each point would use and why; starts no ranks, measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from comet.config import OverlapConfig
from comet.launch.config import compose, default_ranks, make_job
from comet.tuner import explain_facts, explain_text, propose, resolve
from comet.tuner.job import job_problems
from comet.tuner.machine import Machine
from comet.tuner.model import predict
from comet.tuner.profile import ProfileStore


def explain_job(arguments: Sequence[str]) -> int:
    """Print a table per point and, as the last line, the same as JSON.

    Args:
        arguments: Hydra overrides, as for ``tune``.

    Returns:
        0.

    Raises:
        ValueError: If a setting breaks its rule.
    """
    container = compose(arguments)
    job = make_job(container, default_ranks(container, torch.cuda.device_count()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine.of(device)
    store = ProfileStore.open(Path(job.tune.profiles), machine.name, job.parallel.world_size)
    facts = []
    for problem in job_problems(job, device):
        found = store.lookup(problem)
        entry = found[0] if found else None
        predictions = propose(problem, machine)
        known = {item.setting for item in predictions}
        measured = [item.setting for item in entry.measured if item.setting not in known] if entry else []
        predictions += [predict(problem, setting, machine) for setting in measured]
        resolved = resolve(problem, store, machine, forced=job.overlap, default=OverlapConfig())
        sys.stdout.write(explain_text(problem, predictions, resolved, entry) + "\n\n")
        facts.append(explain_facts(problem, predictions, resolved, entry))
    sys.stdout.write(json.dumps({"task": "explain", "profile": str(store.path), "points": facts}) + "\n")
    return 0
