"""Bytes that one rank of a task needs, and the memory there is; a job that cannot fit is refused before it starts."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from comet.config import require
from comet.decode import shared_columns
from comet.experts.budget import ExpertBudget
from comet.generation.job import plan_experts
from comet.generation.source import is_hf_folder
from comet.jobs.config import GenerateJob, JobConfig, ModularJob, SweepJob, TrainJob, TuneJob, activation_dtype
from comet.kernels.runtime.process import PROC, free_memory
from comet.launch.tasks.modular import modular_problems
from comet.launch.tasks.registry import Task, imported
from comet.layer.workspace import rank_pool_bytes
from comet.layout import ExpertLayout
from comet.models.cache import allocated_places
from comet.models.config import ModelConfig, dense_elements, expert_elements
from comet.schedule.choice import Problem, counted
from comet.tuner.sweep import sweep_points, tune_points

FLOAT32_BYTES = 4
LIBRARY_BYTES = 240 * 2**20  # private memory of a rank of torch 2.13.0 for CPUs that has made nothing yet
ADAMW_STATES = 2
OOM_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)


def require_memory(task: Task, job: JobConfig, num_ranks: int, here: int, device: torch.device) -> None:
    """Raise ``ValueError`` where the ranks of this machine, ``here``, need more memory than there is.

    On GPUs each rank has the memory of its own, else they share that of the machine.
    """
    if not task.memory:
        return
    on_gpu = device.type == "cuda"
    count, libraries = (1, 0) if on_gpu else (here, LIBRARY_BYTES)
    needed = (imported(task.memory)(job, num_ranks, device) + libraries) * count
    if on_gpu:
        there, where = torch.cuda.mem_get_info(device)[1], f"of {torch.cuda.get_device_name(device)}"
    else:
        soft = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        limits = (limit * here for limit in soft if limit != resource.RLIM_INFINITY)
        there, where = min([free_memory(), *limits]), "that the ranks of this machine may use"
    ways = task.lower + (", or start fewer ranks (nproc)" if count > 1 else "")
    rule = f"must be at most the {there:,} {where}: {ways}; --dry-run prints what takes the memory"
    require(needed <= there, f"memory: {needed:,} bytes for {counted(count, 'rank')} {rule}")


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory since the machine started; 0 where it does not say."""
    file = PROC / "vmstat"
    found = OOM_KILLS.search(file.read_text()) if file.is_file() else None
    return int(found[1]) if found else 0


def train_bytes(job: TrainJob, num_ranks: int, device: torch.device) -> int:
    return sum(training_needs(job, num_ranks, activation_dtype(job.train.dtype, device)).values())


def generate_bytes(job: GenerateJob, num_ranks: int, device: torch.device) -> int:
    """Bytes of one rank of ``generate`` on its device; on a CPU the experts of a store are there, too."""
    dtype = activation_dtype(job.generate.dtype, device)
    budget = plan_experts(job, dtype)
    needs = generation_needs(job, dtype, budget)
    loading, weights = needs.pop("weights while loading"), needs.pop("weights")
    stored = 0 if budget is None or device.type == "cuda" else budget.host_bytes
    return max(loading, weights) + sum(needs.values()) + stored


# The layers that a task measures, by the type of its settings.
PROBLEMS: Mapping[type, Callable[[Any, torch.device], Iterable[Problem]]] = {
    TuneJob: tune_points,
    SweepJob: sweep_points,
    ModularJob: modular_problems,
}


def largest_problem(job: JobConfig, num_ranks: int, device: torch.device) -> int:
    """Count the bytes of one rank for the largest problem; 0 on a GPU, where one that needs more fails alone."""
    found, reason = [], ""
    for problem in PROBLEMS[type(job)](job, device):
        try:
            found.append(sum(layer_bytes(problem, num_ranks)))
        except ValueError as error:  # The task itself says why one of several problems cannot run.
            reason = str(error)
    require(bool(found), f"no layer fits: {reason}; give other ranks (nproc), parallel.ep or sweep.layouts")
    return max(found) if device.type == "cpu" else 0


def training_needs(job: TrainJob, num_ranks: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes one rank needs, by purpose; activations, of type ``dtype``, are an estimate, all else is float32.

    What is kept for the backward pass, of balanced routing: per token and layer about 8 D for attention and norms; per
    routed row its input and two pre-activations; and the logits with their gradient. With gradient checkpointing it is
    one layer, and the inputs of the others. Summed over several passes, gradients exist twice. What ``train.fsdp``
    gathers for a layer is left out.
    """
    model, tokens = job.model, job.step_tokens
    of_experts = expert_elements(model) // job.parallel.world_size
    others = rank_parameters(model, job.parallel.ep, job.parallel.tp) - of_experts
    parameters = (of_experts + -(-others // (num_ranks if job.train.fsdp else 1))) * FLOAT32_BYTES
    of_rows = model.moe.top_k * (model.hidden_size + 2 * model.moe.ffn_size // job.parallel.tp)
    of_layers = model.num_layers * (of_layer := 8 * model.hidden_size + of_rows)
    if job.train.gradient_checkpointing:
        of_layers = of_layer + model.num_layers * model.hidden_size * FLOAT32_BYTES // dtype.itemsize
    kept = tokens * (of_layers + 2 * model.vocab_size)
    return {
        "parameters": parameters,
        "gradients": parameters * min(job.train.gradient_accumulation_steps, 2),
        "optimizer states": ADAMW_STATES * parameters,
        "symmetric memory": rank_pool_bytes(Problem(model.moe, job.parallel, tokens, dtype), job.comm.backend),
        "activations (estimate)": kept * dtype.itemsize,
    }


def generation_needs(job: GenerateJob, dtype: torch.dtype, budget: ExpertBudget | None = None) -> dict[str, int]:
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
    problem = Problem(model.moe, job.parallel, -(-len(prompts) * max(prompts) // ranks), dtype)
    weights = rank_parameters(model, job.parallel.ep, job.parallel.tp)
    weights -= 0 if budget is None else expert_elements(model) // ranks
    layout = ExpertLayout.create(model.moe, job.parallel, 0)
    keep_fp8 = job.generate.keep_fp8
    # A shared expert next to experts with a bias joins no decode step.
    shared_size = 0 if model.moe.expert_bias else model.moe.shared_ffn_size
    columns = shared_columns(layout, model.moe.ffn_size, shared_size)
    piece = 3 * model.hidden_size * model.moe.ffn_size // job.parallel.tp
    moe_layers = model.num_layers - model.dense_layers
    pieces = 0 if budget is not None or not job.parallel.ranks_with_memory else moe_layers * columns * piece
    kept = moe_layers * layout.experts_local * piece if keep_fp8 and budget is None else 0
    bytes_while_loading = dtype.itemsize if is_hf_folder(job.generate.source) else FLOAT32_BYTES
    return {
        "weights while loading": (weights - kept) * bytes_while_loading + kept,
        "weights": (weights - kept) * dtype.itemsize + kept,
        **({} if budget is None else {"slots of experts": budget.device_bytes}),
        "shared experts in decode steps": pieces * (1 if keep_fp8 else dtype.itemsize),
        "keys and values": cached * dtype.itemsize,
        "symmetric memory": rank_pool_bytes(problem, job.comm.backend),
    }


def layer_bytes(problem: Problem, num_ranks: int) -> tuple[int, int]:
    """Bytes of symmetric memory, and of a rank's part of one layer's routed experts.

    Example: E=8, D=64, F=128, K=2, EP=2, 100 tokens, float32: 144384 and 3 * 64 * 128 * 4 * 4 = 393216.
    """
    moe, parallel, dtype = problem.moe, problem.parallel, problem.dtype
    parallel.check(moe)
    parallel.check_world(num_ranks)
    experts = 3 * moe.hidden_size * moe.ffn_size * moe.num_experts // parallel.world_size * dtype.itemsize
    return rank_pool_bytes(problem), experts


def rank_parameters(model: ModelConfig, ep: int, tp: int) -> int:
    """Parameters held by one rank: its share of the experts, and a full copy of everything else.

    Example: vocabulary 256, D=128, 4 layers of 4 heads, 8 experts of F=128, ep=2, tp=1: 32768 elements of the embedding
    and of the head each, per layer 65536 attention, 1024 router, 196608 expert and 256 norm elements, 128 in the last
    norm: 1119360 in all.
    """
    embedding = model.vocab_size * model.hidden_size
    return embedding + dense_elements(model) + expert_elements(model) // (ep * tp)
