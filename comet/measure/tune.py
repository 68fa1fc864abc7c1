"""The ``tune`` task: measure the candidates of each point in one job on all ranks, and keep the winners.

Rank 0 decides what is measured, sends that to the others, and alone writes: the profile as soon as a point is measured,
then the point's table, and at the end the regrets and one JSON object. Regret is the measured time of a choice over
that of the best measured candidate.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from comet.comm.base import require_memory
from comet.config import OverlapConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig, activation_dtype
from comet.measure.layers import Shape, make_group, measure_layer, shapes_of, with_pool
from comet.training.ranks import RankContext, from_first_rank
from comet.tuner.choice import resolve
from comet.tuner.problem import Machine, Problem, candidate_name, candidates, default_setting, effective
from comet.tuner.profile import Kernels, Measured, ProfileEntry, ProfileKey, ProfileStore, profile_path
from comet.utils.progress import Measuring
from comet.utils.shared_file import require_writable
from comet.utils.tables import aligned
from comet.version import comet_version


@dataclass(frozen=True, slots=True)
class Tuned:
    """A point and what was measured there."""

    problem: Problem
    measured: tuple[Measured, ...]  # settings within the limits of the layer

    def by_time(self) -> list[Measured]:
        """The fastest first, what failed last."""
        return sorted(self.measured, key=lambda item: item.time)

    def regret(self, setting: OverlapConfig | None) -> float | None:
        """Measured time of a setting over that of the best one; ``None`` if it did not run."""
        times = {item.setting: item.ms for item in self.measured if item.ms is not None}
        own = times.get(setting and effective(setting, self.problem))
        return None if own is None else own / min(times.values())

    def text(self) -> str:
        """The shape, and an aligned table of the candidates."""
        rows = [("candidate", "ms", "")]
        for number, item in enumerate(self.by_time()):
            time = "-" if item.ms is None else f"{item.ms:.3f}"
            note = f"failed: {item.failure}" if item.ms is None else "" if number else "<- kept"
            rows.append((candidate_name(item.setting, self.problem), time, note))
        title = ", ".join(f"{name}={value}" for name, value in self._shape().items())
        return "\n".join([title, *aligned(rows, left=(0, 2))])

    def facts(self) -> dict[str, Any]:
        """The content of ``text``, for JSON."""
        found = [
            {"name": candidate_name(item.setting, self.problem), "setting": _setting(item.setting),
             "measured_ms": item.ms, "failure": item.failure}
            for item in self.by_time()
        ]  # fmt: skip
        return {"shape": self._shape(), "chosen": found[0]["setting"], "candidates": found}

    def _shape(self) -> dict[str, int | str]:
        key = asdict(ProfileKey.create(self.problem, ""))
        return {name: value for name, value in key.items() if name != "device"} | {"tokens": self.problem.num_tokens}


def _setting(setting: OverlapConfig | None) -> dict[str, int] | str:
    return "plain" if setting is None else asdict(setting)


def regrets(points: Sequence[Tuned], store: ProfileStore) -> dict[str, dict[str, float | int | None]]:
    """Mean and worst regret over all points, for each way to choose without having measured the point itself.

    Returns:
        ``{"default": ..., "nearest": {"mean": 1.01, "worst": 1.04, "points": 19}}``: ``points`` are those at which the
        choice was among what was measured, the others do not count; for ``nearest`` a point's own entry of the store is
        left out.
    """
    ways = {
        "default": [point.regret(default_setting(point.problem)) for point in points],
        "nearest": [_nearest_regret(point, store) for point in points],
    }
    known = {name: [value for value in found if value is not None] for name, found in ways.items()}
    return {
        name: {"mean": mean(found) if found else None, "worst": max(found, default=None), "points": len(found)}
        for name, found in known.items()
    }


def _nearest_regret(point: Tuned, store: ProfileStore) -> float | None:
    own = ProfileKey.create(point.problem, store.device)
    others = {key: entry for key, entry in store.entries.items() if key != own}
    found = ProfileStore(store.path, store.device, others).lookup(point.problem)
    return point.regret(found[0].winner.setting) if found else None


def regret_text(found: Mapping[str, Mapping[str, float | int | None]]) -> str:
    """One line for each way to choose that there is a figure for."""
    lines = [
        f"{name:<7}  mean {values['mean']:.3f}, worst {values['worst']:.3f}, {values['points']} points"
        for name, values in found.items()
        if values["points"]
    ]
    return "\n".join(["regret: time of the choice over the best measured", *lines])


def tune_job(config: JobConfig, context: RankContext) -> dict[str, Any]:
    """Tune every point of the job (collective); each winner is stored as soon as it is measured.

    Rank 0 has printed the tables and, as the last line, what is returned: the facts of all points, and ``regrets``;
    equal on all ranks but for seconds.
    """
    start = time.perf_counter()
    points = job_points(config, context.device)
    machine, store = from_first_rank(lambda: _open_store(config, context.device))
    group = make_group(config, next(iter(points)).moe, config.parallel, 1, context)  # each point has a pool of its own
    require_memory(group.comm, "tune", "tune a group of one node's ranks")
    stores = machine.name != "cpu"  # Times of CPU ranks are noise, and a stored one would change later trainings.
    tuned: list[Tuned] = []
    facts: list[dict[str, Any]] = []
    progress = Measuring(len(points), "point", enabled=context.rank == 0)
    for shape, problem in points.items():
        model, begin = shape.model, time.perf_counter()
        progress.begin(f"{model}, {problem.num_tokens} tokens")
        stored = resolve(problem, store, machine).setting  # measured for other tokens, or earlier
        settings = dict.fromkeys([*candidates(problem, machine), stored and effective(stored, problem)])
        own = with_pool(group, problem)
        measured = measure_layer(problem, list(settings), own, rounds=config.tune.rounds, tell=progress.tell)
        if all(item.ms is None for item in measured):
            failure = f"none of {len(measured)} settings ran, the first: {measured[0].failure}"
            facts.append({"model": model, "tokens": problem.num_tokens, "failure": failure})
            progress.end(f"{model}, {problem.num_tokens} tokens: {failure}\n")
            continue
        key, date = ProfileKey.create(problem, machine.name), datetime.now(UTC).date().isoformat()
        kernels: Kernels = "auto" if own.cuda_kernels else "triton"
        entry = ProfileEntry(key=key, measured=measured, commit=comet_version(), date=date, kernels=kernels)
        if group.world_rank == 0 and stores:
            store.put(entry)
        else:
            store.entries[key] = entry
        tuned.append(Tuned(problem, measured))
        seconds = time.perf_counter() - begin
        facts.append({"model": model, "seconds": round(seconds, 2), **tuned[-1].facts()})
        progress.end(f"{model}, {seconds:.1f} s\n{tuned[-1].text()}\n")
    progress.close()
    group.close()
    total, found = round(time.perf_counter() - start, 2), regrets(tuned, store)
    profile = str(store.path) if stores else None
    result = {"task": "tune", "profile": profile, "seconds": total, "regrets": found, "points": facts}
    if context.rank == 0:
        note = "" if stores else "no profile is stored: times of CPU ranks are noise; tune on GPUs\n\n"
        sys.stdout.write(f"{regret_text(found)}\n\n{note}{json.dumps(result)}\n")
    if not tuned:
        raise NothingMeasuredError(f"tune: none of {len(facts)} points ran, the first: {facts[0]['failure']}")
    return result


def job_points(config: JobConfig, device: torch.device) -> dict[Shape, Problem]:
    """The points of a job; raises ``ValueError`` where one breaks a rule."""
    dtype = activation_dtype(config.train.dtype, device)
    return {shape: shape.problem(dtype) for shape in shapes_of(config.tune, config, [config.parallel])}


def _open_store(config: JobConfig, device: torch.device) -> tuple[Machine, ProfileStore]:
    """Return machine and store of the first rank: candidates depend on both, and ranks have to agree on them."""
    machine = Machine.of(device)
    folder, ranks = Path(config.tune.profiles), config.parallel.world_size
    if machine.name != "cpu":
        require_writable(profile_path(folder, machine.name, ranks), f"tune.profiles={config.tune.profiles!r}")
    return machine, ProfileStore.open(folder, machine.name, ranks)
