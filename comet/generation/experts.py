"""``generate.expert_budget``: what it puts where, what to expect of it, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from comet.config import require
from comet.experts.budget import ExpertBudget, StoreOptions
from comet.experts.cache import OF_THE_CACHES, CacheReport
from comet.generation.source import is_hf_folder
from comet.jobs.config import JobConfig
from comet.layer.group import ExpertGroup
from comet.models.config import dense_elements


def plan_experts(config: JobConfig, dtype: torch.dtype) -> ExpertBudget | None:
    """Where the experts of ``generate``'s model go; ``None`` without a budget."""
    settings, model = config.generate, config.model
    try:
        options = StoreOptions.of(settings)
        require(
            not options.in_store or not config.parallel.declares_nodes,
            f"expert_budget={settings.expert_budget} must be left out over several nodes: they have no warp decode",
        )
        require(
            settings.expert_store == "host" or is_hf_folder(settings.source),
            f"expert_store={settings.expert_store} must be host for a checkpoint of comet train: only Hugging Face "
            "folders are read expert by expert yet",
        )
        return options.budget(model.moe, model.num_layers - model.dense_layers, dtype, config.parallel)
    except ValueError as error:
        raise ValueError(f"generate.{error}") from error


def expectation(
    config: JobConfig, budget: ExpertBudget, dtype: torch.dtype, link_rate: float | None, memory_rate: float | None
) -> dict[str, float | None]:
    """What uniform routing makes of a budget in decode steps of all prompts at once.

    Tokens per second are ``None`` where a rate (in bytes/s) is unknown, as is that of files.
    """
    expected = None
    if link_rate and memory_rate and budget.store == "host":
        dense, sequences = dense_elements(config.model) * dtype.itemsize, max(len(config.generate.texts), 1)
        expected = budget.expected_tokens_per_second(sequences, dense, link_rate, memory_rate)
    return {"expected_hits": budget.expected_hits, "expected_tokens_per_second": expected}


def cache_facts(before: CacheReport, after: CacheReport, group: ExpertGroup) -> dict[str, Any]:
    """What caches did between two reports of this rank, summed over ranks; seconds are their mean (collective)."""
    report = after.since(before)
    if group.world_size > 1:
        spent = {name: value for name, value in asdict(report).items() if name not in OF_THE_CACHES}
        summed = torch.tensor(list(spent.values()), dtype=torch.float64, device=group.device)
        dist.all_reduce(summed)
        spent = {name: type(spent[name])(value) for name, value in zip(spent, summed.tolist(), strict=True)}
        for name in ("fetching_s", "hosting_s"):
            spent[name] /= group.world_size
        report = replace(report, **spent)
    return asdict(report) | {"hits": report.hits, "prefetch_precision": report.prefetch_precision}
