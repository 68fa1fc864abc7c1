"""The ``tune`` task: ``comet.tuner.job`` with the models of the configuration groups."""

from __future__ import annotations

from typing import Any

from comet.launch.distributed import LaunchContext
from comet.launch.sweep import load_models
from comet.training.config import JobConfig
from comet.tuner import job


def tune_job(config: JobConfig, context: LaunchContext) -> dict[str, Any]:
    """Tune (collective); see ``comet.tuner.job.tune_job``."""
    return job.tune_job(config, context, load_models)
