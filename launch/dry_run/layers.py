"""What ``--dry-run`` of ``tune``, ``explain``, ``sweep`` and ``modular`` prints: settings, and bytes of each shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comet.jobs.config import JobConfig, activation_dtype
from comet.launch.dry_run.train import MIB, check_overlap, resolved_yaml
from comet.launch.tasks.modular import find_parts, tokens_of
from comet.launch.tasks.tuning import load_models
from comet.layer.workspace import WorkspaceShape, rank_pool_bytes
from comet.measure.job import job_points, require_this_machine
from comet.measure.sweep import Shape, sweep_points
from comet.tuner.problem import Problem


def describe_tune(container: Mapping[str, Any], job: JobConfig, num_ranks: int, *, on_gpu: bool) -> str:
    """The text of a dry run, as ``comet.launch.dry_run.train.describe``; refuses what the task would."""
    require_this_machine(job)
    shapes = [shape for shape, _ in tuned_shapes(job, on_gpu=on_gpu)]
    return describe_shapes(container, job, shapes, num_ranks, on_gpu=on_gpu)


def describe_explain(container: Mapping[str, Any], job: JobConfig, num_ranks: int, *, on_gpu: bool) -> str:
    """The text for ``explain``: what measuring each shape would need; ``overlap`` has to be possible as well."""
    is_h200 = job.tune.machine == "h200"
    points = tuned_shapes(job, on_gpu=on_gpu or is_h200)
    for _, problem in points:
        check_overlap(job.overlap, problem, on_gpu=on_gpu or is_h200, is_h200=is_h200)
    return describe_shapes(container, job, [shape for shape, _ in points], num_ranks, on_gpu=on_gpu or is_h200)


def describe_sweep(container: Mapping[str, Any], job: JobConfig, num_ranks: int, *, on_gpu: bool) -> str:
    """The text for ``sweep``; a shape that cannot run is no error, as it is none in a sweep."""
    shapes = list(dict.fromkeys(point.shape for point in sweep_points(job, load_models(job.sweep.models))))
    return describe_shapes(container, job, shapes, num_ranks, on_gpu=on_gpu)


def describe_modular(container: Mapping[str, Any], job: JobConfig, num_ranks: int, *, on_gpu: bool) -> str:
    """The text for ``modular``, of the one shape whose parts are matched."""
    find_parts(job)
    shape = Shape(model=job.model.name, moe=job.model.moe, parallel=job.parallel, tokens=tokens_of(job))
    return describe_shapes(container, job, [shape], num_ranks, on_gpu=on_gpu)


def tuned_shapes(job: JobConfig, *, on_gpu: bool) -> list[tuple[Shape, Problem]]:
    """The points of ``tune`` and ``explain``."""
    points = job_points(job, load_models(job.tune.models), torch.device("cuda" if on_gpu else "cpu"))
    return [
        (Shape(model=name, moe=problem.moe, parallel=problem.parallel, tokens=problem.num_tokens), problem)
        for name, problem in points
    ]


def describe_shapes(
    container: Mapping[str, Any], job: JobConfig, shapes: Sequence[Shape], num_ranks: int, *, on_gpu: bool
) -> str:
    """YAML, then a line of comment for each shape."""
    dtype = activation_dtype(job.train.dtype, torch.device("cuda" if on_gpu else "cpu"))
    lines = [
        f"# {num_ranks} {'GPUs' if on_gpu else 'CPU ranks'}",
        "# memory of one rank, MiB, beside its tokens and what is computed from them",
        f"#   {'':<44} {'pool':>12} {'one layer':>12} {'total':>12}",
    ]
    for shape in shapes:
        try:
            pool, weights = shape_bytes(shape, num_ranks, dtype)
            text = " ".join(f"{size / MIB:>12,.1f}" for size in (pool, weights, pool + weights))
        except ValueError as error:
            text = f"fails: {error}"
        lines.append(f"#   {shape.title:<44} {text}")
    return resolved_yaml(container, job, num_ranks) + "\n".join(lines) + "\n"


def shape_bytes(shape: Shape, num_ranks: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of symmetric memory, and of a rank's part of one layer's routed experts.

    Example: E=8, D=64, F=128, K=2, EP=2, 100 tokens, float32: 144384 and 3 * 64 * 128 * 4 * 4 = 393216.
    """
    moe, parallel = shape.moe, shape.parallel
    parallel.check(moe)
    parallel.check_world(num_ranks)
    pool = rank_pool_bytes(WorkspaceShape.create(moe, parallel.world_size, shape.tokens, dtype), parallel)
    return pool, 3 * moe.hidden_size * moe.ffn_size * moe.num_experts // parallel.world_size * dtype.itemsize
