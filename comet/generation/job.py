"""The ``generate`` task: a model from disk continues texts on all ranks, and says how fast; what a budget is to do."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist

from comet.capabilities import refuse
from comet.comm.handshake import largest, meet
from comet.config import SpeculationConfig, require
from comet.experts.budget import ExpertBudget, plan_budget
from comet.experts.cache import CacheReport, total
from comet.experts.options import StoreOptions
from comet.generation.engine import Engine, GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate, warm_up
from comet.generation.source import Source, find_source, is_hf_folder
from comet.generation.text import ByteCodec, Codec, Printer, context_note
from comet.jobs.config import GenerateJob, activation_dtype, model_group
from comet.jobs.generate import GenerateConfig
from comet.layer.group import ExpertGroup
from comet.models.gpt import GPT
from comet.schedule.choice import Machine
from comet.training.checkpoint import load_weights
from comet.training.ranks import RankContext, from_first_rank, gather
from comet.training.saved_settings import TOKENIZER_FILE

logger = logging.getLogger(__name__)


def generate_job(config: GenerateJob, context: RankContext) -> dict[str, Any]:
    """Load, warm up, and continue the prompts (collective)."""
    settings = config.generate
    source = from_first_rank(lambda: find_source(settings.source))  # a run that goes on may save a newer one
    if source.checkpoint is None:
        refuse("with a Hugging Face folder", moe_path=config.moe_path, overlap=config.overlap)
    for reason in source.skipped if context.rank == 0 else ():
        logger.warning("skipped: %s", reason)
    codec = _open_codec(source, config.model.vocab_size)
    prompts = from_first_rank(lambda: encode_prompts(settings, codec, config.model.context))
    dtype = activation_dtype(settings.dtype, context.device)
    budget = plan_experts(config, dtype)
    most_tokens = len(prompts) * max(map(len, prompts))
    group = model_group(config, context.device, max_tokens=-(-most_tokens // config.parallel.world_size), dtype=dtype)
    engine = _open_engine(source, config, group)
    meet(context.device)
    if source.checkpoint is None:
        from comet.generation.hf import HFEngine
        from comet.integrations.hf.convert import require_same_model

        assert isinstance(engine, HFEngine), "the engine of a folder"
        require_same_model(group, engine.model)
    warm_up(engine, prompts, settings, context=config.model.context)
    warm = engine.cache_report()
    printer = Printer(settings.texts, sys.stdout) if context.rank == 0 else None
    generated = generate(engine, codec, prompts, settings, context=config.model.context, show=printer)
    engine.check()
    result = _result(config, source, group, generated)
    if generated.speculation is not None:
        result["speculation"] = generated.speculation
    if budget is not None and warm is not None:
        facts = cache_facts(warm, engine.cache_report() or warm)
        if engine.cores is not None:
            facts["host_cores"] = engine.cores.facts()
        result["expert_cache"] = facts | {"store": settings.expert_store, "stored": budget.options.stored}
    if printer is not None:
        printer.finish(result)
        sys.stderr.write(context_note(generated.stopped_by, config.model.context))
    group.close()
    return result


def check_files(config: GenerateJob) -> None:
    """Read what a run reads before its weights: tokenizer, prompts and the list of tensors; refuse as the run would."""
    settings = config.generate
    source = find_source(settings.source)
    codec = _open_codec(source, config.model.vocab_size)
    if settings.texts:
        encode_prompts(settings, codec, config.model.context)
    if source.checkpoint is None:
        from comet.integrations.hf.stored import open_checkpoint

        with ExitStack() as files:
            open_checkpoint(source.path, files)


def _open_codec(source: Source, vocab_size: int) -> Codec:
    if source.checkpoint is not None and not (source.path / TOKENIZER_FILE).is_file():
        return ByteCodec()
    from comet.generation.hf import open_codec, open_run_codec

    return open_codec(source.path) if source.checkpoint is None else open_run_codec(source.path, vocab_size)


def _open_engine(source: Source, config: GenerateJob, group: ExpertGroup) -> Engine:
    settings = config.generate
    speculation = None if settings.speculate == "off" else settings
    if source.checkpoint is None:
        from comet.generation.hf import HFEngine
        from comet.integrations.hf import load_pretrained

        hf_model = load_pretrained(source.path, group, **asdict(StoreOptions.of(settings)))
        return HFEngine(hf_model, cuda_graph=settings.cuda_graph, speculation=speculation)
    device = torch.device("cpu") if settings.in_store else None
    model = GPT(config.model, group, path=config.moe_path, overlap=config.overlap, expert_device=device)
    load_weights(model, source.checkpoint)
    return GPTEngine(
        model,
        group,
        cuda_graph=settings.cuda_graph,
        store=settings,
        speculation=speculation,
    )


def _result(config: GenerateJob, source: Source, group: ExpertGroup, generated: Generated) -> dict[str, Any]:
    """The facts of a run; times are the largest of all ranks.

    ``cuda_graph`` says whether all ranks replayed their decode steps from one, ``graph_fallback_reason`` why this rank
    did not.
    """
    eager = float(bool(generated.graph_fallback_reason))
    mine = [generated.first_token_s, generated.decode_s, eager]
    first_s, decode_s, any_eager = largest(mine, group.device, dist.group.WORLD)
    decoded = generated.new_tokens - len(generated.texts)
    return {
        "task": "generate",
        "model": config.model.name,
        "source": str(source.path),
        "world_size": group.world_size,
        "ep": group.parallel.ep,
        "tp": group.parallel.tp,
        "device": Machine.of(group.device).name,
        "dtype": str(group.workspace.shape.dtype).removeprefix("torch."),
        "prompt_tokens": generated.prompt_tokens,
        "new_tokens": generated.new_tokens,
        "time_to_first_token_s": first_s,
        "cuda_graph": not any_eager,
        "graph_fallback_reason": generated.graph_fallback_reason or None,
        "tokens_per_second": decoded / decode_s if generated.steps else None,
        "stopped_by": generated.stopped_by,
        "text": generated.texts[0],
        "texts": generated.texts,
    }


def plan_experts(config: GenerateJob, dtype: torch.dtype) -> ExpertBudget | None:
    """Decide where the experts of ``generate``'s model go; ``None`` without a budget."""
    settings, model = config.generate, config.model
    try:
        _require_drafts(settings)
        if not is_hf_folder(settings.source):
            store, keep_fp8 = settings.expert_store, settings.keep_fp8
            refuse("with a checkpoint of comet train", keep_fp8=keep_fp8, expert_store=store)
        if not config.parallel.ranks_with_memory:
            refuse("where tp spans nodes", expert_budget=settings.expert_budget)
        return plan_budget(settings, model.moe, model.num_layers - model.dense_layers, dtype, config.parallel)
    except ValueError as error:
        raise ValueError(f"generate.{error}") from error


def _require_drafts(settings: GenerateConfig) -> None:
    """Raise ``ValueError`` for a setting of drafts where none are made, or none by it."""
    for each in fields(SpeculationConfig):
        modes = ("adaptive",) if each.name == "adaptive_tolerance" else ("conservative", "adaptive")
        idle = each.name != "speculate" and settings.speculate not in modes
        value = getattr(settings, each.name)
        require(
            not idle or value == each.default,
            f"{each.name}={value} must come with speculate={' or '.join(modes)}: speculate={settings.speculate} does "
            "not read it",
        )


def cache_facts(before: CacheReport, after: CacheReport) -> dict[str, Any]:
    """Add up what caches did between two reports of this rank, over ranks; seconds are their mean (collective)."""
    reports = gather(after.since(before))
    report = total(reports)
    seconds = {name: getattr(report, name) / len(reports) for name in ("fetching_s", "hosting_s")}
    return asdict(report) | seconds | {"hits": report.hits, "prefetch_precision": report.prefetch_precision}
