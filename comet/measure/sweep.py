"""The ``sweep`` task: measure a grid of points in one job on all ranks, whatever fails; a table, a CSV file, a picture.

A shape is a model's layer in one layout with a number of tokens; a point is a shape with one value of each knob. Points
share the job's process group. Rank 0 expands the lists, decides what is still to be measured, sends that to the
others, and alone writes: after every shape, whose points are timed in one loop, the CSV file from which a later run
continues; then the table, the picture and one JSON object; and its progress to standard error.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from comet.comm import resolve_backend
from comet.config import MoEConfig, OverlapConfig, ParallelConfig, require
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig, activation_dtype
from comet.layer.group import ExpertGroup, agree_on_kernels
from comet.measure.layers import Shape, attempt, make_group, measure_layer, shapes_of, with_pool
from comet.training.ranks import RankContext, from_first_rank
from comet.training.run_folder import FolderLock
from comet.tuner.problem import Machine, counted
from comet.tuner.profile import Kernels, Measured
from comet.utils.progress import Measuring
from comet.utils.shared_file import require_writable, write_whole
from comet.utils.tables import aligned
from comet.version import comet_version

SHAPE_COLUMNS = tuple("model hidden_size ffn_size num_experts top_k layer ep tp tokens".split())
JOB_COLUMNS = tuple("dtype device world_size backend version kernels rounds".split())
KEY_COLUMNS = (*SHAPE_COLUMNS, *JOB_COLUMNS, "comm_blocks", "num_panels")
COLUMNS = (*KEY_COLUMNS, "ms", "failure")
CSV_NAME, PLOT_NAME = "sweep.csv", "sweep.png"
MAX_COLUMNS, SUBPLOT_INCHES = 3, (5.0, 3.6)


Key = tuple[str, ...]
Todo = dict[Shape, list[OverlapConfig]]
Results = Mapping[Shape, Sequence[Measured]]  # all settings of each shape


def job_key(job: JobConfig, context: RankContext) -> Key:
    """The values of ``JOB_COLUMNS``, which all points of a job share (collective)."""
    kernels: Kernels = "auto" if agree_on_kernels(context.device, dist.group.WORLD) else "triton"
    values = (
        activation_dtype(job.train.dtype, context.device), Machine.of(context.device).name, context.world_size,
        resolve_backend(job.comm.backend, context.device), comet_version(), kernels, job.sweep.rounds,
    )  # fmt: skip
    return tuple(map(str, values))


def row_key(shape: Shape, setting: OverlapConfig, of_job: Key) -> Key:
    """The values of ``KEY_COLUMNS``: what a row of the CSV file is found by."""
    moe = shape.moe
    values = (
        shape.model, moe.hidden_size, moe.ffn_size, moe.num_experts, moe.top_k, _other_traits(moe),
        shape.parallel.ep, shape.parallel.tp, shape.tokens, *of_job, setting.comm_blocks, setting.num_panels,
    )  # fmt: skip
    return tuple(map(str, values))


def _other_traits(moe: MoEConfig) -> str:
    """Traits other than sizes that decide a layer's time: ``swiglu``, or ``geglu, expert_bias=True``."""
    found = {name: getattr(moe, name) for name in ("expert_bias", "capacity_factor", "max_imbalance")}
    named = [f"{name}={value}" for name, value in (moe.activation.parameters | found).items() if value]
    return ", ".join([moe.activation.name, *named])


def sweep_grid(job: JobConfig) -> tuple[list[Shape], list[OverlapConfig]]:
    """Shapes, and the settings that each is measured with, of ``job.sweep``; the job stands in for empty lists.

    Example: 2 models, 1 layout, 2 tokens, 3 comm_blocks and 2 panels are 4 shapes and 6 settings.
    """
    sweep, overlap = job.sweep, job.overlap or OverlapConfig()
    layouts = [replace(job.parallel, ep=ep, tp=tp) for ep, tp in sweep.layouts] or [job.parallel]
    settings = [
        OverlapConfig(comm_blocks=blocks, num_panels=panels)
        for panels in sweep.num_panels or (overlap.num_panels,)
        for blocks in sweep.comm_blocks or (overlap.comm_blocks,)
    ]
    return list(dict.fromkeys(shapes_of(sweep, job, layouts))), list(dict.fromkeys(settings))


@dataclass(slots=True)
class SweepLog:
    """The CSV file of a sweep, of which a killed run leaves complete rows; ``rows`` by ``row_key``."""

    path: Path
    rows: dict[Key, Measured] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> SweepLog:
        """Read the file if there is one; raises ``ValueError`` if it is no CSV file of a sweep.

        An older file may lack ``JOB_COLUMNS``: their values are empty, so that its rows are of another job.
        """
        if not path.exists():
            return cls(path)
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        head = lines[0] if lines else []
        rule = f"must start with the columns {','.join(COLUMNS)}; take another output_dir, or move this file away"
        require(head == [name for name in COLUMNS if name in head or name not in JOB_COLUMNS], f"{path} {rule}")
        rows = {}
        for number, line in enumerate(lines[1:], 2):
            require(len(line) == len(head), f"{path}:{number} must have {len(head)} columns, not {len(line)}")
            named = dict(zip(head, line, strict=True))
            try:
                rows[tuple(named.get(name, "") for name in KEY_COLUMNS)] = _measured(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
        return cls(path, rows)

    def put(self, found: Mapping[Key, Measured]) -> None:
        """Add rows, in memory and in the file, whose folder must exist."""
        self.rows |= found
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key, item in self.rows.items():
            writer.writerow((*key, "" if item.ms is None else f"{item.ms:.6g}", item.failure))
        write_whole(self.path, text.getvalue())


def _measured(line: Sequence[str]) -> Measured:
    comm_blocks, num_panels, ms, failure = line[-4:]
    setting = OverlapConfig(comm_blocks=int(comm_blocks), num_panels=int(num_panels))
    return Measured(setting=setting, ms=float(ms) if ms else None, failure=failure)


def fastest(measured: Sequence[Measured]) -> Measured | None:
    """The first of those that took least; ``None`` where none ran."""
    best = min(measured, key=lambda item: item.time)
    return None if best.ms is None else best


def sweep_table(results: Results) -> str:
    """One aligned line per point; the fastest of each shape carries a star, a failed one its reason."""
    head = ("model", "EP", "TP", "tokens", "comm_blocks", "panels", "ms", "")
    lines: list[tuple[str, ...]] = [head]
    for shape, measured in results.items():
        best = fastest(measured)
        for item in measured:
            assert item.setting is not None, "a sweep has no plain path"
            split = (item.setting.comm_blocks, item.setting.num_panels)
            numbers = (shape.parallel.ep, shape.parallel.tp, shape.tokens, *split)
            time = "failed" if item.ms is None else f"{item.ms:.4f}"
            lines.append((shape.model, *map(str, numbers), time, "*" if item is best else item.failure))
    return "\n".join(aligned(lines, left=(0, len(head) - 1)))


def plot_sweep(results: Results, path: Path) -> None:
    """Draw all points that ran as a PNG; a shape without any keeps an empty subplot that says so."""
    from matplotlib.figure import Figure

    columns = min(len(results), MAX_COLUMNS)
    rows = math.ceil(len(results) / columns)
    size = (SUBPLOT_INCHES[0] * columns, SUBPLOT_INCHES[1] * rows)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    for (shape, measured), axes in zip(results.items(), grid, strict=False):
        lines = sweep_lines(measured)
        for panels, line in lines.items():
            axes.plot(*zip(*line, strict=True), "o-", markersize=4, label=counted(panels, "panel"))
        axes.set(xlabel="communication blocks", ylabel="ms", title=shape.title)
        if lines:
            times = [ms for line in lines.values() for _, ms in line]
            axes.set_ylim(0, 1.1 * max(times))
            axes.set_xticks(sorted({blocks for line in lines.values() for blocks, _ in line}))
            axes.legend(fontsize="small")
        else:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "every setting failed", ha="center", transform=axes.transAxes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def sweep_lines(measured: Sequence[Measured]) -> dict[int, list[tuple[int, float]]]:
    """Lines of one shape: panels -> (comm_blocks, ms) of the settings that ran, ascending."""
    lines: dict[int, list[tuple[int, float]]] = {}
    for item in measured:
        if item.ms is not None and item.setting is not None:
            lines.setdefault(item.setting.num_panels, []).append((item.setting.comm_blocks, item.ms))
    return {name: sorted(line) for name, line in lines.items()}


def sweep_job(job: JobConfig, context: RankContext) -> dict[str, Any]:
    """Measure the points of which the CSV file holds no time yet (collective).

    Rank 0 has printed the table and, as the last line, the facts that are returned.
    """
    of_job = job_key(job, context)
    name, value = ("output_dir", job.output_dir) if job.resume in (None, "auto") else ("resume", str(job.resume))
    folder = Path(value)
    log = SweepLog(folder / CSV_NAME)
    with FolderLock(folder, f"{name}={value!r}") as lock:

        def prepare() -> tuple[list[Shape], list[OverlapConfig], Todo]:
            has_rows = name == "output_dir" or log.path.exists()
            require(has_rows, f"resume={job.resume!r} must be a folder with {CSV_NAME}")
            shapes, settings = sweep_grid(job)
            lock.acquire()
            require_writable(log.path, lock.setting)
            log.rows = SweepLog.load(log.path).rows
            return shapes, settings, pending(shapes, settings, log, of_job)

        shapes, settings, todo = from_first_rank(prepare)
        num_measured = sum(map(len, todo.values()))
        if context.rank == 0:
            told = f"sweep of {counted(len(shapes) * len(settings), 'point')}, {num_measured} to measure in {folder}"
            sys.stderr.write(f"comet: {told}; stopped, it goes on by the same command with {name}={value}\n")
        for shape, measured in _measure_all(job, todo, context):
            if context.rank == 0:
                log.put({row_key(shape, setting, of_job): item
                         for setting, item in zip(todo[shape], measured, strict=True)})  # fmt: skip

        def finish() -> dict[str, Any]:
            results = {shape: [log.rows[row_key(shape, setting, of_job)] for setting in settings] for shape in shapes}
            plot_sweep(results, folder / PLOT_NAME)
            facts = _facts(results, folder, num_measured)
            sys.stdout.write(sweep_table(results) + "\n\n" + json.dumps(facts) + "\n")
            return facts

        facts = from_first_rank(finish)
    if facts["failed"] == facts["points"]:
        raise NothingMeasuredError(f"sweep: none of {facts['points']} points ran, the first: {facts['first_failure']}")
    return facts


def pending(shapes: Sequence[Shape], settings: Sequence[OverlapConfig], log: SweepLog, of_job: Key) -> Todo:
    """The settings to measure of each shape: all if one is new, because times of two runs do not compare.

    Else those without a time: the reason why they failed may be gone by now.
    """
    todo: Todo = {}
    for shape in shapes:
        known = {setting: log.rows.get(row_key(shape, setting, of_job)) for setting in settings}
        failed = [setting for setting, item in known.items() if item is not None and item.ms is None]
        todo[shape] = list(settings) if None in known.values() else failed
    return {shape: left for shape, left in todo.items() if left}


def _measure_all(job: JobConfig, todo: Todo, context: RankContext) -> Iterator[tuple[Shape, Sequence[Measured]]]:
    """Yield each shape with what was found of its points; shapes of one layer and layout share a group."""
    families: dict[tuple[MoEConfig, ParallelConfig], list[Shape]] = {}
    for shape in todo:
        families.setdefault((shape.moe, shape.parallel), []).append(shape)
    progress = Measuring(len(todo), "shape", enabled=context.rank == 0)
    for (moe, parallel), shapes in families.items():
        make = partial(make_group, job, moe, parallel, 1, context)  # each shape has a pool of its own
        group, failure = attempt(make, context.device, dist.group.WORLD)
        for shape in shapes:
            settings = todo[shape]
            progress.begin(f"{shape.title}: {counted(len(settings), 'setting')} timed in one loop, rows at its end")
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
        problem = shape.problem(activation_dtype(job.train.dtype, context.device))
        return measure_layer(problem, settings, with_pool(group, problem), rounds=job.sweep.rounds, tell=tell)

    measured, failure = attempt(measure, context.device, dist.group.WORLD)
    return measured or _failed(settings, failure)


def _failed(settings: Sequence[OverlapConfig], failure: str) -> list[Measured]:
    return [Measured(setting=setting, ms=None, failure=failure) for setting in settings]


def _facts(results: Results, folder: Path, num_measured: int) -> dict[str, Any]:
    points = [item for measured in results.values() for item in measured]
    failures = [item.failure for item in points if item.ms is None]
    best = [
        {"model": shape.model, "ep": shape.parallel.ep, "tp": shape.parallel.tp, "tokens": shape.tokens,
         **{name: value for name, value in asdict(item).items() if name != "failure"}}
        for shape, measured in results.items() if (item := fastest(measured)) is not None
    ]  # fmt: skip
    return {
        "task": "sweep",
        "points": len(points),
        "measured_now": num_measured,
        "failed": len(failures),
        "first_failure": failures[0] if failures else None,
        "best": best,
        "output_dir": str(folder),
    }
