"""A device that has less memory than a budget asks for: fewer slots in all layers, alike on all ranks, or a refusal."""

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_ranks

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import greedy, make_group, prompt, save_model, tiny_config, tiny_model
from training_cases import Rank, make_generation

import comet.experts.paths
from comet.experts.cache import ExpertCache
from comet.experts.paths import fewer_slots
from comet.experts.staged import StagedCache
from comet.generation.job import generate_job
from comet.generation.source import find_source, model_of
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report
from comet.jobs.generate import GenerateConfig

MODEL = dict(num_experts_per_tok=2)
STORES: dict[str, dict[str, Any]] = {"host": {}, "file": {"expert_store": "file", "host_budget": 1.0}}


def limit_memory(room: int) -> None:
    """A device with room for so many slots of all caches that are alive."""
    held: dict[int, int] = {}

    def limited(kind: type) -> type:
        class Limited(kind):  # type: ignore[misc, valid-type]
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                gc.collect()  # free the caches that only a cycle of references keeps
                if sum(held.values()) + self.num_slots > room:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
                held[id(self)] = self.num_slots
                weakref.finalize(self, held.pop, id(self))

        return Limited

    comet.experts.paths.ExpertCache = limited(ExpertCache)  # type: ignore[misc]
    comet.experts.paths.StagedCache = limited(StagedCache)  # type: ignore[misc]


@pytest.fixture(autouse=True)
def whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ExpertCache, StagedCache):
        monkeypatch.setattr(comet.experts.paths, kind.__name__, kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3_moe", **MODEL).save_pretrained(made)
    return made


def test_fewer_slots_example_of_the_docstring() -> None:
    assert fewer_slots(16, 3, 4, 2) == 10
    assert fewer_slots(16, 4, 4, 2) == 14, "another rank had less"
    assert fewer_slots(16, 0, 4, 2) == 3
    assert fewer_slots(3, 3, 4, 2) == 2


@pytest.mark.parametrize("store", STORES)
def test_the_cache_shrinks_and_goes_on(store: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit_memory(10)  # two layers ask for 16 slots, so the second layer does not fit
    with caplog.at_level(logging.WARNING, "comet"):
        loaded = hf.load_pretrained(folder, expert_budget=1.0, **STORES[store])
    assert caplog.messages == [
        "expert_budget: 3 slots in each of 2 layers in place of 8: the device is out of memory (CUDA out of memory. "
        "Tried to allocate)"
    ]
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(tiny_model("qwen3_moe", **MODEL), prompt(2, 9)))
    report = cache_report(loaded)
    assert report.slots == 3
    assert report.fetched > 2 * report.slots


@pytest.mark.parametrize(("store", "least"), [("host", 1), ("file", 2)])
def test_too_little_for_a_token_is_refused(store: str, least: int, folder: Path) -> None:
    limit_memory(2 * least - 1)
    told = rf"expert_budget must fit the device's memory: {least} slots in each of 2 layers.* \(CUDA out of mem"
    with pytest.raises(ValueError, match=told):
        hf.load_pretrained(folder, expert_budget=1.0, **STORES[store])


@in_ranks(2)
def test_all_ranks_take_the_slots_of_the_one_with_least_memory(rank: int, world_size: int, folder: Path) -> None:
    group = make_group(tiny_config("qwen3_moe", **MODEL), 1, 2)
    limit_memory(10 if rank else 100)
    loaded = hf.load_pretrained(folder, group, expert_budget=1.0)
    assert cache_report(loaded).slots == 3
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(tiny_model("qwen3_moe", **MODEL), prompt(2, 9)))
    del loaded
    limit_memory(1 if rank else 100)
    with pytest.raises(ValueError, match="CUDA out of memory" if rank else "another rank is out of memory"):
        hf.load_pretrained(folder, group, expert_budget=1.0)
    group.close()


def test_a_job_expects_the_hits_of_the_slots_that_fitted(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **MODEL)
    limit_memory(6)
    settings = GenerateConfig(source=str(tmp_path), prompts=("ab",), max_new_tokens=2, expert_budget=1.0)
    job = make_generation(model=model_of(find_source(str(tmp_path))), generate=settings)
    cache = generate_job(job, Rank())["expert_cache"]
    assert cache["slots"] == 3
