"""What ``--dry-run`` prints: the resolved settings and the bytes one rank will need. Starts nothing.

It touches no GPU either, unless ``overlap`` is given: then it asks how many SMs there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from comet.jobs.config import JobConfig, activation_dtype
from comet.layer.workspace import WorkspaceShape, rank_pool_bytes
from comet.models.config import ModelConfig, dense_elements, expert_elements
from comet.training.checkpoint_folder import to_yaml
from comet.tuner.choice import check_setting
from comet.tuner.problem import Machine, Problem

FLOAT32_BYTES = 4
ADAMW_STATES = 2
MIB = 2**20
PATHS_WITHOUT_OVERLAP = ("plain", "reference")


def describe(job: JobConfig, num_ranks: int, device: torch.device) -> list[str]:
    """Comment lines with a table, which follow the settings.

    Args:
        num_ranks: Ranks that would start.
        device: On which they would run; its type decides the element type where it is left open.
    """
    tokens, dtype = job.train.batch_size * job.model.context, activation_dtype(job.train.dtype, device)
    check_model_overlap(job, dtype, device)
    needs = memory_needs(job, dtype)
    needs["total"] = sum(needs.values())
    return [
        f"# {counted_ranks(num_ranks, device)}: {num_ranks // job.parallel.world_size} data-parallel groups of "
        f"ep={job.parallel.ep} x tp={job.parallel.tp}, {tokens} tokens per rank and step",
        "# memory of one rank, MiB",
        *table(needs),
    ]


def counted_ranks(num_ranks: int, device: torch.device) -> str:
    """``4 GPUs``, ``2 CPU ranks``."""
    return f"{num_ranks} {'GPUs' if device.type == 'cuda' else 'CPU ranks'}"


def table(sizes: Mapping[str, int]) -> list[str]:
    """Bytes by purpose, as MiB."""
    return [f"#   {name:<32} {size / MIB:>12,.1f}" for name, size in sizes.items()]


def resolved_yaml(container: Mapping[str, Any], job: JobConfig, num_ranks: int) -> str:
    """The composed configuration with what was open filled in."""
    return to_yaml({**container, "nproc": num_ranks, "parallel": asdict(job.parallel)})


def check_model_overlap(job: JobConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` if the layers of the job's model would refuse ``overlap``, for however many tokens."""
    if job.overlap is not None and job.moe_path not in PATHS_WITHOUT_OVERLAP:
        check_setting(job.overlap, Problem(job.model.moe, job.parallel, 1, dtype), Machine.of(device))


def memory_needs(job: JobConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes one rank needs, by purpose; activations, of type ``dtype``, are an estimate, all else is float32."""
    parameters = rank_parameters(job.model, job.parallel.ep, job.parallel.tp) * FLOAT32_BYTES
    tokens = job.train.batch_size * job.model.context
    shape = WorkspaceShape.create(job.model.moe, job.parallel.world_size, tokens, dtype)
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer states": ADAMW_STATES * parameters,
        "symmetric memory": rank_pool_bytes(shape, job.parallel),
        "activations (estimate)": activation_elements(job.model, job.parallel.tp, tokens) * dtype.itemsize,
    }


def rank_parameters(model: ModelConfig, ep: int, tp: int) -> int:
    """Parameters held by one rank: its share of the experts, and a full copy of everything else.

    Example: vocabulary 256, D=128, 4 layers of 4 heads, 8 experts of F=128, ep=2, tp=1: 32768 elements of the embedding
    and of the head each, per layer 65536 attention, 1024 router, 196608 expert and 256 norm elements, 128 in the last
    norm: 1119360 in all.
    """
    embedding = model.vocab_size * model.hidden_size
    return embedding + dense_elements(model) + expert_elements(model) // (ep * tp)


def activation_elements(model: ModelConfig, tp: int, tokens: int) -> int:
    """Elements kept for backward, estimated for balanced routing.

    Per token and layer about 8 D for attention and norms; per routed row its input and two pre-activations; and the
    logits with their gradient.
    """
    per_token = 8 * model.hidden_size + model.moe.top_k * (model.hidden_size + 2 * model.moe.ffn_size // tp)
    return tokens * (model.num_layers * per_token + 2 * model.vocab_size)
