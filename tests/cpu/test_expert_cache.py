"""The expert cache's kernels against their twins, under Triton's interpreter, and decode from a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from training_cases import MODEL, MOE, Rank, make_job

from comet.config import ParallelConfig, SpeculationConfig
from comet.experts import slots_of_budget
from comet.generation.config import GenerateConfig
from comet.generation.engine import GPTEngine
from comet.generation.job import generate_job
from comet.group import make_expert_group
from comet.kernels.expert_cache import CacheTables, fetch, fetch_torch, lookup, lookup_torch
from comet.models.gpt import GPT
from comet.training.run import train

FIELDS = ("slots", "owners", "last_used", "clock", "counts")


def cache_steps(rank: int, world_size: int, seed: int, num_experts: int, num_slots: int, words: int) -> None:
    """Random steps on both: tables are equal, and each needed expert lies in its slot."""
    print("seed", seed)
    made = torch.Generator().manual_seed(seed)
    draw = lambda *sizes: torch.randint(2**20, sizes, generator=made, dtype=torch.int64)  # noqa: E731
    host = draw(num_experts, 2 * words), draw(num_experts, words)
    caches = [(CacheTables.create(num_experts, num_slots, torch.device("cpu")),
               torch.zeros(num_slots, 2 * words, dtype=torch.int64), torch.zeros(num_slots, words, dtype=torch.int64))
              for _ in range(2)]  # fmt: skip
    for _ in range(12):
        num_ids = int(torch.randint(1, num_slots + 1, (1,), generator=made))
        ids = torch.randint(-2, num_experts + 2, (1, num_ids), generator=made, dtype=torch.int32)
        for (tables, w1, w2), find, copy in zip(caches, (lookup, lookup_torch), (fetch, fetch_torch), strict=True):
            find(ids, tables)
            copy(*host, w1, w2, tables)
        (tables, w1, w2), (twin, twin_w1, twin_w2) = caches
        for name in FIELDS:
            assert torch.equal(getattr(tables, name), getattr(twin, name)), name
        num_copies = int(tables.counts[0])
        assert torch.equal(tables.copies[:, :num_copies], twin.copies[:, :num_copies])
        assert torch.equal(w1, twin_w1)
        assert torch.equal(w2, twin_w2)
        for expert in {each for each in ids.flatten().tolist() if 0 <= each < num_experts}:
            slot = int(tables.slots[expert])
            assert tables.owners[slot] == expert
            assert torch.equal(w1[slot], host[0][expert])
            assert torch.equal(w2[slot], host[1][expert])


@pytest.mark.parametrize(("num_experts", "num_slots", "words"), [(8, 3, 6), (5, 5, 2), (40, 12, 9000)])
def test_kernels_equal_their_twins(num_experts: int, num_slots: int, words: int) -> None:
    run_ranks(cache_steps, 1, 17 * num_experts, num_experts, num_slots, words, interpret=True)


def test_the_example_of_the_docs() -> None:
    tables = CacheTables.create(4, 2, torch.device("cpu"))
    for ids in ([[3]], [[0]], [[3, 2]]):
        lookup_torch(torch.tensor(ids, dtype=torch.int32), tables)
    assert tables.slots.tolist() == [-1, -1, 1, 0]
    assert tables.owners.tolist() == [3, 2]
    assert tables.copies[:, : int(tables.counts[0])].tolist() == [[2], [1]]
    assert tables.counts.tolist() == [1, 4, 3]


def engine_of(expert_slots: int | None) -> GPTEngine:
    """The same model with all experts on the device, or with few slots; its logits depend on all weights."""
    device = None if expert_slots is None else torch.device("cpu")
    group = make_expert_group(MODEL.moe, ParallelConfig(), max_tokens=256, dtype=torch.float32, device="cpu")
    model = GPT(MODEL, group, seed=1, expert_device=device)
    drawn = torch.Generator().manual_seed(1)
    model.head.weight.data.copy_(torch.randn(model.head.weight.shape, generator=drawn) * 0.3)
    return GPTEngine(model, group, expert_slots=expert_slots)


@pytest.mark.parametrize("expert_slots", [MOE.top_k, MOE.top_k + 1, MOE.num_experts])
def test_cached_decode_equals_resident_decode_bit_for_bit(expert_slots: int) -> None:
    cached, resident = engine_of(expert_slots), engine_of(None)
    drawn = torch.Generator().manual_seed(7)
    token = torch.randint(256, (1,), generator=drawn)
    found = [engine.prefill(token[:, None], torch.tensor([1]), 30) for engine in (cached, resident)]
    for _ in range(24):
        assert torch.equal(*found)
        token = torch.randint(256, (1,), generator=drawn)
        found = [engine.decode(token) for engine in (cached, resident)]
    assert torch.equal(*found)
    report = cached.cache_report()
    assert report is not None
    assert report.needed > report.fetched > 0
    assert report.fetched_bytes == report.fetched * 3 * MOE.hidden_size * MOE.ffn_size * 4
    assert (report.fetched == len(cached.caches) * MOE.num_experts) == (expert_slots == MOE.num_experts)


def test_tokens_that_need_more_experts_than_there_are_slots_are_taken_in_parts() -> None:
    cached, resident = engine_of(MOE.top_k), engine_of(None)
    ids = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(8))
    found = [engine.prefill(ids, torch.tensor([9, 4, 1]), 12) for engine in (cached, resident)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("budget", "slots"), [(0.25, 16), (10_000_000, 25), (1.0, 64), (1e12, 64)])
def test_a_budget_in_slots(budget: float, slots: int) -> None:
    config = replace(MOE, num_experts=64, hidden_size=128, ffn_size=64)
    assert slots_of_budget(budget, config, 4, torch.float32) == slots


@pytest.mark.parametrize("budget", [0.01, 1000.0, 0.0, -1.0])
def test_a_budget_that_is_too_small_says_what_it_needs(budget: float) -> None:
    with pytest.raises(ValueError, match="expert_budget="):
        slots_of_budget(budget, MOE, 4, torch.float32)


def test_the_task_writes_the_same_text_with_half_of_the_experts(tmp_path: Path) -> None:
    train(make_job(tmp_path, model=MODEL, steps=20, eval_batches=1, sample_bytes=0), Rank())
    found = []
    for budget in (None, 0.5):
        settings = GenerateConfig(
            source=str(tmp_path / "out"), prompt="1", max_new_tokens=20, temperature=0.0, expert_budget=budget
        )
        found.append(generate_job(replace(make_job(tmp_path, model=MODEL), generate=settings), Rank()))
    assert found[0]["text"] == found[1]["text"]
    assert "expert_cache" not in found[0]
    assert found[1]["expert_cache"]["slots"] == MOE.num_experts // 2
    assert 0 < found[1]["expert_cache"]["hits"] < 1


def test_experts_over_ranks_are_not_there_yet() -> None:
    run_ranks(refused_over_ranks, 2)


def refused_over_ranks(rank: int, world_size: int) -> None:
    group = make_expert_group(MODEL.moe, ParallelConfig(ep=2), max_tokens=64, dtype=torch.float32, device="cpu")
    model = GPT(MODEL, group, expert_device=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="expert_budget"):
        GPTEngine(model, group, expert_slots=4)
    with pytest.raises(NotImplementedError, match="speculate is for one rank"):
        GPTEngine(model, group, speculation=SpeculationConfig())
    group.close()
