"""The ``sweep`` task: measure every point inside one job, whatever fails on the way.

All points share the job's process group. Rank 0 expands the lists, decides what is still to be measured, tells the
others and alone writes: the CSV file after every shape, whose points are timed in one loop, then the table, the picture
and one JSON object; and its progress to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from comet.config import MoEConfig, OverlapConfig, ParallelConfig, require
from comet.errors import NothingMeasuredError
from comet.group import ExpertGroup, make_expert_group
from comet.progress import Measuring
from comet.training.config import JobConfig
from comet.training.ranks import RankContext, from_first_rank
from comet.training.run import activation_dtype
from comet.training.run_folder import FolderLock
from comet.tuner.layers import counted
from comet.tuner.machine import Machine
from comet.tuner.measure import first_failure, measure_layer, reason
from comet.tuner.problem import Problem
from comet.tuner.shared_file import require_writable
from comet.tuner.sweep import Outcome, Point, Shape, SweepLog, best_points, plot_sweep, sweep_points, sweep_table

CSV_NAME, PLOT_NAME = "sweep.csv", "sweep.png"

Todo = dict[Shape, list[Point]]


def run_sweep(
    job: JobConfig, context: RankContext, load_models: Callable[[Sequence[str]], Mapping[str, MoEConfig]]
) -> dict[str, Any]:
    """Measure the points of which the CSV file holds no time yet (collective).

    Args:
        job: Lists of the sweep; ``resume`` names the folder to continue in, ``output_dir`` otherwise.
        context: This rank.
        load_models: From names to layers; called on rank 0.

    Returns:
        The facts, equal on all ranks; rank 0 has printed the table and, as the last line, these facts.

    Raises:
        ValueError: If a setting breaks its rule, every point does, or the CSV file cannot be read or written.
        NothingMeasuredError: If every point failed, now or before; one that fails beside others is no error.
    """
    name, value = folder_setting(job)
    with FolderLock(Path(value), f"{name}={value!r}") as lock:
        return _sweep_into(lock, job, context, load_models)


def _sweep_into(
    lock: FolderLock,
    job: JobConfig,
    context: RankContext,
    load_models: Callable[[Sequence[str]], Mapping[str, MoEConfig]],
) -> dict[str, Any]:
    dtype, device = str(activation_dtype(job.train.dtype, context.device)), Machine.of(context.device).name
    name, folder = folder_setting(job)[0], lock.folder
    log = SweepLog(folder / CSV_NAME)

    def prepare() -> tuple[list[Point], Todo]:
        require(name == "output_dir" or log.path.exists(), f"resume={job.resume!r} must be a folder with {CSV_NAME}")
        points = sweep_points(job, load_models(job.sweep.models))
        lock.acquire()
        require_writable(log.path, lock.setting)
        broken = {point.key(dtype, device): point.broken_rule for point in points if point.broken_rule}
        log.put({key: Outcome(ms=None, failure=f"ValueError: {rule}") for key, rule in broken.items()})
        return points, pending(points, log, dtype, device)

    points, todo = from_first_rank(prepare)
    if context.rank == 0:
        told = f"sweep of {counted(len(points), 'point')}, {sum(map(len, todo.values()))} to measure in {folder}"
        sys.stderr.write(f"comet: {told}\n")
    for shape, outcomes in _measure_all(job, todo, context):
        if context.rank == 0:
            log.put({point.key(dtype, device): item for point, item in zip(todo[shape], outcomes, strict=True)})

    def finish() -> dict[str, Any]:
        results = {point: log.rows[point.key(dtype, device)] for point in points}
        plot_sweep(results, folder / PLOT_NAME)
        facts = _facts(results, folder, sum(map(len, todo.values())))
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
    """The points of each shape of which the log holds no time: why one failed then may be gone by now.

    Points whose knobs break a rule are left out.
    """
    todo: Todo = {}
    for point in points:
        known = log.rows.get(point.key(dtype, device))
        if not point.broken_rule and (known is None or known.ms is None):
            todo.setdefault(point.shape, []).append(point)
    return todo


def _measure_all(job: JobConfig, todo: Todo, context: RankContext) -> Iterator[tuple[Shape, list[Outcome]]]:
    """Yield each shape with the outcomes of its points; shapes of one layer and layout share a group and its memory."""
    families: dict[tuple[MoEConfig, ParallelConfig], list[Shape]] = {}
    for shape in todo:
        families.setdefault((shape.moe, shape.parallel), []).append(shape)
    progress = Measuring(len(todo), "shape", enabled=context.rank == 0)
    for shapes in families.values():
        group, failure = _open_group(job, shapes, context)
        for shape in shapes:
            progress.begin(f"{shape.title}: {counted(len(todo[shape]), 'setting')} timed in one loop, rows at its end")
            if group is None:
                yield shape, [Outcome(ms=None, failure=failure)] * len(todo[shape])
            else:
                settings = [point.knobs.setting() for point in todo[shape]]
                yield shape, measure_shape(job, shape, settings, group, context, progress.tell)
            progress.end()
        if group is not None:
            group.close()
    progress.close()


def _open_group(job: JobConfig, shapes: Sequence[Shape], context: RankContext) -> tuple[ExpertGroup | None, str]:
    """A group for all shapes, or ``None`` and the reason; memory of a group only some ranks got is not returned."""
    group: ExpertGroup | None = None
    failure = ""
    try:
        group = make_expert_group(
            shapes[0].moe,
            shapes[0].parallel,
            max_tokens=max(shape.tokens for shape in shapes),
            dtype=activation_dtype(job.train.dtype, context.device),
            device=context.device,
            backend=job.comm.backend,
            timeout_s=job.comm.timeout_s,
        )
    except (RuntimeError, ValueError) as error:
        failure = reason(error)
    failure = _agree(failure, context)
    return (None, failure) if failure else (group, "")


def measure_shape(
    job: JobConfig,
    shape: Shape,
    settings: Sequence[OverlapConfig],
    group: ExpertGroup,
    context: RankContext,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Measure the settings of one shape, interleaved; what fails is part of the result (collective).

    Args:
        job: For ``train.dtype`` and ``sweep.rounds``.
        shape: What is measured; must fit the group's workspace.
        settings: Distinct settings.
        group: The ranks.
        context: This rank.
        tell: Called with what is being done.

    Returns:
        One outcome per setting, in their order.
    """
    failure = ""
    try:
        dtype = activation_dtype(job.train.dtype, context.device)
        problem = Problem.create(shape.moe, shape.parallel, shape.tokens, dtype)
        measured = measure_layer(problem, settings, group, rounds=job.sweep.rounds, tell=tell)
    except (RuntimeError, ValueError) as error:
        failure = reason(error)
    failure = _agree(failure, context)
    if failure:
        return [Outcome(ms=None, failure=failure)] * len(settings)
    return [Outcome(ms=item.ms, failure=item.failure) for item in measured]


def _agree(failure: str, context: RankContext) -> str:
    """The first failure of any rank; this is also the barrier between points, and ends the job if a rank is gone."""
    return first_failure(failure, dist.group.WORLD if context.world_size > 1 else None)


def _facts(results: Mapping[Point, Outcome], folder: Path, num_measured: int) -> dict[str, Any]:
    best = [
        {
            "model": shape.model,
            "ep": shape.parallel.ep,
            "tp": shape.parallel.tp,
            "tokens": shape.tokens,
            "setting": point.knobs._asdict(),
            "ms": results[point].ms,
        }
        for shape, point in best_points(results).items()
    ]
    return {
        "task": "sweep",
        "points": len(results),
        "measured_now": num_measured,
        "failed": sum(item.ms is None for item in results.values()),
        "first_failure": next((item.failure for item in results.values() if item.ms is None), None),
        "best": best,
        "output_dir": str(folder),
    }
