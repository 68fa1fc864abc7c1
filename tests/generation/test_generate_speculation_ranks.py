"""Self-speculative decoding of comet's GPT over ranks: rank 0 decides, whatever the others compute and measure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiers import slow
from torch import Tensor
from training_cases import MODEL, awake_model, make_group

from comet.config import MoEConfig
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate
from comet.generation.speculation import Speculation
from comet.generation.text import ByteCodec
from comet.jobs.generate import GenerateConfig
from comet.layer.group import ExpertGroup

CONFIG = replace(MODEL, context=64, moe=MoEConfig(hidden_size=32, ffn_size=32, num_experts=8, top_k=2))
SHARED = replace(CONFIG, moe=replace(CONFIG.moe, shared_ffn_size=32))
SLOTS = 3  # of the four experts of an EP rank
PROMPTS = ("def f(x):", "a")
GREEDY = GenerateConfig(prompts=PROMPTS, max_new_tokens=24, temperature=0.0, speculate="conservative", tau=0.0)
MANY = replace(GREEDY, prompts=7 * PROMPTS)  # 14 x 5 tokens a pass are more than warp decode takes
STREAMED = replace(GREEDY, prompts=2 * PROMPTS)  # 4 x 5 are more than it takes from caches
PREFETCHED = replace(GREEDY, expert_budget=0.5, expert_prefetch=True)
DEADLINE_S = 60.0


def group_of(ep: int, tp: int) -> ExpertGroup:
    return make_group(CONFIG.moe, ep=ep, tp=tp, max_tokens=64, timeout_s=DEADLINE_S)


def engine_of(group: ExpertGroup, settings: GenerateConfig, slots: int | None = None) -> GPTEngine:
    model, _ = awake_model(CONFIG if slots else SHARED, group, in_slots=slots is not None)
    drafts = None if settings.speculate == "off" else settings
    return GPTEngine(model, group, expert_slots=slots, speculation=drafts, expert_prefetch=settings.expert_prefetch)


def made_by(engine: GPTEngine, settings: GenerateConfig) -> Generated:
    codec = ByteCodec()
    return generate(engine, codec, encode_prompts(settings, codec, 64), settings, context=64)


def clock_of(rank: int) -> Callable[[], float]:
    """By rank 0's all rounds take equally long, so the longest drafts are best; by others' plain steps are."""
    ticks = itertools.count()
    if rank == 0:
        return lambda: float(next(ticks))
    return lambda: float(100 * min(tick := next(ticks), 6) + tick)  # the first three rounds, which draft, are slow


def disturbed(engine: GPTEngine, rank: int, broadcasts: list[Tensor]) -> GPTEngine:
    """Every rank has its clock and, but rank 0, logits of its own; broadcasts are noted."""
    take, noise, broadcast = engine._take, torch.Generator().manual_seed(rank), dist.broadcast

    def noisy(ids: Tensor, *, drafts: bool = False) -> Tensor:
        logits = take(ids, drafts=drafts)
        return logits + 3 * torch.randn(logits.shape, generator=noise) if rank else logits

    def noted(values: Tensor, source: int) -> None:
        broadcasts.append(values)
        broadcast(values, source)

    engine._take = noisy
    dist.broadcast = noted
    Speculation.__init__.__defaults__ = (clock_of(rank),)
    return engine


def check_ranks(rank: int, world_size: int, ep: int, tp: int) -> None:
    group, broadcasts = group_of(ep, tp), []
    for settings, slots in ((MANY, None), (STREAMED, SLOTS), (PREFETCHED, SLOTS)):
        off = replace(settings, speculate="off")
        plain = made_by(engine_of(group, off, slots), off)
        for temperature in (0.0, 1.0):
            chosen = replace(settings, temperature=temperature, seed=5)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "broadcast", dist.broadcast)  # restored behind
                broadcasts.clear()
                made = made_by(disturbed(engine_of(group, chosen, slots), rank, broadcasts), chosen)
            assert len(broadcasts) == 1 + made.steps, "one of the first token, and one of every pass"
            assert max(each.numel() for each in broadcasts) == 5 * len(chosen.prompts)
            assert (made.texts == plain.texts) == (temperature == 0), "the logits of rank 0 are those of plain steps"
            assert made.speculation["drafted"] > made.speculation["accepted"] > 0
            assert made.speculation["rounds"] - made.speculation["plain_rounds"] > 3, "by the clock of rank 0"
            found = [(made.texts, made.speculation)] * world_size
            dist.all_gather_object(found, found[rank])
            assert all(each == found[0] for each in found)
    group.close()


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), slow(1, 2), slow(2, 2)])
def test_ranks_write_what_rank_0_decides(ep: int, tp: int) -> None:
    run_ranks(check_ranks, ep * tp, ep, tp)
