"""Experts in host memory and in files on a GPU: pinned exactly, read by kernels or brought by the host."""

import gc
import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from cache_cases import resident_weights
from cached_layers import CUDA, K, case_of, draw_step
from hf_cases import greedy, logits_with_cache, prompt, tiny_model
from hf_fp8_cases import publish

import comet.experts.store
from comet.decode.runners import Decoder, LocalRunner
from comet.experts.cache import ExpertCache
from comet.experts.cached import CachedExperts
from comet.experts.staged import Stage, StagedCache, StagedExperts
from comet.experts.store import HeldExperts, host_memory
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report

pytestmark = pytest.mark.gpu
E = 24


def test_memory_is_pinned_as_large_as_it_is_and_freed_again() -> None:
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    memory, readable = host_memory((3, 1000), torch.float32, CUDA)
    assert readable
    assert memory.is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before, "not of torch's allocator"
    memory.fill_(2)
    assert memory.to(CUDA, non_blocking=True).sum() == 6000
    address = memory.data_ptr()
    del memory
    gc.collect()
    again, _ = host_memory((3, 1000), torch.float32, CUDA)  # most likely at the same address, which must be free
    assert again.is_pinned(), address


def test_memory_may_go_in_the_midst_of_a_capture() -> None:
    """Garbage collection may free pinned memory at any time."""
    memory, number = [host_memory((3, 1000), torch.float32, CUDA)[0]], torch.zeros(1, device=CUDA)
    for mode in ("global", "thread_local"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            number += 1
            memory.clear()
            number += 1
        graph.replay()
        memory = [host_memory((3, 1000), torch.float32, CUDA)[0]]
        assert memory[0].is_pinned()
    assert number == 4


@pytest.mark.parametrize("num_slots", [K, 9, E])
def test_steps_from_either_store_equal_resident_experts_bit_for_bit(num_slots: int) -> None:
    made = torch.Generator().manual_seed(num_slots)
    whole = resident_weights(case_of(1, E=E), None, CUDA, torch.bfloat16)
    held = HeldExperts.fill(HeldExperts(whole.w1.cpu(), whole.w2.cpu(), False), CUDA)
    assert held.readable
    stage = Stage(num_slots, held.specs, CUDA)
    staged = StagedExperts(StagedCache(held, stage, 0, num_slots, CUDA), LocalRunner(K, 8), K)
    cached = CachedExperts(ExpertCache(held, num_slots, CUDA), LocalRunner(K, 8), K)
    assert cached.cache.host.w1.data_ptr() == held.w1.data_ptr(), "no second copy"
    decode = Decoder(K, 8)
    for step in range(60):
        given = draw_step(made, 1, E, masked=False)
        wanted = decode(*given, whole)
        for path in (staged, cached):
            assert torch.equal(path(given, whole.w1, whole.w2), wanted), f"step {step}, {path}"
    assert staged.cache.needed == 60 * K
    for num_tokens in (30, 9):  # more than a decode step takes
        given = draw_step(made, num_tokens, E, masked=False)
        found = [path(given, whole.w1, whole.w2) for path in (staged, cached)]
        assert torch.equal(*found)
        wanted = Decoder(K, num_tokens)(*given, whole)
        torch.testing.assert_close(found[0], wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("store", [{}, {"expert_store": "file", "host_budget": 0.6}])
def test_a_folder_with_a_budget_answers_as_the_whole_model_does(store: dict, tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    whole = hf.load_pretrained(tmp_path, device="cuda")
    loaded = hf.load_pretrained(tmp_path, device="cuda", expert_budget=0.5, **store)
    ids = prompt(1, 30).cuda()
    assert torch.equal(logits_with_cache(loaded, ids, 1), logits_with_cache(whole, ids, 1))
    assert torch.equal(greedy(loaded, ids[:, :1]), greedy(whole, ids[:, :1]))
    assert cache_report(loaded).fetched > 0
    assert cache_report(loaded).prefetch == (not store), "the default, auto"


@pytest.mark.parametrize("settings", [{"keep_fp8": True}, {"expert_dtype": "mxfp4"}])
def test_quantised_experts_from_files_answer_as_those_that_are_pinned(settings: dict, tmp_path: Path) -> None:
    """The answers are steps and a prompt that streams."""
    tiny_model("qwen3_moe", torch.bfloat16, hidden_size=160, moe_intermediate_size=256).save_pretrained(tmp_path)
    if "keep_fp8" in settings:
        publish(tmp_path)
    stores = {}, {"expert_store": "file", "host_budget": 0.6}
    models = [
        hf.load_pretrained(tmp_path, device="cuda", dtype=torch.bfloat16, expert_budget=0.5, **store, **settings)
        for store in stores
    ]
    ids = prompt(1, 40).cuda()
    for prefill in (1, 30):
        assert torch.equal(*[logits_with_cache(model, ids, prefill) for model in models])
    assert torch.equal(*[greedy(model, ids[:, :1]) for model in models])
    assert cache_report(models[1]).staged_bytes > 0


@pytest.mark.parametrize("settings", [{}, {"expert_dtype": "mxfp4"}])
def test_memory_that_cannot_be_pinned_is_copied_by_the_host(
    settings: dict, tmp_path: Path, monkeypatch, caplog
) -> None:
    """CUDA refuses an address that is registered already; the next kernel must not report this error."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    resident = {"expert_budget": 1.0, "expert_prefetch": False, **settings} if settings else {}
    whole = hf.load_pretrained(tmp_path, device="cuda", **resident)
    register = comet.experts.store.PinnedMapping.register

    def twice(mapping, address, num_bytes):
        assert register(mapping, address, num_bytes) == 0
        return register(mapping, address, num_bytes)

    monkeypatch.setattr(comet.experts.store.PinnedMapping, "register", twice)
    with caplog.at_level(logging.WARNING, "comet"):
        loaded = hf.load_pretrained(tmp_path, device="cuda", expert_budget=0.5, **settings)
    assert "cannot be pinned" in caplog.text
    assert not cache_report(loaded).prefetch
    ids = prompt(1, 20).cuda()
    assert torch.equal(logits_with_cache(loaded, ids, 1), logits_with_cache(whole, ids, 1))
