"""What ``--dry-run`` of ``tune``, ``sweep`` and ``modular`` prints: settings, and bytes of each shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from comet.jobs.config import JobConfig, activation_dtype
from comet.launch.dry_run.train import MIB, counted_ranks
from comet.launch.tasks.modular import find_parts, tokens_of
from comet.layer.workspace import WorkspaceShape, rank_pool_bytes
from comet.measure.layers import Shape
from comet.measure.sweep import sweep_points
from comet.measure.tune import job_points


def describe_tune(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """Comment lines, as ``comet.launch.dry_run.train.describe`` has them."""
    return describe_shapes(job, job_points(job, device), num_ranks, device)


def describe_sweep(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """The lines for ``sweep``; a shape that cannot run is no error, as it is none in a sweep."""
    shapes = dict.fromkeys(point.shape for point in sweep_points(job))
    return describe_shapes(job, shapes, num_ranks, device)


def describe_modular(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """The lines for ``modular``, of the one shape whose parts are matched."""
    find_parts(job)
    shape = Shape(model=job.model.name, moe=job.model.moe, parallel=job.parallel, tokens=tokens_of(job))
    return describe_shapes(job, [shape], num_ranks, device)


def describe_shapes(job: JobConfig, shapes: Iterable[Shape], num_ranks: int, device: torch.device) -> list[str]:
    """A line for each shape."""
    dtype = activation_dtype(job.train.dtype, device)
    lines = [
        f"# {counted_ranks(num_ranks, device)}",
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
    return lines


def shape_bytes(shape: Shape, num_ranks: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of symmetric memory, and of a rank's part of one layer's routed experts.

    Example: E=8, D=64, F=128, K=2, EP=2, 100 tokens, float32: 144384 and 3 * 64 * 128 * 4 * 4 = 393216.
    """
    moe, parallel = shape.moe, shape.parallel
    parallel.check(moe)
    parallel.check_world(num_ranks)
    pool = rank_pool_bytes(WorkspaceShape.create(moe, parallel.world_size, shape.tokens, dtype), parallel)
    return pool, 3 * moe.hidden_size * moe.ffn_size * moe.num_experts // parallel.world_size * dtype.itemsize
