"""Dry runs of each task: they print the resolved settings and the bytes one rank will need, and start nothing.

It touches no GPU either, unless ``overlap`` is given: then it asks how many SMs there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from comet.decode import shared_columns
from comet.experts.budget import ExpertBudget
from comet.experts.options import PrefetchSetting
from comet.experts.prefetch import prefetches
from comet.generation.job import check_files, plan_experts
from comet.generation.source import is_hf_folder
from comet.jobs.config import JobConfig, activation_dtype
from comet.launch.tasks.modular import find_parts, tokens_of
from comet.layer.workspace import WorkspaceShape, rank_pool_bytes
from comet.layout import ExpertLayout
from comet.measure.layers import Shape
from comet.measure.sweep import sweep_grid
from comet.measure.tune import job_points
from comet.models.cache import allocated_places
from comet.models.config import ModelConfig, dense_elements, expert_elements
from comet.training.checkpoint_folder import find_checkpoints, list_checkpoints
from comet.training.data import read_corpus
from comet.training.run_folder import RunFolder
from comet.training.saved_settings import to_yaml
from comet.tuner.choice import check_setting
from comet.tuner.problem import Machine, Problem

FLOAT32_BYTES = 4
ADAMW_STATES = 2
MIB = 2**20
PATHS_WITHOUT_OVERLAP = ("plain", "reference")


def resolved_yaml(container: Mapping[str, Any], job: JobConfig, num_ranks: int) -> str:
    """The composed configuration with what was open filled in."""
    return to_yaml({**container, "nproc": num_ranks, "parallel": asdict(job.parallel)})


def describe_train(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """Comment lines with a table, which follow the settings.

    Args:
        num_ranks: Ranks that would start.
        device: On which they would run; its type decides the element type where it is left open.
    """
    tokens, dtype = job.step_tokens, activation_dtype(job.train.dtype, device)
    check_model_overlap(job, dtype, device)
    corpus = read_corpus(job.data, job.model.context)
    folder = RunFolder(job, attempt=0)
    folder.require_own([found.path for found in list_checkpoints(folder.folder)[0]])
    checkpoints, _ = find_checkpoints(job.resume, job.output_dir)
    for checkpoint in checkpoints[:1]:
        checkpoint.check_model(job.model)
    needs = training_needs(job, dtype)
    needs["total"] = sum(needs.values())
    return [
        f"# {corpus.source}: {len(corpus.train):,} bytes to learn from, {len(corpus.heldout):,} held out",
        *(f"# goes on from {checkpoint.path}, if its files are whole" for checkpoint in checkpoints[:1]),
        f"# {counted_ranks(num_ranks, device)}: {num_ranks // job.parallel.world_size} data-parallel groups of "
        f"ep={job.parallel.ep} x tp={job.parallel.tp}, {tokens} tokens per rank and step",
        "# memory of one rank, MiB",
        *table(needs),
    ]


def describe_generate(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
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
    where = "host memory" if budget.store == "host" else "files"
    stored = f" in {budget.stored}" if budget.stored else ""
    sizes = {f"all experts{stored}, in {where}": budget.store_bytes}
    if budget.store == "file":
        sizes[f"{budget.places} of them in host memory as well"] = budget.host_bytes
    sizes["memory of this host"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        *lines,
        f"# experts on the device: {budget.slots} of {budget.held} in each of {budget.num_layers} layers, by "
        f"{budget.policy}; MiB",
        *table(sizes),
        f"# prefetch: {prefetch_told(job.generate.expert_prefetch, budget, device)}",
    ]


def describe_tune(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """The lines for ``tune``."""
    return describe_shapes(job, job_points(job, device), num_ranks, device)


def describe_sweep(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """The lines for ``sweep``; a shape that cannot run is no error, as it is none in a sweep."""
    return describe_shapes(job, sweep_grid(job)[0], num_ranks, device)


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


def counted_ranks(num_ranks: int, device: torch.device) -> str:
    """``4 GPUs``, ``2 CPU ranks``."""
    return f"{num_ranks} {'GPUs' if device.type == 'cuda' else 'CPU ranks'}"


def table(sizes: Mapping[str, int]) -> list[str]:
    """Bytes by purpose, as MiB."""
    return [f"#   {name:<32} {size / MIB:>12,.1f}" for name, size in sizes.items()]


def prefetch_told(setting: PrefetchSetting, budget: ExpertBudget, device: torch.device) -> str:
    """Say what ``expert_prefetch`` comes to.

    Example: ``auto`` of a host store is "off (expert_prefetch=auto)" on a CPU.
    """
    is_on = prefetches(setting, device, useful=budget.store == "host" and budget.slots < budget.held)
    condition = ", where host memory can be pinned" if is_on and device.type == "cuda" else ""
    return f"{'on' if is_on else 'off'}{condition} (expert_prefetch={str(setting).lower()})"


def check_model_overlap(job: JobConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` if the layers of the job's model would refuse ``overlap``, for however many tokens."""
    if job.overlap is not None and job.moe_path not in PATHS_WITHOUT_OVERLAP:
        check_setting(job.overlap, Problem(job.model.moe, job.parallel, 1, dtype), Machine.of(device))


def training_needs(job: JobConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes one rank needs, by purpose; activations, of type ``dtype``, are an estimate, all else is float32.

    What is kept for the backward pass, of balanced routing: per token and layer about 8 D for attention and norms; per
    routed row its input and two pre-activations; and the logits with their gradient.
    """
    model, tokens = job.model, job.step_tokens
    parameters = rank_parameters(model, job.parallel.ep, job.parallel.tp) * FLOAT32_BYTES
    shape = WorkspaceShape.create(model.moe, job.parallel.world_size, tokens, dtype)
    of_rows = model.moe.top_k * (model.hidden_size + 2 * model.moe.ffn_size // job.parallel.tp)
    kept = tokens * (model.num_layers * (8 * model.hidden_size + of_rows) + 2 * model.vocab_size)
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer states": ADAMW_STATES * parameters,
        "symmetric memory": rank_pool_bytes(shape, job.parallel),
        "activations (estimate)": kept * dtype.itemsize,
    }


def generation_needs(job: JobConfig, dtype: torch.dtype, budget: ExpertBudget | None = None) -> dict[str, int]:
    """Bytes one rank needs, by purpose.

    A checkpoint's model is read in float32; of a Hugging Face folder each tensor is converted as it is read. Weights
    afterwards count norms, router and embedding as if they had the same dtype, experts kept in FP8 as one byte, and
    none that are in a store. Ranks hold equally many pieces of shared experts, or one less. Without a budget all
    experts are on the device.
    """
    model, ranks = job.model, job.parallel.world_size
    prompts = [len(text.encode("utf-8", "surrogateescape")) for text in job.generate.texts] or [1]
    length = min(model.context, max(prompts) + job.generate.max_new_tokens)
    cached = 2 * model.num_layers * len(prompts) * model.num_kv_heads * allocated_places(length) * model.head_width
    shape = WorkspaceShape.create(model.moe, ranks, -(-len(prompts) * max(prompts) // ranks), dtype)
    weights = rank_parameters(model, job.parallel.ep, job.parallel.tp)
    weights -= 0 if budget is None else expert_elements(model) // ranks
    layout = ExpertLayout.create(model.moe, job.parallel, 0)
    keep_fp8 = job.generate.keep_fp8
    shared_size = 0 if model.moe.expert_bias else model.moe.shared_ffn_size  # a shared expert joins no step then
    columns = shared_columns(layout, model.moe.ffn_size, shared_size)
    piece = 3 * model.hidden_size * model.moe.ffn_size // job.parallel.tp
    moe_layers = model.num_layers - model.dense_layers
    pieces = 0 if budget is not None or job.parallel.declares_nodes else moe_layers * columns * piece
    kept = moe_layers * layout.experts_local * piece if keep_fp8 and budget is None else 0
    bytes_while_loading = dtype.itemsize if is_hf_folder(job.generate.source) else FLOAT32_BYTES
    return {
        "weights while loading": (weights - kept) * bytes_while_loading + kept,
        "weights": (weights - kept) * dtype.itemsize + kept,
        **({} if budget is None else {"slots of experts": budget.device_bytes}),
        "shared experts in decode steps": pieces * (1 if keep_fp8 else dtype.itemsize),
        "keys and values": cached * dtype.itemsize,
        "symmetric memory": rank_pool_bytes(shape, job.parallel),
    }


def shape_bytes(shape: Shape, num_ranks: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of symmetric memory, and of a rank's part of one layer's routed experts.

    Example: E=8, D=64, F=128, K=2, EP=2, 100 tokens, float32: 144384 and 3 * 64 * 128 * 4 * 4 = 393216.
    """
    moe, parallel = shape.moe, shape.parallel
    parallel.check(moe)
    parallel.check_world(num_ranks)
    pool = rank_pool_bytes(WorkspaceShape.create(moe, parallel.world_size, shape.tokens, dtype), parallel)
    return pool, 3 * moe.hidden_size * moe.ffn_size * moe.num_experts // parallel.world_size * dtype.itemsize


def rank_parameters(model: ModelConfig, ep: int, tp: int) -> int:
    """Parameters held by one rank: its share of the experts, and a full copy of everything else.

    Example: vocabulary 256, D=128, 4 layers of 4 heads, 8 experts of F=128, ep=2, tp=1: 32768 elements of the embedding
    and of the head each, per layer 65536 attention, 1024 router, 196608 expert and 256 norm elements, 128 in the last
    norm: 1119360 in all.
    """
    embedding = model.vocab_size * model.hidden_size
    return embedding + dense_elements(model) + expert_elements(model) // (ep * tp)
