"""The tasks ``sweep`` and ``tune``: measure settings of layer calls in one job on all ranks, whatever fails.

All settings of a problem (a model's layer in one layout with a number of tokens) are timed in one loop. A sweep
measures a grid of settings and keeps all rows in a CSV file, from which a later run continues. A tuning measures
candidates and keeps the fastest of each problem in the machine's profile.

Rank 0 decides what is measured, sends that to the others, and alone writes: rows as soon as a problem is measured, then
a table and one JSON object, and its progress to standard error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comet.comm import resolve_backend
from comet.comm.base import require_memory
from comet.config import OverlapConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig, SweepJob, TuneJob
from comet.layer.group import ExpertGroup, agree_on_kernels
from comet.schedule.choice import (
    Machine,
    Problem,
    counted,
    default_setting,
    effective,
    setting_name,
)
from comet.schedule.table import Measured, Profile, Table, fastest, key_of
from comet.training.ranks import RankContext, from_first_rank
from comet.training.run_folder import FolderLock
from comet.tuner.layers import Setting, attempt, make_group, measure_layer, problems_of, with_pool
from comet.utils.progress import Measuring
from comet.utils.shared_file import require_writable
from comet.utils.tables import aligned
from comet.version import comet_version

CSV_NAME, PLOT_NAME = "sweep.csv", "sweep.png"
MAX_COLUMNS, SUBPLOT_INCHES = 3, (5.0, 3.6)
SPLITS = (8, 16, 32)  # comm blocks that a tuning tries
PANELS = (1, 2, 3, 4, 6, 8)

Points = dict[Problem, list[Setting]]
Results = Mapping[Problem, Sequence[Measured]]  # all settings of each problem


def sweep_points(job: SweepJob, device: torch.device) -> Points:
    """The grid of ``job.sweep``; the job stands in for empty lists.

    Example: 2 models, 1 layout, 2 tokens, 3 comm_blocks and 2 panels are 4 problems of 6 settings.
    """
    sweep, overlap = job.sweep, job.overlap or OverlapConfig()
    layouts = [replace(job.parallel, ep=ep, tp=tp) for ep, tp in sweep.layouts] or [job.parallel]
    settings = dict.fromkeys(
        OverlapConfig(comm_blocks=blocks, num_panels=panels)
        for panels in sweep.num_panels or (overlap.num_panels,)
        for blocks in sweep.comm_blocks or (overlap.comm_blocks,)
    )
    return {problem: list(settings) for problem in problems_of(sweep, job, layouts, device)}


def tune_points(job: TuneJob, device: torch.device) -> Points:
    """The candidates of ``job.tune``; raises ``ValueError`` where a layer does not divide over the ranks."""
    problems = problems_of(job.tune, job, [job.parallel], device)
    for problem in problems:
        problem.parallel.check(problem.moe)
    return {problem: candidates(problem) for problem in problems}


def candidates(problem: Problem) -> list[Setting]:
    """The settings that are worth measuring, each launch once.

    These are plain, the default, all panels, and splits with the default's panels. With the default among them, a
    tuned layer is never slower than an untuned one.
    """
    default = effective(default_setting(problem), problem)
    colocated = [effective(OverlapConfig(num_panels=panels), problem) for panels in PANELS]
    splits = [replace(default, comm_blocks=blocks) for blocks in SPLITS]
    return [None, *dict.fromkeys([default, *colocated, *splits])]


def job_columns(job: JobConfig, rounds: int, context: RankContext) -> dict[str, object]:
    """Values of the columns that all rows of a job share (collective)."""
    return dict(
        device=Machine.of(context.device).name,
        world_size=context.world_size,
        backend=resolve_backend(job.comm.backend, context.device),
        version=comet_version(),
        kernels="auto" if agree_on_kernels(context.device, dist.group.WORLD) else "triton",
        rounds=rounds,
    )


def sweep_job(job: SweepJob, context: RankContext) -> dict[str, Any]:
    """Measure the points of which the CSV file holds no time yet (collective).

    Rank 0 has printed the table and, as the last line, the facts that are returned.
    """
    columns = job_columns(job, job.sweep.rounds, context)
    folder = Path(job.output_dir)
    log = Table(folder / CSV_NAME)
    with FolderLock(folder, f"output_dir={job.output_dir!r}") as lock:

        def prepare() -> tuple[Points, Points]:
            points = sweep_points(job, context.device)
            lock.acquire()
            log.rows = Table.load(log.path).rows
            todo = pending(points, log, columns)
            counts = [sum(map(len, each.values())) for each in (points, todo)]
            text = f"sweep of {counted(counts[0], 'point')}, {counts[1]} to measure in {folder}"
            sys.stderr.write(f"comet: {text}; stopped, it goes on by the same command with output_dir={folder}\n")
            return points, todo

        points, todo = from_first_rank(prepare)
        for problem, measured in measure_all(job, todo, job.sweep.rounds, context):
            if context.rank == 0:
                log.put(key_of(problem.columns() | columns), measured)

        def finish() -> Results:
            keys = {problem: key_of(problem.columns() | columns) for problem in points}
            results = {each: [log.rows[keys[each], setting] for setting in points[each]] for each in points}
            plot_sweep(results, folder / PLOT_NAME)
            return results

        where = {"measured_now": sum(map(len, todo.values())), "output_dir": str(folder)}
        return report("sweep", from_first_rank(finish), where, context.rank)


def pending(points: Points, log: Table, columns: dict[str, object]) -> Points:
    """The settings to measure of each problem: all if one is new, because times of two runs do not compare.

    Else those without a time: the reason why they failed may be gone by now.
    """
    todo: Points = {}
    for problem, settings in points.items():
        known = {setting: log.rows.get((key_of(problem.columns() | columns), setting)) for setting in settings}
        failed = [setting for setting, item in known.items() if item is not None and item.ms is None]
        todo[problem] = settings if None in known.values() else failed
    return {problem: left for problem, left in todo.items() if left}


def tune_job(job: TuneJob, context: RankContext) -> dict[str, Any]:
    """Measure the candidates of each problem (collective); the fastest is stored as soon as it is known.

    Rank 0 has printed the table and, as the last line, the facts that are returned.
    """
    columns, machine = job_columns(job, job.tune.rounds, context), Machine.of(context.device)
    stores = machine.name != "cpu"  # Times of CPU ranks are noise, and a stored one would change later trainings.

    def prepare() -> tuple[Profile, Points]:
        profile = Profile.open(Path(job.tune.profiles), machine.name, job.parallel.world_size)
        if stores:
            require_writable(profile.path, f"tune.profiles={job.tune.profiles!r}")
        else:
            sys.stderr.write("comet: no profile is stored: times of CPU ranks are noise; tune on GPUs\n")
        return profile, tune_points(job, context.device)

    profile, points = from_first_rank(prepare)
    group = make_group(job, next(iter(points)), context)
    require_memory(group.comm, "tune", "tune a group of one node's ranks")
    results: dict[Problem, Sequence[Measured]] = {}
    for problem, measured in measure_all(job, points, job.tune.rounds, context, group):
        results[problem] = measured
        if context.rank == 0 and stores and (best := fastest(measured)):
            profile.put(key_of(problem.columns() | columns), best)
    where = {"profile": str(profile.path) if stores else None}
    return report("tune", results, where, context.rank)


def measure_all(
    job: JobConfig, todo: Points, rounds: int, context: RankContext, group: ExpertGroup | None = None
) -> Iterator[tuple[Problem, Sequence[Measured]]]:
    """Yield each problem with what was found of its settings (collective); problems of one layout share a group."""
    progress = Measuring(len(todo), "shape", enabled=context.rank == 0)
    for problem, settings in todo.items():
        progress.begin(f"{problem.title}: {counted(len(settings), 'setting')} timed in one loop, rows at its end")
        measured, failure = None, ""
        if group is not None and group.parallel != problem.parallel:
            group.close()
            group = None
        if group is None:
            group, failure = attempt(partial(make_group, job, problem, context), context.device, dist.group.WORLD)
        if group is not None:
            measure = partial(measure_problem, problem, settings, group, rounds, progress)
            measured, failure = attempt(measure, context.device, dist.group.WORLD, group.workspace, final_ends=True)
        yield problem, measured or [Measured(setting=each, ms=None, failure=failure) for each in settings]
        progress.end()
    if group is not None:
        group.close()
    progress.close()


def measure_problem(
    problem: Problem, settings: Sequence[Setting], group: ExpertGroup, rounds: int, progress: Measuring
) -> Sequence[Measured]:
    """Measure distinct settings in a pool of the problem's size (collective)."""
    problem.parallel.check(problem.moe)
    return measure_layer(problem, settings, with_pool(group, problem), rounds=rounds, tell=progress.tell)


def report(task: str, results: Results, where: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the facts of a task; rank 0 prints a line for each point and, as the last line, the facts.

    The fastest point of each problem carries a star, a failed one its reason.
    """
    lines: list[tuple[str, ...]] = [("model", "EP", "TP", "tokens", "setting", "ms", "")]
    rows, best = [], []
    for problem, measured in results.items():
        named = {name: value for name, value in problem.columns().items() if name in ("model", "ep", "tp", "tokens")}
        first = fastest(measured)
        best += [named | asdict(first)] if first else []
        for item in measured:
            rows.append(named | asdict(item))
            time, note = ("failed", item.failure) if item.ms is None else (f"{item.ms:.4f}", "*" * (item is first))
            lines.append((*map(str, named.values()), setting_name(item.setting), time, note))
    failures = [row["failure"] for row in rows if row["ms"] is None]
    facts = {"task": task, "points": len(rows), "failed": len(failures), "first_failure": next(iter(failures), None)}
    facts |= {**where, "best": best, "measured": rows}
    if rank == 0:
        sys.stdout.write("\n".join([*aligned(lines, left=(0, 4, 6)), "", json.dumps(facts)]) + "\n")
    if not best:
        raise NothingMeasuredError(f"{task}: none of {len(rows)} points ran, the first: {failures[0]}")
    return facts


def plot_sweep(results: Results, path: Path) -> None:
    """Draw all points that ran as a PNG; a problem without any keeps an empty subplot."""
    from matplotlib.figure import Figure

    columns = min(len(results), MAX_COLUMNS)
    rows = math.ceil(len(results) / columns)
    size = (SUBPLOT_INCHES[0] * columns, SUBPLOT_INCHES[1] * rows)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    for (problem, measured), axes in zip(results.items(), grid, strict=False):
        ran = sorted((item.setting.num_panels, item.setting.comm_blocks, item.ms)
                     for item in measured if item.setting and item.ms)  # fmt: skip
        for panels, line in groupby(ran, key=lambda point: point[0]):
            axes.plot(*zip(*(point[1:] for point in line), strict=True), "o-", label=counted(panels, "panel"))
        title = problem.title if ran else f"{problem.title}: every setting failed"
        axes.set(xlabel="communication blocks", ylabel="ms", title=title)
        if ran:
            axes.set_ylim(0, 1.1 * max(ms for _, _, ms in ran))
            axes.set_xticks(sorted({blocks for _, blocks, _ in ran}))
            axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
