"""The tasks ``tune`` and ``sweep``, with the models of the configuration groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comet.config import MoEConfig
from comet.jobs.config import JobConfig
from comet.launch.config import compose
from comet.launch.distributed import LaunchContext
from comet.launch.schema import build
from comet.measure import sweep, tune
from comet.models.config import ModelConfig


def sweep_job(config: JobConfig, context: LaunchContext) -> dict[str, Any]:
    """Sweep (collective)."""
    return sweep.run_sweep(config, context, load_models)


def load_models(names: Sequence[str]) -> dict[str, MoEConfig]:
    """The MoE layers of the models called ``names``; raises ``ValueError`` that lists the models for a wrong name."""
    return {name: build(ModelConfig, compose([f"model={name}"])["model"], "model").moe for name in names}


def tune_job(config: JobConfig, context: LaunchContext) -> dict[str, Any]:
    """Tune (collective)."""
    return tune.tune_job(config, context, load_models)
