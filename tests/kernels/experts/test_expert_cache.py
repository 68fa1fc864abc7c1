"""The expert cache's kernels against their twins, under Triton's interpreter, and decode from a cache."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from cache_cases import cache_of, decide_as_on_a_gpu
from decode_cases import FOLD, VECTOR, DecodeCase, stored_parts
from host_cases import CASES, compare_steps
from ranks import run_ranks
from tiers import slow, slow_but
from training_cases import GPT_OSS, MODEL, MOE, Rank, awake_model, compare_texts, make_group, make_job, nearly_equal

from comet.decode.twin import warp_decode_torch
from comet.experts import ExpertCache, slots_of_budget
from comet.experts.cache import bytes_of_expert
from comet.experts.staged import GRAPH_FALLBACK_REASON, StagedCache
from comet.experts.store import HeldExperts, host_memory
from comet.generation.engine import GPTEngine
from comet.generation.job import generate_job
from comet.jobs.generate import GenerateConfig
from comet.kernels.decode.blocks import BlockShape, DecodeConfig
from comet.kernels.experts.cache import bring_torch
from comet.kernels.experts.tables import CacheTables, HostExperts, cache_constants
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.models.config import ModelConfig
from comet.quantization.formats import MXType, StoredType, quantize_mx
from comet.training.trainer import train

BYTES = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=64), down=BlockShape(rows=16, depth=64))
TILES = DecodeConfig(form="matrix", gate_up=BlockShape(rows=32, depth=64), down=BlockShape(rows=32, depth=128))
WIDE = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=512), down=BlockShape(rows=16, depth=512))
BIASED = dict(biased=True, activation=Activation("clamped_swiglu", limit=0.5))
# Scales of one expert are 12 bytes of w1 and 8 of w2 in block FP8, and more than a block copies at once in MXFP8.
QUANTISED = [
    DecodeCase(name="mxfp8", T=1, K=1, E=4, D=288, F=256, config=WIDE, seed=6, quantised="mxfp8"),
    DecodeCase(name="mxfp8, matrix", T=3, K=2, E=20, D=96, F=64, config=TILES, seed=7, quantised="mxfp8"),
    DecodeCase(name="mxfp4", T=1, K=2, E=9, D=96, F=64, config=BYTES, seed=8, quantised="mxfp4"),
    DecodeCase(name="mxfp4, matrix", T=3, K=2, E=20, D=64, F=96, config=TILES, seed=9, quantised="mxfp4", **BIASED),
    DecodeCase(name="fp8", T=2, K=1, E=9, D=48, F=144, config=BYTES, seed=10, quantised="fp8"),
    DecodeCase(name="fp8, matrix", T=3, K=2, E=20, D=144, F=48, config=TILES, seed=11, quantised="fp8"),
    DecodeCase(name="fold with biases", T=1, K=3, E=9, D=64, F=96, config=FOLD, seed=12, **BIASED),
]


@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: case.name)
def test_kernels_bring_scales_with_their_experts_and_find_biases(case: DecodeCase) -> None:
    run_ranks(compare_steps, 1, case, case.T * case.K, "lru", 4, interpret=True)


def test_words_of_scales() -> None:
    """All of the scales of an expert, in words of 8 bytes, or of 4 where an odd number of float32 leaves no choice."""
    found = cache_constants(4, 2, [288 * 48, 48 * 144, 12, 8], 2, 1, "lru")
    assert (found.words1, found.words2, found.scales1, found.scales2) == (1728, 864, 3, 1)
    assert found.lines_shared, "12 bytes"
    found = cache_constants(128, 32, [2 * 768 * 2048, 768 * 2048, 98304, 49152], 8, 4, "lru")
    assert (found.scales1, found.scales2, found.lines_shared) == (12288, 6144, False)
    assert cache_constants(4, 2, [64, 32], 2, 1, "lru")[5:8] == (0, 0, False)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("case", slow_but(["vector", "matrix"], CASES))
def test_kernels_equal_their_twins(case: DecodeCase, policy: str) -> None:
    slots = min(case.T * case.K, case.E)
    run_ranks(compare_steps, 1, case, slots, policy, 8, interpret=True)


def test_the_example_of_the_docs() -> None:
    tables = CacheTables.create(4, 2, torch.device("cpu"))
    host = HostExperts(w1=torch.rand(4, 2, 1), w2=torch.rand(4, 1, 1), tables=tables)
    w1, w2 = torch.zeros(2, 2, 1), torch.zeros(2, 1, 1)
    for ids in ([[3]], [[0]], [[3, 2]]):
        bring_torch(torch.tensor(ids), w1, w2, host)
    assert tables.slots.tolist() == [-1, -1, 1, 0]
    assert tables.owners.tolist() == [3, 2]
    assert tables.copies[:, : int(tables.header[0])].tolist() == [[2], [1]]
    assert tables.totals[:2].tolist() == [4, 3]
    assert torch.equal(w1[1], host.w1[2])


@pytest.mark.parametrize(("policy", "kept"), [("lru", [{2, 3}, {0, 3}]), ("lfu", [{0, 3}, {0, 3}])])
def test_each_policy_keeps_what_it_says(policy: str, kept: list[set[int]]) -> None:
    """Expert 0 comes twice, expert 2 once; then expert 3 needs one of their two slots."""
    case = DecodeCase(name="one", T=1, K=1, E=4, D=16, F=16, config=VECTOR, seed=5)
    found = []
    for experts in ((0, 0, 2, 3), (2, 0, 0, 3)):
        cache = cache_of(case, 2, policy)
        for expert in experts:
            warp_decode_torch(torch.rand(1, 16), torch.tensor([[expert]]), torch.ones(1, 1), cache.weights)
        found.append(set(cache.tables.owners.tolist()))
    assert found == kept


def engine_of(
    expert_slots: int | None,
    group: ExpertGroup | None = None,
    expert_dtype: MXType | None = None,
    config: ModelConfig = MODEL,
) -> GPTEngine:
    """The same model with all experts on the device, or with few slots; its logits depend on all weights."""
    model, group = awake_model(config, group, in_slots=expert_slots is not None)
    return GPTEngine(model, group, expert_slots=expert_slots, expert_dtype=expert_dtype)


def quantise_experts(engine: GPTEngine, expert_dtype: MXType | None) -> None:
    """Give a model the numbers of quantised experts."""
    for layer in engine.model.moe_layers() if expert_dtype else ():
        for weight in layer.expert_weights():
            weight.copy_(quantize_mx(weight, expert_dtype).dequantize())


@pytest.mark.parametrize("expert_slots", [MOE.top_k, MOE.top_k + 1, MOE.num_experts])
def test_cached_decode_equals_resident_decode_bit_for_bit(expert_slots: int) -> None:
    cached, resident = engine_of(expert_slots), engine_of(None)
    compare_texts(cached, resident, steps=24)
    report = cached.cache_report()
    assert report is not None
    assert report.needed > report.fetched > 0
    assert report.fetched_bytes == report.fetched * 3 * MOE.hidden_size * MOE.ffn_size * 4
    assert (report.fetched == len(cached.caches) * MOE.num_experts) == (expert_slots == MOE.num_experts)


def test_memory_that_cannot_be_pinned_is_said_once_and_copied_by_the_host(monkeypatch, caplog) -> None:
    def hold(parts, device, file=None):
        return HeldExperts(*(part.contiguous() for part in parts.values()), readable=False)

    resident = engine_of(None)
    monkeypatch.setattr(HeldExperts, "hold", hold)
    with caplog.at_level(logging.WARNING, "comet"):
        staged = engine_of(MOE.top_k)
    (record,) = caplog.records
    assert "GB of host memory for experts cannot be pinned" in record.message
    assert re.search(r"measured: [0-9.]+ ms for an expert of [0-9.]+ MB", record.message)
    compare_texts(staged, resident, steps=12)
    assert staged.graph_fallback_reason == GRAPH_FALLBACK_REASON
    assert record.message.count("no expert is prefetched") == 1
    decide_as_on_a_gpu(monkeypatch)
    model, group = awake_model(MODEL, in_slots=True)
    auto = GPTEngine(model, group, expert_slots=MOE.top_k, expert_prefetch="auto")
    compare_texts(auto, resident, steps=2)
    assert not auto.cache_report().prefetch
    with pytest.raises(NotImplementedError, match="expert_prefetch=True must be auto or false where the host brings"):
        GPTEngine(awake_model(MODEL, in_slots=True)[0], group, expert_slots=MOE.top_k, expert_prefetch="true")
    report = staged.cache_report()
    assert report.staged_bytes == report.fetched_bytes > 0, "the stage is no larger than the slots"
    memory = host_memory
    monkeypatch.setattr("comet.experts.store.host_memory", lambda *given: (memory(*given)[0], False))
    staged = engine_of(MOE.top_k, expert_dtype="mxfp8")
    assert all(isinstance(cache, StagedCache) for cache in staged.caches), "quantised ones, too"


@pytest.mark.parametrize("expert_dtype", get_args(MXType))
def test_decode_from_experts_quantised_in_host_memory_equals_resident_decode_of_the_same(expert_dtype: MXType) -> None:
    cached, resident = engine_of(MOE.top_k, expert_dtype=expert_dtype), engine_of(None)
    quantise_experts(resident, expert_dtype)
    drawn = compare_texts(cached, resident, steps=12)
    report, numbers = cached.cache_report(), 3 * MOE.hidden_size * MOE.ffn_size
    assert report is not None
    assert report.needed > report.fetched > len(cached.caches) * MOE.num_experts, "some were given away"
    expert = numbers // (1 if expert_dtype == "mxfp8" else 2) + numbers // 32
    assert report.fetched_bytes == report.fetched * expert
    for parameter in cached.model.expert_parameters():
        assert local(parameter).untyped_storage().nbytes() <= 4, "no expert is held twice"
    ids = torch.randint(256, (1, 25), generator=drawn)  # more than a decode step takes: they stream
    found = [engine.prefill(ids, torch.tensor([25]), 30) for engine in (cached, resident)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_tokens_that_need_more_experts_than_there_are_slots_run_in_waves() -> None:
    cached, resident = engine_of(MOE.top_k), engine_of(None)
    ids = torch.randint(256, (3, 5), generator=torch.Generator().manual_seed(8))
    found = [engine.prefill(ids, torch.tensor([5, 4, 1]), 12) for engine in (cached, resident)]
    assert torch.equal(*found)
    found = [engine.verify(ids[:, :4]) for engine in (cached, resident)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("stored", "num_bytes", "slots"),
    [(None, 196_608, 25), ("mxfp8", 101_376, 49), ("fp8", 98_328, 50), ("mxfp4", 52_224, 95)],
)
def test_a_budget_in_bytes_holds_more_of_smaller_experts(stored: StoredType | None, num_bytes: int, slots: int) -> None:
    """The bytes are those of the experts themselves."""
    print(seed := 21)
    made = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, 256, 256, generator=made), torch.randn(2, 256, 128, generator=made)
    parts = stored_parts(stored or "", *(weight.bfloat16() for weight in weights))
    cache = ExpertCache(**parts, num_slots=1, device=torch.device("cpu"))
    assert cache.expert_bytes == bytes_of_expert(256, 128, torch.bfloat16, stored) == num_bytes
    config = replace(MOE, num_experts=128, hidden_size=256, ffn_size=128)
    assert slots_of_budget(20_000_000, config, 4, torch.bfloat16, stored) == slots


def test_a_store_with_a_scale_that_is_no_number_is_refused() -> None:
    case = DecodeCase(name="bad", T=1, K=1, E=2, D=32, F=32, quantised="mxfp8")
    host = cache_of(case, 1).host
    assert host.w2_scales is not None
    host.w2_scales[1, 0, 0] = 255
    with pytest.raises(ValueError, match=r"w2_scales\[1, 0, 0\]=255 must be at most 254"):
        ExpertCache(host.w1, host.w2, 1, torch.device("cpu"), w1_scales=host.w1_scales, w2_scales=host.w2_scales)


def test_the_task_writes_the_same_text_with_half_of_the_experts(tmp_path: Path) -> None:
    train(make_job(tmp_path, model=MODEL, steps=20, eval_batches=1, sample_bytes=0), Rank())
    found = []
    for budget, expert_dtype in ((None, None), (0.5, None), (0.5, "mxfp8")):
        settings = GenerateConfig(
            source=str(tmp_path / "out"),
            prompt="1",
            max_new_tokens=20,
            temperature=0.0,
            expert_budget=budget,
            expert_dtype=expert_dtype,
        )
        found.append(generate_job(replace(make_job(tmp_path, model=MODEL), generate=settings), Rank()))
    assert found[0]["text"] == found[1]["text"]
    assert "expert_cache" not in found[0]
    assert found[1]["expert_cache"]["slots"] == MOE.num_experts // 2
    assert 0 < found[1]["expert_cache"]["hits"] < 1
    stored = [each["expert_cache"] for each in found[1:]]
    assert [each["stored"] for each in stored] == [None, "mxfp8"]
    wide, narrow = (each["fetched_bytes"] / each["fetched"] for each in stored)
    assert wide / narrow == pytest.approx(4 / (1 + 1 / 32)), "of float32"


@pytest.mark.parametrize(
    ("layout", "expert_dtype", "config"),
    [
        ({"ep": 2}, None, MODEL),
        ({"tp": 2}, None, MODEL),
        ({"ep": 2}, "mxfp8", MODEL),
        ({"ep": 2}, None, GPT_OSS),
        ({"tp": 2}, None, GPT_OSS),
        slow({"ep": 2, "tp": 2}, None, MODEL),
    ],
    ids=["EP2", "TP2", "EP2, mxfp8", "EP2, biases", "TP2, biases", "EP2 x TP2"],
)
def test_decode_from_caches_of_ranks_equals_resident_decode_bit_for_bit(
    layout: dict[str, int], expert_dtype: MXType | None, config: ModelConfig
) -> None:
    run_ranks(decode_over_ranks, math.prod(layout.values()), layout, expert_dtype, config)


def decode_over_ranks(
    rank: int, world_size: int, layout: dict[str, int], expert_dtype: MXType | None, config: ModelConfig
) -> None:
    """Steps, and prompts that stream."""
    group = make_group(config.moe, **layout)
    cached, resident = engine_of(config.moe.top_k, group, expert_dtype, config), engine_of(None, group, config=config)
    quantise_experts(resident, expert_dtype)
    compare_texts(cached, resident, steps=12)
    held, report = config.moe.num_experts // layout.get("ep", 1), cached.cache_report()
    assert report is not None
    assert report.fetched >= len(cached.caches) * held
    assert (report.fetched > len(cached.caches) * held) == (held > config.moe.top_k), "some were given away, came back"
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(3))
    nearly_equal(*(engine.prefill(ids, torch.tensor([20, 9]), 24) for engine in (cached, resident)))
    nearly_equal(*(engine.decode(torch.tensor([1, 2])) for engine in (cached, resident)))
    group.close()
