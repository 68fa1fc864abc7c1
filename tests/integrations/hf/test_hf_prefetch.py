"""Prefetch for Hugging Face folders: the numbers of the model without it, and experts that came before their step."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from cache_cases import decide_as_on_a_gpu
from generate_cases import drafting_rounds
from hf_cases import greedy, logits_with_cache, prompt, tiny_model
from torch import Tensor

from comet.config import SpeculationConfig
from comet.experts.prefetch import probable
from comet.generation.hf import HFEngine
from comet.integrations import hf
from comet.integrations.hf.stored_experts import StoredExperts, cache_report
from comet.kernels.experts.tables import DRAFTED
from comet.router.router import Router

DRAFTS = SpeculationConfig(draft_experts=(1,), tau=0.0)
FAMILIES = {"qwen3_moe": {"num_hidden_layers": 4}, "deepseek_v3": {}}  # the second layer, and the first, are dense


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, **FAMILIES[request.param]).save_pretrained(made)
    return made


def load(folder: Path, *, prefetch: bool | str) -> Any:
    return hf.load_pretrained(folder, expert_budget=0.5, expert_prefetch=prefetch)


def check_reports(models: list[Any]) -> None:
    without, report = (cache_report(model) for model in models)
    assert (without.prefetched, without.prefetch_precision) == (0, None)
    assert report.needed == without.needed
    assert report.prefetched >= report.prefetched_needed > 0
    assert 0 < report.prefetch_precision <= 1
    assert report.fetched < without.fetched, "they did not miss"


def test_generate_and_logits_are_those_without_it_bit_for_bit(folder: Path) -> None:
    """Steps of one token and of two, a short prompt, and one that streams between them."""
    models = [load(folder, prefetch=prefetch) for prefetch in (False, True)]
    ids = prompt(1, 20)
    assert torch.equal(*[logits_with_cache(model, ids, 1) for model in models])
    for batch, length in ((2, 9), (2, 3)):
        assert torch.equal(*[greedy(model, prompt(batch, length)) for model in models])
    check_reports(models)


def test_drafts_and_verification_are_those_without_it_bit_for_bit(folder: Path) -> None:
    models = [load(folder, prefetch=prefetch) for prefetch in (False, True)]
    engines = [HFEngine(model, speculation=DRAFTS) for model in models]
    drafted = [each.path.cache.host.drafted for each in models[1].modules() if isinstance(each, StoredExperts)]
    assert drafted == [True] * len(engines[1]._gates)
    for first, second in zip(*(drafting_rounds(engine, 4) for engine in engines), strict=True):
        assert torch.equal(first, second)
    experts = [each for each in models[1].modules() if isinstance(each, StoredExperts)]
    assert all(each.path.cache.tables.header[DRAFTED.value] > 0 for each in experts), "drafts list what they leave out"
    check_reports(models)


def test_a_layer_is_asked_what_the_gate_behind_it_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next layer with experts, of the tokens that this one's experts get."""
    asked: list[tuple[Tensor, Tensor]] = []

    def probable_and_note(router: Router, tokens: Tensor) -> Tensor:
        asked.append((tokens.clone(), probable(router, tokens)))
        return asked[-1][1]

    monkeypatch.setattr("comet.experts.paths.probable", probable_and_note)
    model = load(folder, prefetch=True)
    blocks = [block.mlp for block in model.model.layers if hasattr(block.mlp, "experts")]
    with torch.no_grad():
        model(prompt(1, 3))
        assert len(asked) == len(blocks) - 1
        for block, (tokens, guessed) in zip(blocks[1:], asked, strict=True):
            chosen = block.gate(tokens)[2]
            assert torch.equal(chosen.int().sort(dim=1).values, guessed.sort(dim=1).values)


def test_a_gate_without_a_weight_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet.integrations.hf.gates.GATE", "up_proj")
    assert load(folder, prefetch=False) is not None
    with pytest.raises(ValueError, match=r"mlp\.up_proj \(Identity\) must have a weight .* expert_prefetch=false"):
        load(folder, prefetch=True)


def test_auto_is_off_on_a_cpu_and_on_where_a_gpu_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [load(folder, prefetch="auto")]
    decide_as_on_a_gpu(monkeypatch)
    models.append(load(folder, prefetch="auto"))
    assert [cache_report(model).prefetch for model in models] == [False, True]
    assert torch.equal(*[greedy(model, prompt(2, 3)) for model in models])
    check_reports(models)


def test_auto_names_a_gate_without_a_weight_and_is_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("comet.integrations.hf.gates.GATE", "up_proj")
    decide_as_on_a_gpu(monkeypatch)
    with caplog.at_level(logging.WARNING, "comet"):
        assert not cache_report(load(folder, prefetch="auto")).prefetch
    (record,) = caplog.records
    assert re.search(r"expert_prefetch=auto prefetches no expert: .*mlp\.up_proj \(Identity\)", record.message)
