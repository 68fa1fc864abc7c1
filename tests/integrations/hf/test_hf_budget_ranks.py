"""Folders with a budget over ranks: each keeps and reads its own experts, and all answer as without a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import slow

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import CountedReads, greedy, logits_with_cache, make_group, prompt, save_fused, tiny_config, tiny_model
from hf_fp8_cases import publish

import comet.experts.store
from comet.experts.staged import StagedReport
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report
from comet.quantization.formats import quantize_mx

EXPERT = 3 * 32 * 64 * 4
TWO = dict(num_experts_per_tok=2, moe_intermediate_size=64)
WIDE = dict(hidden_size=160, moe_intermediate_size=256)
STORES: dict[str, dict[str, Any]] = {
    "host": {},
    "file": {"expert_store": "file", "host_budget": 0.6},
    "mxfp4": {"expert_dtype": "mxfp4"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {style: tmp_path_factory.mktemp("folder") for style in ("one by one", "fused")}
    tiny_model("qwen3_moe", **TWO).save_pretrained(found["one by one"], max_shard_size="30KB")
    save_fused(tiny_model("qwen3_moe", **TWO), found["fused"])
    return found


def answers(rank: int, world_size: int, folder: str, ep: int, tp: int, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Logits and tokens with a budget and without, what the cache did, and the bytes of experts that were read."""
    group, found = make_group(tiny_config("qwen3_moe", **TWO), ep, tp), []
    with CountedReads() as counted:
        budgeted = hf.load_pretrained(folder, group, expert_budget=0.75, **settings)
        read = counted.expert_bytes()
    whole = hf.load_pretrained(folder, group)
    if "expert_dtype" in settings:
        for name, weight in whole.named_parameters():
            if ".experts." in name:
                weight.data.copy_(quantize_mx(weight.data, settings["expert_dtype"]).dequantize())
    for model in (budgeted, whole):
        found += [logits_with_cache(model, prompt(1, 20), 1), greedy(model, prompt(2, 9))]
        hf.check(model)
    group.close()
    return *found, cache_report(budgeted), read


def all_answers(rank: int, world_size: int, ep: int, tp: int, cases: list[tuple[str, str]]) -> list[tuple[Any, ...]]:
    return [answers(rank, world_size, folder, ep, tp, STORES[store]) for store, folder in cases]


@pytest.mark.parametrize(
    ("ep", "tp", "cases"),
    [
        (2, 1, {"host": "one by one", "file": "fused"}),
        (1, 2, {"host": "fused", "mxfp4": "one by one"}),
        slow(2, 1, {"mxfp4": "fused"}),
        slow(2, 2, {"host": "one by one", "file": "fused"}),
    ],
)
def test_ranks_answer_as_with_all_experts(ep: int, tp: int, cases: dict[str, str], folders: dict[str, Path]) -> None:
    given = [(store, str(folders[style])) for store, style in cases.items()]
    ranks = run_ranks(all_answers, ep * tp, ep, tp, given, timeout=300)
    for rank in ranks:
        for store, first, (logits, tokens, whole_logits, whole_tokens, report, read) in zip(
            cases, ranks[0], rank, strict=True
        ):
            assert torch.equal(logits, whole_logits)
            assert torch.equal(tokens, whole_tokens)
            assert torch.equal(logits, first[0])
            assert report.slots == 8 // ep * 3 // 4
            assert report.needed > report.fetched > 2 * report.slots, "slots were given away"
            stored = EXPERT // tp if store != "mxfp4" else EXPERT // 4 // 2 // tp + EXPERT // 4 // 32 // tp
            assert report.fetched_bytes == report.fetched * stored
            if store == "file":
                assert read == 0
                assert isinstance(report, StagedReport)
                assert 0 < report.staged_bytes < report.fetched_bytes
            else:
                assert read == 2 * 8 * EXPERT // (ep * tp), "its own part, once"


def kept_fp8(rank: int, world_size: int, folder: str, tp: int, store: str) -> list[torch.Tensor]:
    group = make_group(tiny_config("deepseek_v3", **WIDE), 2 // tp, tp)
    budget = {"expert_budget": 0.5 * tp, **STORES[store]}
    models = [hf.load_pretrained(folder, group, keep_fp8=True, **each) for each in ({}, budget)]
    found = [greedy(model, prompt(1, 3)) for model in models]
    report = cache_report(models[1])
    assert report.fetched > 0
    assert isinstance(report, StagedReport) == (store == "file")
    group.close()
    return found


@pytest.mark.parametrize(("tp", "store"), [(1, "file"), slow(2, "host"), slow(2, "file")])
def test_block_fp8_is_kept_over_ranks(tp: int, store: str, tmp_path: Path) -> None:
    tiny_model("deepseek_v3", **WIDE).save_pretrained(tmp_path)
    publish(tmp_path)
    ranks = run_ranks(kept_fp8, 2, str(tmp_path), tp, store, timeout=300)
    assert all(torch.equal(tokens, ranks[0][0]) for found in ranks for tokens in found)


def pageable_on_one(rank: int, world_size: int, folder: str) -> tuple[torch.Tensor, bool]:
    memory = comet.experts.store.host_memory
    if rank == 1:
        comet.experts.store.host_memory = lambda *given: (memory(*given)[0], False)
    group = make_group(tiny_config("qwen3_moe", **TWO), 2, 1)
    loaded = hf.load_pretrained(folder, group, expert_budget=0.5)
    tokens = greedy(loaded, prompt(2, 9))
    group.close()
    return tokens, isinstance(cache_report(loaded), StagedReport)


def test_ranks_agree_where_one_cannot_pin(folders: dict[str, Path]) -> None:
    wanted = greedy(tiny_model("qwen3_moe", **TWO), prompt(2, 9))
    for tokens, staged in run_ranks(pageable_on_one, 2, str(folders["fused"])):
        assert staged, "the host copies on both, which then take equal steps"
        assert torch.equal(tokens, wanted)
