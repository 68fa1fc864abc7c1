"""``expert_prefetch``: what ``auto``, ``true`` and ``false`` come to, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_cases import decide_as_on_a_gpu
from training_cases import MODEL, MOE, make_group

from comet.experts.budget import StoreOptions
from comet.experts.prefetch import prefetch_wanted, prefetches
from comet.generation.engine import GPTEngine
from comet.jobs.generate import GenerateConfig
from comet.layer.group import ExpertGroup
from comet.models.gpt import GPT

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FILE: dict[str, Any] = {"expert_store": "file", "host_budget": 0.75}


@pytest.fixture
def group() -> Iterator[ExpertGroup]:
    made = make_group(MODEL.moe)
    yield made
    made.close()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_as_on_a_gpu(monkeypatch)


def decode(group: ExpertGroup, **settings: Any) -> tuple[torch.Tensor, GPTEngine]:
    """Logits of a step behind twelve others."""
    model = GPT(MODEL, group, seed=1, expert_device=CPU)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    engine = GPTEngine(model, group, expert_slots=MOE.top_k, **settings)
    engine.prefill(torch.tensor([[3]]), torch.tensor([1]), 30)
    return [engine.decode(torch.tensor([17 * step % 256])) for step in range(13)][-1], engine


def test_auto_is_on_where_a_gpu_reads_the_store() -> None:
    for device in (CPU, GPU):
        for readable in (True, False):
            assert prefetches("auto", device, useful=readable) == (device == GPU and readable)
            for setting in (True, "true"):
                assert prefetches(setting, device, useful=readable), "refused elsewhere, and not left out"
            for setting in (False, "false"):
                assert not prefetches(setting, device, useful=readable)


@pytest.mark.parametrize("setting", ["on", "True", "", None, 1, 0.0, [], ("auto",)])
@pytest.mark.parametrize("made", [GenerateConfig, StoreOptions])
def test_another_value_is_named(setting: Any, made: Any) -> None:
    for budget in (None, 0.5):
        with pytest.raises(ValueError, match=r"^expert_prefetch=.* must be one of auto, true, false") as caught:
            made(expert_budget=budget, expert_prefetch=setting)
        assert f"expert_prefetch={setting!r} " in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "meaning"), [("auto", None), ("true", True), ("false", False), (True, True), (False, False)]
)
def test_the_three_words_and_bools(setting: Any, meaning: bool | None) -> None:
    """Prefetch that is insisted on is refused where it cannot be, and what is not never is."""
    assert prefetch_wanted(setting) is meaning
    assert StoreOptions.of(GenerateConfig(expert_budget=0.5, expert_prefetch=setting)).expert_prefetch == setting
    if meaning:
        with pytest.raises(ValueError, match=f"^expert_prefetch={setting} must come with an expert_budget"):
            StoreOptions(expert_prefetch=setting)
        with pytest.raises(NotImplementedError, match=f"^expert_prefetch={setting} must be auto or false with .*=file"):
            StoreOptions(expert_budget=0.5, expert_prefetch=setting, **FILE)
    else:
        assert not StoreOptions(expert_prefetch=setting).in_store
        assert StoreOptions(expert_budget=0.5, expert_prefetch=setting, **FILE).in_store


@pytest.mark.parametrize(("setting", "is_on"), [("auto", False), ("false", False), ("true", True), (True, True)])
def test_on_a_cpu_it_is_on_for_whoever_says_so(setting: Any, is_on: bool, group: ExpertGroup) -> None:
    report = decode(group, expert_prefetch=setting)[1].cache_report()
    assert (report.prefetch, report.prefetched > 0) == (is_on, is_on)


def test_the_default_is_auto(group: ExpertGroup, as_on_a_gpu: None) -> None:
    assert GenerateConfig().expert_prefetch == StoreOptions().expert_prefetch == "auto"
    logits, engine = decode(group)
    assert engine.cache_report().prefetch
    assert engine.cache_report().prefetched_needed > 0
    without, engine = decode(group, expert_prefetch=False)
    assert not engine.cache_report().prefetch
    assert engine.cache_report().prefetched == 0
    assert torch.equal(logits, without)
