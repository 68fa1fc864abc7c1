"""Dry runs of each task: they print the resolved settings and the bytes one rank will need, and start nothing.

It touches no GPU either, unless ``overlap`` is given: then it asks how many SMs there are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from comet.comm.nodes import ranks_in_words
from comet.experts.budget import ExpertBudget
from comet.generation.job import check_files, plan_experts
from comet.jobs.config import GenerateJob, JobConfig, ModelJob, TrainJob, activation_dtype
from comet.launch.memory import PROBLEMS, generation_needs, layer_bytes, training_needs
from comet.layer.paths import why_plain_trains
from comet.layer.workspace import rank_pool_bytes
from comet.schedule.choice import Machine, Problem, check_setting
from comet.schedule.network import Rates, best_runs, expected_rows, layer_times, row_bytes
from comet.training.checkpoint_folder import find_checkpoints, list_checkpoints
from comet.training.data import read_corpus
from comet.training.run_folder import RunFolder
from comet.training.saved_settings import to_yaml

MIB = 2**20
SHOWN_NODES = 4  # A dry run names the ranks of so many nodes.
PATHS_WITHOUT_OVERLAP = ("plain", "reference")


def resolved_yaml(container: Mapping[str, Any], job: JobConfig, num_ranks: int) -> str:
    """The composed settings with what was open filled in."""
    return to_yaml({**container, "nproc": num_ranks, "parallel": asdict(job.parallel)})


def describe_train(job: TrainJob, num_ranks: int, device: torch.device) -> list[str]:
    """Comment lines with a table, which follow the settings; the type of ``device`` decides an open element type."""
    tokens, dtype = job.step_tokens, activation_dtype(job.train.dtype, device)
    check_model_overlap(job, dtype, device)
    corpus = read_corpus(job.data, job.model.context, job.model.vocab_size)
    folder = RunFolder(job, attempt=0)
    folder.require_own([found.path for found in list_checkpoints(folder.folder)[0]])
    checkpoints, _ = find_checkpoints(job.resume, job.output_dir)
    for checkpoint in checkpoints[:1]:
        checkpoint.check_model(job.model)
    needs, unit = training_needs(job, num_ranks, dtype), corpus.vocabulary.unit
    needs["total"] = sum(needs.values())
    return [
        *([f"# warning: {job.model.moe.caution}"] if job.model.moe.caution else []),
        f"# {corpus.source}: {len(corpus.train):,} {unit}s to learn from, {len(corpus.heldout):,} held out",
        *(f"# goes on from {checkpoint.path}, if its files are whole" for checkpoint in checkpoints[:1]),
        f"# {counted_ranks(num_ranks, device)}: {num_ranks // job.parallel.world_size} data-parallel groups of "
        f"ep={job.parallel.ep} x tp={job.parallel.tp}, {tokens} tokens per rank and step",
        *describe_nodes(job, tokens, dtype, device),
        "# memory of one rank, MiB",
        *table(needs),
    ]


def describe_nodes(job: TrainJob, tokens: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Lines for groups over declared nodes: their ranks, what each sends over the network, and how much is hidden."""
    parallel, moe, layers = job.parallel, job.model.moe, job.model.num_layers - job.model.dense_layers
    if not parallel.declares_nodes or not parallel.ranks_with_memory or job.moe_path in PATHS_WITHOUT_OVERLAP:
        return []
    problem, by_kernels = Problem(moe, parallel, tokens, dtype), job.comm.backend != "auto" and job.moe_path != "twin"
    replays = by_kernels and job.train.cuda_graph != "off"
    if device.type == "cuda" and job.moe_path == "auto" and not replays and (faster := why_plain_trains(problem)):
        return [f"# {faster}"]
    size, rates = parallel.ranks_with_memory, Rates()
    legs = (rank_pool_bytes(problem, job.comm.backend) - rank_pool_bytes(problem)) / MIB
    carriers = f"kernels, through {legs:,.1f} MiB of symmetric memory" if by_kernels else "collectives, which hide less"
    runs = best_runs(problem, rates)
    times = layer_times(problem, rates, runs if by_kernels else runs._replace(parts=min(runs.parts, 1)))
    rows, nodes = layers * expected_rows(moe, parallel, tokens), parallel.world_size // size
    shown = [ranks_in_words(range(node * size, node * size + size)) for node in range(min(nodes, SHOWN_NODES))]
    rest = f"; and so on to rank {parallel.world_size - 1}" if nodes > SHOWN_NODES else ""
    return [
        f"# groups over {nodes} nodes of {size} ranks; nodes of the first group: {'; '.join(shown)}{rest}",
        f"# with uniform routing a rank sends {rows:,.0f} tokens a step to other nodes, and "
        f"{rows * row_bytes(moe, dtype.itemsize, trains=True) / MIB:,.1f} MiB over the network, by {carriers}",
        f"# expected of H200 with {rates.network_gbs:g} GB/s of network each: a layer's forward pass takes "
        f"{times.layer:.3g} ms, and {times.hidden:.0%} of the {times.network:.3g} ms of its network are hidden",
    ]


def describe_generate(job: GenerateJob, num_ranks: int, device: torch.device) -> list[str]:
    """The lines for ``generate``: the bytes of a rank, and what a budget puts in host memory and in files."""
    dtype = activation_dtype(job.generate.dtype, device)
    check_model_overlap(job, dtype, device)
    budget = plan_experts(job, dtype)
    if job.generate.source is not None:
        check_files(job)
    lines = [
        f"# {counted_ranks(num_ranks, device)}: {num_ranks // job.parallel.world_size} equal groups of "
        f"ep={job.parallel.ep} x tp={job.parallel.tp}, {max(len(job.generate.texts), 1)} sequences",
        "# memory of one rank, MiB, where every byte of a prompt is a token",
        *table(generation_needs(job, dtype, budget)),
    ]
    if budget is None:
        return lines
    in_host = budget.options.expert_store == "host"
    stored = f" in {budget.options.stored}" if budget.options.stored else ""
    sizes = {f"all experts{stored}, in {'host memory' if in_host else 'files'}": budget.store_bytes}
    if not in_host:
        sizes[f"{budget.num_places} of them in host memory as well"] = budget.host_bytes
    sizes["memory of this host"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        *lines,
        f"# experts on the device: {budget.num_slots} of {budget.num_held} in each of {budget.num_layers} layers; MiB",
        *table(sizes),
        f"# prefetch: {prefetch_told(budget, device)}",
    ]


def describe_problems(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """A line for each problem that a task measures; one that cannot run is no error, as it is none in a sweep."""
    lines = [
        f"# {counted_ranks(num_ranks, device)}",
        "# memory of one rank, MiB, without its tokens and what is computed from them",
        f"#   {'':<44} {'pool':>12} {'one layer':>12} {'total':>12}",
    ]
    for problem in PROBLEMS[type(job)](job, device):
        try:
            pool, weights = layer_bytes(problem, num_ranks)
            text = " ".join(f"{size / MIB:>12,.1f}" for size in (pool, weights, pool + weights))
        except ValueError as error:
            text = f"fails: {error}"
        lines.append(f"#   {problem.title:<44} {text}")
    return lines


def counted_ranks(num_ranks: int, device: torch.device) -> str:
    return f"{num_ranks} {'GPUs' if device.type == 'cuda' else 'CPU ranks'}"


def table(sizes: Mapping[str, int]) -> list[str]:
    return [f"#   {name:<32} {size / MIB:>12,.1f}" for name, size in sizes.items()]


def prefetch_told(budget: ExpertBudget, device: torch.device) -> str:
    """Say what ``expert_prefetch`` comes to: ``auto`` of a host store is "off (expert_prefetch=auto)" on a CPU."""
    options = budget.options
    is_on = options.prefetches(device, useful=options.expert_store == "host" and budget.num_slots < budget.num_held)
    condition = ", where host memory can be pinned" if is_on and device.type == "cuda" else ""
    return f"{'on' if is_on else 'off'}{condition} (expert_prefetch={str(options.expert_prefetch).lower()})"


def check_model_overlap(job: ModelJob, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` if the layers of the job's model would refuse ``overlap``, for however many tokens."""
    if job.overlap is not None and job.moe_path not in PATHS_WITHOUT_OVERLAP:
        check_setting(job.overlap, Problem(job.model.moe, job.parallel, 1, dtype), Machine.of(device))
