"""Self-speculative decoding of Hugging Face folders: the text of plain decoding, on one rank and over ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import drafting_rounds, graphs_on_cpu
from ranks import run_ranks
from tiers import slow

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import FAMILIES, save_model, tiny_model
from training_cases import Rank, make_job

from comet.config import SpeculationConfig
from comet.experts import Speculation
from comet.generation.hf import HFEngine
from comet.generation.job import generate_job
from comet.generation.source import find_source, model_of
from comet.integrations import hf
from comet.integrations.hf.gates import drafting_gate, gate_beside, routed_by, router_of, routing_config
from comet.jobs.generate import GenerateConfig

GREEDY = GenerateConfig(
    prompts=("def f(x):", "a", "the quick brown fox"),
    max_new_tokens=14,
    draft_tokens=3,
    temperature=0.0,
    speculate="conservative",
    tau=0.0,
)
DRAFTS = SpeculationConfig(draft_experts=(1,), tau=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in ("qwen3_moe", "mixtral")}
    save_model(found["qwen3_moe"], "qwen3_moe", num_experts_per_tok=2, max_position_embeddings=32)
    save_model(found["mixtral"], "mixtral")
    return found


def engine_of(family: str, cuda_graph: Any = "auto") -> HFEngine:
    return HFEngine(hf.convert(tiny_model(family)), cuda_graph=cuda_graph, speculation=DRAFTS)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_draft_routes_as_the_model_does_with_a_smaller_top_k(family: str) -> None:
    model, drawn = tiny_model(family), torch.Generator().manual_seed(3)
    name = next(name for name, module in model.named_modules() if hasattr(module, "is_concatenated"))
    gate = gate_beside(model, name)
    tokens = torch.randn(1, 7, 32, generator=drawn)
    router, drafting = router_of(gate, routing_config(model.config)), drafting_gate(model, name)
    for top_k in (1, 2):
        gate.top_k = top_k
        _, weights, ids = gate(tokens)
        router.config = replace(router.config, top_k=top_k)
        with routed_by([drafting], [router]):
            _, found_weights, found = drafting(tokens)
        order, found_order = ids.argsort(1), found.argsort(1)
        assert torch.equal(found.gather(1, found_order), ids.gather(1, order))
        torch.testing.assert_close(found_weights.gather(1, found_order), weights.gather(1, order).float())
        assert torch.equal(drafting(tokens)[2], ids), "the gate decides again"


def test_captured_passes_make_the_logits_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    # As on a stream that captures, where masks are not looked at.
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda tensor=None: True)
    found = []
    for mode in ("off", "on"):
        engine = engine_of("qwen3_moe", mode)
        found.append(drafting_rounds(engine, 3))
        assert engine.weight_bytes_per_step() > 0
    assert captures.count == 3, "drafts, verification and steps"
    for eager, captured in zip(*found, strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-5)


def run(rank: int, world_size: int, folder: str, ep: int, tp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    job, found = make_job(Path(folder), ep=ep, tp=tp, model=model_of(find_source(folder))), []
    Speculation.__init__.__defaults__ = (itertools.count().__next__,)
    for changes in cases:
        settings = replace(GREEDY, source=folder, link_gb_per_s=1.0, memory_gb_per_s=1.0, **changes)
        found.append(generate_job(replace(job, generate=settings), Rank(rank, world_size)))
    return found


PLAIN = {"speculate": "off"}
CASES = [
    {},
    {"expert_budget": 0.75, "expert_prefetch": True},
    {"expert_budget": 0.75, "draft_cached_only": True},
]
MORE = [
    {"expert_budget": 0.75, "expert_store": "file", "host_budget": 0.75},
    {"repetition_penalty": 1.3, "expert_budget": 0.75},
    {"speculate": "adaptive", "tau": 0.2},
]


@pytest.mark.parametrize(("family", "cases"), [("qwen3_moe", [*CASES, *MORE]), ("mixtral", CASES[1:2])])
def test_greedy_texts_are_those_of_plain_decoding(
    family: str, cases: list[dict[str, Any]], folders: dict[str, Path]
) -> None:
    """The context of 32 tokens ends inside drafts; half of the slots are given away again and again."""
    folder, penalised = str(folders[family]), {**PLAIN, "repetition_penalty": 1.3}
    plain, plain_penalised, *found = run(0, 1, folder, 1, 1, [PLAIN, penalised, *cases])
    for changes, made in zip(cases, found, strict=True):
        facts = made["speculation"]
        assert facts["drafted"] >= facts["accepted"] > 0, changes
        if changes.get("speculate") == "adaptive":
            assert 0 < facts["agreement"] <= 1
            continue
        assert made["texts"] == (plain_penalised if "repetition_penalty" in changes else plain)["texts"], changes
        if "expert_budget" in changes:
            cache = made["expert_cache"]
            assert cache["needed"] > cache["fetched"] > 2 * cache["slots"], "slots were given away"
            assert (cache["prefetched_needed"] > 0) == ("expert_prefetch" in changes)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), slow(1, 2), slow(2, 2)])
def test_ranks_write_the_text_of_one(ep: int, tp: int, folders: dict[str, Path]) -> None:
    folder = str(folders["qwen3_moe"])
    (plain,) = run(0, 1, folder, 1, 1, [PLAIN])
    ranks = run_ranks(run, ep * tp, folder, ep, tp, CASES[1:])
    for changes, *made in zip(CASES[1:], *ranks, strict=True):
        for each in made:
            assert each["texts"] == plain["texts"], changes
            assert each["speculation"] == made[0]["speculation"]
        assert made[0]["speculation"]["accepted"] > 0
        assert (made[0]["expert_cache"]["prefetched_needed"] > 0) == ("expert_prefetch" in changes)


def test_what_cannot_draft() -> None:
    sliding = hf.convert(tiny_model("mixtral", sliding_window=64))
    with pytest.raises(NotImplementedError, match="speculate must be 'off' for models with StaticSlidingWindowLayer"):
        HFEngine(sliding, speculation=DRAFTS)
    model = hf.convert(tiny_model("mixtral"))
    model.model.layers[1].mlp.gate = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate \(Identity\) must have a weight \(E, D\)"):
        HFEngine(model, speculation=DRAFTS)
