"""Engines that answer from few slots for experts, against the same model with all of them on the device."""

import logging
from typing import Any, get_args

import pytest
import torch
from cache_cases import decide_as_on_a_gpu
from ranks import in_ranks
from tiers import slow
from training_cases import GPT_OSS, MODEL, MOE, awake_model, compare_texts, make_group, nearly_equal, slots_of

from comet.experts.options import GRAPH_FALLBACK_REASON, StoreOptions
from comet.experts.staged import StagedCache
from comet.experts.store import HeldExperts, host_memory
from comet.generation.engine import GPTEngine
from comet.jobs.generate import GenerateConfig
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.models.config import ModelConfig
from comet.quantization.formats import MXType, quantize_mx


def engine_of(
    group: ExpertGroup | None = None, config: ModelConfig = MODEL, *, slots: int | None = None,
    decode_tokens: int | None = None, **options: Any,
) -> GPTEngine:  # fmt: skip
    """The same model, with so many slots if any; its logits depend on all weights."""
    model, group = awake_model(config, group, in_slots=slots is not None, sharpness=1.0)
    store = slots_of(slots, config.moe.num_experts // group.parallel.ep, **options)
    return GPTEngine(model, group, decode_tokens=decode_tokens, store=store)


def resident_engine(
    expert_dtype: MXType | None = None, group: ExpertGroup | None = None, config: ModelConfig = MODEL
) -> GPTEngine:
    """All experts on the device, with the numbers that they have in slots."""
    engine = engine_of(group, config)
    for layer in engine.model.moe_layers() if expert_dtype else ():
        for weight in layer.expert_weights():
            weight.copy_(quantize_mx(weight, expert_dtype).dequantize())
    return engine


@pytest.mark.parametrize(
    "settings",
    [
        *(dict(slots=slots) for slots in (1, MOE.top_k, MOE.top_k + 1, MOE.num_experts)),
        *(dict(slots=slots, expert_prefetch=True) for slots in (1, MOE.top_k + 1, MOE.num_experts - 1)),
        *(dict(slots=MOE.top_k, expert_dtype=kind) for kind in get_args(MXType)),
    ],
    ids=str,
)
def test_answers_are_those_of_resident_experts(settings: dict[str, Any]) -> None:
    """Steps have the same bits; a prompt streams and a step follows."""
    stored, prefetch = settings.get("expert_dtype"), "expert_prefetch" in settings
    cached, resident = engine_of(**settings), resident_engine(stored)
    drawn = compare_texts(cached, resident, steps=24)
    report, num_experts = cached.cache_report(), len(cached.caches) * MOE.num_experts
    assert report.needed > report.fetched > 0
    if not prefetch:
        assert (report.fetched == num_experts) == (settings["slots"] == MOE.num_experts), "some were given away"
    numbers = 3 * MOE.hidden_size * MOE.ffn_size
    expert = {None: 4 * numbers, "mxfp8": numbers + numbers // 32, "mxfp4": numbers // 2 + numbers // 32}[stored]
    assert report.fetched_bytes == report.fetched * expert
    assert prefetch == (report.prefetched > 0) == (report.prefetched_needed > 0)
    assert report.prefetched >= report.prefetched_needed
    for parameter in cached.model.expert_parameters() if stored else ():
        assert local(parameter).untyped_storage().nbytes() <= 4, "no expert is held twice"
    ids = torch.randint(256, (1, 25), generator=drawn)
    nearly_equal(*(engine.prefill(ids, torch.tensor([25]), 30) for engine in (cached, resident)))
    nearly_equal(*(engine.decode(ids[0, :1]) for engine in (cached, resident)))


def test_prefetch_is_on_by_default_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GenerateConfig().expert_prefetch == StoreOptions().expert_prefetch == "auto"
    decide_as_on_a_gpu(monkeypatch)
    engine, without = engine_of(slots=MOE.top_k), engine_of(slots=MOE.top_k, expert_prefetch=False)
    compare_texts(engine, without, steps=13)
    reports = [each.cache_report() for each in (engine, without)]
    assert [(each.prefetch, each.prefetched_needed > 0) for each in reports] == [(True, True), (False, False)]


def test_what_slots_do_not_serve_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^host_cores=2 is of no use with 1 slots, fewer than a token may need"):
        engine_of(slots=1, host_cores="2")
    with pytest.raises(ValueError, match=r"^decode_tokens=1 must be at least 2 with num_slots=1, fewer than top_k="):
        engine_of(slots=1, decode_tokens=1)
    with pytest.raises(ValueError, match=r"^expert_dtype='mxfp6' must be one of mxfp8, mxfp4, or None$"):
        engine_of(slots=2, expert_dtype="mxfp6")


def test_tokens_that_need_more_experts_than_there_are_slots_run_in_waves() -> None:
    cached, resident = engine_of(slots=MOE.top_k), engine_of()
    ids = torch.randint(256, (3, 5), generator=torch.Generator().manual_seed(8))
    found = [engine.prefill(ids, torch.tensor([5, 4, 1]), 12) for engine in (cached, resident)]
    assert torch.equal(*found)
    found = [engine.verify(ids[:, :4]) for engine in (cached, resident)]
    assert torch.equal(*found)


def test_memory_that_cannot_be_pinned_is_said_once_and_copied_by_the_host(monkeypatch, caplog) -> None:
    def hold(parts, device, file=None):
        return HeldExperts(*(part.contiguous() for part in parts.values()), readable=False)

    resident = engine_of()
    monkeypatch.setattr(HeldExperts, "hold", hold)
    with caplog.at_level(logging.WARNING, "comet"):
        staged = engine_of(slots=MOE.top_k)
    (record,) = caplog.records
    assert "bytes of host memory for experts cannot be pinned" in record.message
    assert record.message.count("no expert is prefetched") == 1
    compare_texts(staged, resident, steps=12)
    assert staged.graph_fallback_reason == GRAPH_FALLBACK_REASON
    decide_as_on_a_gpu(monkeypatch)
    auto = engine_of(slots=MOE.top_k, expert_prefetch="auto")
    compare_texts(auto, resident, steps=2)
    assert not auto.cache_report().prefetch
    with pytest.raises(NotImplementedError, match="expert_prefetch=True must be auto or false where the host brings"):
        engine_of(slots=MOE.top_k, expert_prefetch="true")
    report = staged.cache_report()
    assert report.staged_bytes == report.fetched_bytes > 0, "the stage is no larger than the slots"
    memory = host_memory
    monkeypatch.setattr("comet.experts.store.host_memory", lambda *given: (memory(*given)[0], False))
    staged = engine_of(slots=MOE.top_k, expert_dtype="mxfp8")
    assert all(isinstance(cache, StagedCache) for cache in staged.caches), "quantised ones, too"


@pytest.mark.parametrize(
    ("ep", "tp", "slots", "expert_dtype", "config"),
    [
        (2, 1, 1, None, MODEL),
        (1, 2, MOE.top_k, None, MODEL),
        (2, 1, MOE.top_k, "mxfp8", MODEL),
        (2, 1, GPT_OSS.moe.top_k, None, GPT_OSS),
        (1, 2, 1, None, GPT_OSS),
        slow(2, 2, MOE.top_k, None, MODEL),
    ],
    ids=["EP2", "TP2", "EP2, mxfp8", "EP2, biases", "TP2, biases", "EP2 x TP2"],
)
@in_ranks("ep tp")
def test_answers_of_ranks_are_those_of_resident_experts(
    rank: int, world_size: int, ep: int, tp: int, slots: int, expert_dtype: MXType | None, config: ModelConfig
) -> None:
    """Steps have the same bits, and prompts stream."""
    group = make_group(config.moe, ep=ep, tp=tp)
    cached = engine_of(group, config, slots=slots, expert_dtype=expert_dtype)
    resident = resident_engine(expert_dtype, group, config)
    compare_texts(cached, resident, steps=12)
    held, report = config.moe.num_experts // ep, cached.cache_report()
    assert report.fetched >= len(cached.caches) * held
    assert (report.fetched > len(cached.caches) * held) == (held > slots), "some were given away, came back"
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(3))
    nearly_equal(*(engine.prefill(ids, torch.tensor([20, 9]), 24) for engine in (cached, resident)))
    nearly_equal(*(engine.decode(torch.tensor([1, 2])) for engine in (cached, resident)))
    group.close()
