"""What ``comet generate --dry-run`` prints: the resolved settings, with the source's model, and the bytes of a rank."""

from __future__ import annotations

import os

import torch

from comet.decode import shared_columns
from comet.experts.budget import ExpertBudget
from comet.experts.prefetch import PrefetchSetting, prefetches
from comet.generation.job import plan_experts
from comet.generation.source import is_hf_folder
from comet.jobs.config import JobConfig, activation_dtype
from comet.launch.dry_run.train import FLOAT32_BYTES, check_model_overlap, counted_ranks, rank_parameters, table
from comet.layer.workspace import WorkspaceShape, rank_pool_bytes
from comet.layout import ExpertLayout
from comet.models.cache import allocated_places
from comet.models.config import expert_elements


def describe(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """Comment lines, as ``comet.launch.dry_run.train.describe`` has them."""
    dtype = activation_dtype(job.generate.dtype, device)
    check_model_overlap(job, dtype, device)
    budget = plan_experts(job, dtype)
    return [
        f"# {counted_ranks(num_ranks, device)}: {num_ranks // job.parallel.world_size} equal groups of "
        f"ep={job.parallel.ep} x tp={job.parallel.tp}, {max(len(job.generate.texts), 1)} sequences",
        "# memory of one rank, MiB, where every byte of a prompt is a token",
        *table(memory_needs(job, dtype, budget)),
        *([] if budget is None else describe_budget(job, budget, device)),
    ]


def describe_budget(job: JobConfig, budget: ExpertBudget, device: torch.device) -> list[str]:
    """What a budget puts in host memory and in files, and whether it prefetches."""
    where = "host memory" if budget.store == "host" else "files"
    stored = f" in {budget.stored}" if budget.stored else ""
    sizes = {f"all experts{stored}, in {where}": budget.store_bytes}
    if budget.store == "file":
        sizes[f"{budget.places} of them in host memory as well"] = budget.host_bytes
    sizes["memory of this host"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"# experts on the device: {budget.slots} of {budget.held} in each of {budget.num_layers} layers, by "
        f"{budget.policy}; MiB",
        *table(sizes),
        f"# prefetch: {prefetch_told(job.generate.expert_prefetch, budget, device)}",
    ]


def prefetch_told(setting: PrefetchSetting, budget: ExpertBudget, device: torch.device) -> str:
    """What ``expert_prefetch`` comes to.

    Example: ``auto`` of a host store is "off (expert_prefetch=auto)" on a CPU.
    """
    is_on = prefetches(setting, device, useful=budget.store == "host" and budget.slots < budget.held)
    condition = ", where host memory can be pinned" if is_on and device.type == "cuda" else ""
    return f"{'on' if is_on else 'off'}{condition} (expert_prefetch={str(setting).lower()})"


def memory_needs(job: JobConfig, dtype: torch.dtype, budget: ExpertBudget | None = None) -> dict[str, int]:
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
    shared_size = 0 if model.moe.expert_bias else model.moe.shared_ffn_size  # which joins no step then
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
