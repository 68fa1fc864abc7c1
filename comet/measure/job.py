"""The ``tune`` and ``sweep`` tasks: measure each point in one job on all ranks, whatever fails, and keep results.

Points of a sweep share the job's process group. Rank 0 expands the lists, decides what is still to be measured, tells
the others and alone writes: the CSV file after every shape, whose points are timed in one loop, then the table, the
picture and one JSON object; and its progress to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comet.comm.base import require_memory
from comet.config import MoEConfig, OverlapConfig, ParallelConfig, require
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig, activation_dtype
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.measure.explain import Explained, explain_facts, explain_text, regret_text, regrets
from comet.measure.layers import attempt, measure_layer
from comet.measure.sweep import Point, Shape, SweepLog, best_points, plot_sweep, sweep_points, sweep_table
from comet.training.ranks import RankContext, from_first_rank
from comet.training.run_folder import FolderLock
from comet.tuner.choice import resolve
from comet.tuner.model import predict, propose
from comet.tuner.problem import Machine, Problem, counted, effective
from comet.tuner.profile import Kernels, Measured, ProfileEntry, ProfileKey, ProfileStore, profile_path
from comet.utils.progress import Measuring
from comet.utils.shared_file import require_writable
from comet.version import comet_version

LoadModels = Callable[[Sequence[str]], Mapping[str, MoEConfig]]


def tune_job(config: JobConfig, context: RankContext, load_models: LoadModels) -> dict[str, Any]:
    """Tune every point of the job (collective); each winner is stored as soon as it is measured.

    Rank 0, which alone calls ``load_models``, has printed the tables and, as the last line, what is returned: the facts
    of all points, and ``regrets``; equal on all ranks but for seconds.
    """
    start = time.perf_counter()
    require_this_machine(config)
    points = job_points(config, from_first_rank(lambda: load_models(config.tune.models)), context.device)
    machine, store = from_first_rank(lambda: _open_store(config, context.device))
    group = make_group(config, points[0][1].moe, config.parallel, 1, context)  # each point has a pool of its own
    require_memory(group.comm, "tune", "there is nothing to tune between nodes, which run path 'plain'")
    tuned: list[Explained] = []
    facts: list[dict[str, Any]] = []
    progress = Measuring(len(points), "point", enabled=context.rank == 0)
    for model, problem in points:
        begin = time.perf_counter()
        progress.begin(f"{model}, {problem.num_tokens} tokens")
        try:
            tuned.append(_tune_point(problem, machine, store, group, config.tune.rounds, progress.tell))
        except NothingMeasuredError as error:
            facts.append({"model": model, "tokens": problem.num_tokens, "failure": str(error)})
            progress.end(f"{model}, {problem.num_tokens} tokens: {error}\n")
            continue
        seconds = time.perf_counter() - begin
        facts.append({"model": model, "seconds": round(seconds, 2), **explain_facts(tuned[-1])})
        progress.end(f"{model}, {seconds:.1f} s\n{explain_text(tuned[-1])}\n")
    progress.close()
    group.close()
    total, found = round(time.perf_counter() - start, 2), regrets(tuned, store)
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


def job_points(config: JobConfig, models: Mapping[str, MoEConfig], device: torch.device) -> list[tuple[str, Problem]]:
    """The points of a job with their models' names, under uniform routing; the job's model where there are none."""
    dtype = activation_dtype(config.train.dtype, device)
    tokens = dict.fromkeys(config.tune.tokens or (config.train.batch_size * config.model.context,))
    layers = models or {config.model.name: config.model.moe}
    return [(name, Problem.create(moe, config.parallel, num, dtype)) for name, moe in layers.items() for num in tokens]


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
) -> Explained:
    """Measure and store: as in a layer made for this many tokens, which decides between kernels."""
    shape = WorkspaceShape.create(problem.moe, problem.world_size, problem.num_tokens, problem.dtype)
    group = replace(group, workspace=Workspace(group.comm, shape))
    machine = replace(machine, cuda_kernels=machine.cuda_kernels and group.cuda_kernels)
    predictions = propose(problem, machine)
    stored = resolve(problem, store, machine).setting  # of other tokens, or of an earlier run
    taken = stored and effective(stored, problem)
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
    return Explained(
        problem=problem,
        machine=machine,
        predictions=predictions,
        resolved=resolve(problem, store, machine),
        entry=entry,
        profile=store.path,
    )


CSV_NAME, PLOT_NAME = "sweep.csv", "sweep.png"

Todo = dict[Shape, list[Point]]


def run_sweep(job: JobConfig, context: RankContext, load_models: LoadModels) -> dict[str, Any]:
    """Measure the points of which the CSV file holds no time yet (collective).

    Rank 0, which alone calls ``load_models``, has printed the table and, as the last line, the facts that are returned.
    """
    dtype, device = str(activation_dtype(job.train.dtype, context.device)), Machine.of(context.device).name
    name, value = folder_setting(job)
    folder = Path(value)
    log = SweepLog(folder / CSV_NAME)
    with FolderLock(folder, f"{name}={value!r}") as lock:

        def prepare() -> tuple[list[Point], Todo]:
            has_rows = name == "output_dir" or log.path.exists()
            require(has_rows, f"resume={job.resume!r} must be a folder with {CSV_NAME}")
            points = sweep_points(job, load_models(job.sweep.models))
            lock.acquire()
            require_writable(log.path, lock.setting)
            log.rows = SweepLog.load(log.path).rows
            return points, pending(points, log, dtype, device)

        points, todo = from_first_rank(prepare)
        num_measured = sum(map(len, todo.values()))
        if context.rank == 0:
            told = f"sweep of {counted(len(points), 'point')}, {num_measured} to measure in {folder}"
            sys.stderr.write(f"comet: {told}\n")
        for shape, measured in _measure_all(job, todo, context):
            if context.rank == 0:
                log.put({point.key(dtype, device): item for point, item in zip(todo[shape], measured, strict=True)})

        def finish() -> dict[str, Any]:
            results = {point: log.rows[point.key(dtype, device)] for point in points}
            plot_sweep(results, folder / PLOT_NAME)
            facts = _facts(results, folder, num_measured)
            sys.stdout.write(sweep_table(results) + "\n\n" + json.dumps(facts) + "\n")
            return facts

        facts = from_first_rank(finish)
    if facts["failed"] == facts["points"]:
        raise NothingMeasuredError(f"sweep: none of {facts['points']} points ran, the first: {facts['first_failure']}")
    return facts


def folder_setting(job: JobConfig) -> tuple[str, str]:
    """Name and value of the setting that names the folder of a sweep: ``resume`` where it names one."""
    return ("output_dir", job.output_dir) if job.resume in (None, "auto") else ("resume", str(job.resume))


def tell_kept(job: JobConfig) -> str:
    """Where the rows of a sweep that was stopped are, and how it goes on, in one line."""
    name, value = folder_setting(job)
    rows = SweepLog.load(Path(value) / CSV_NAME).rows
    times = counted(sum(item.ms is not None for item in rows.values()), "measured point")
    return f"{times} kept in {value}; the same command with {name}={value} measures the others"


def pending(points: Sequence[Point], log: SweepLog, dtype: str, device: str) -> Todo:
    """The points of each shape of which the log holds no time: why one failed then may be gone by now."""
    todo: Todo = {}
    for point in points:
        known = log.rows.get(point.key(dtype, device))
        if known is None or known.ms is None:
            todo.setdefault(point.shape, []).append(point)
    return todo


def _measure_all(job: JobConfig, todo: Todo, context: RankContext) -> Iterator[tuple[Shape, Sequence[Measured]]]:
    """Yield each shape with what was found of its points; shapes of one layer and layout share a group."""
    families: dict[tuple[MoEConfig, ParallelConfig], list[Shape]] = {}
    for shape in todo:
        families.setdefault((shape.moe, shape.parallel), []).append(shape)
    progress = Measuring(len(todo), "shape", enabled=context.rank == 0)
    for (moe, parallel), shapes in families.items():
        most = max(shape.tokens for shape in shapes)
        group, failure = attempt(partial(make_group, job, moe, parallel, most, context), context.device, world(context))
        for shape in shapes:
            progress.begin(f"{shape.title}: {counted(len(todo[shape]), 'setting')} timed in one loop, rows at its end")
            settings = [point.setting for point in todo[shape]]
            if group is None:  # only some ranks may have one
                yield shape, _failed(settings, failure)
            else:
                yield shape, measure_shape(job, shape, settings, group, context, progress.tell)
            progress.end()
        if group is not None:
            group.close()
    progress.close()


def measure_shape(
    job: JobConfig,
    shape: Shape,
    settings: Sequence[OverlapConfig],
    group: ExpertGroup,
    context: RankContext,
    tell: Callable[[str], None] = lambda _: None,
) -> Sequence[Measured]:
    """Measure distinct settings of one shape, interleaved; what fails is part of the result (collective)."""

    def measure() -> Sequence[Measured]:
        dtype = activation_dtype(job.train.dtype, context.device)
        problem = Problem.create(shape.moe, shape.parallel, shape.tokens, dtype)
        return measure_layer(problem, settings, group, rounds=job.sweep.rounds, tell=tell)

    measured, failure = attempt(measure, context.device, world(context))
    return measured or _failed(settings, failure)


def _failed(settings: Sequence[OverlapConfig], failure: str) -> list[Measured]:
    return [Measured(setting=setting, ms=None, failure=failure) for setting in settings]


def world(context: RankContext) -> dist.ProcessGroup | None:
    """All ranks; ``None`` is a rank alone."""
    return dist.group.WORLD if context.world_size > 1 else None


def make_group(
    job: JobConfig, moe: MoEConfig, parallel: ParallelConfig, max_tokens: int, context: RankContext
) -> ExpertGroup:
    """The ranks that measure a layer of the job's type, over its communicator (collective)."""
    return make_expert_group(
        moe,
        parallel,
        max_tokens=max_tokens,
        dtype=activation_dtype(job.train.dtype, context.device),
        device=context.device,
        backend=job.comm.backend,
        timeout_s=job.comm.timeout_s,
    )


def _facts(results: Mapping[Point, Measured], folder: Path, num_measured: int) -> dict[str, Any]:
    best = [
        {"model": shape.model, "ep": shape.parallel.ep, "tp": shape.parallel.tp, "tokens": shape.tokens,
         "setting": asdict(point.setting), "ms": results[point].ms}
        for shape, point in best_points(results).items()
    ]  # fmt: skip
    return {
        "task": "sweep",
        "points": len(results),
        "measured_now": num_measured,
        "failed": sum(item.ms is None for item in results.values()),
        "first_failure": next((item.failure for item in results.values() if item.ms is None), None),
        "best": best,
        "output_dir": str(folder),
    }
