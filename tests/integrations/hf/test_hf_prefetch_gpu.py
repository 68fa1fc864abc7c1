"""Prefetch for Hugging Face folders on a GPU: steps and verification, launched and replayed; transformers' own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import VOCABULARY, greedy, prompt, tiny_model

from comet.config import SpeculationConfig
from comet.generation.hf import HFEngine
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report

pytestmark = pytest.mark.gpu
FAMILIES = {"qwen3_moe": {"num_hidden_layers": 6, "mlp_only_layers": [2]}, "deepseek_v3": {"num_hidden_layers": 5}}


def load(family: str, dtype: torch.dtype, folder: Path, *, prefetch: bool | str) -> Any:
    if not (folder / "config.json").is_file():
        tiny_model(family, dtype, **FAMILIES[family]).save_pretrained(folder)
    return hf.load_pretrained(folder, device="cuda", dtype=dtype, expert_budget=0.5, expert_prefetch=prefetch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["off", "on"])
def test_steps_and_verification_are_those_without_it_bit_for_bit(
    mode: Any, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """``on``: three graphs, of steps, drafts and verification, insisted on."""
    models = [load(family, dtype, tmp_path, prefetch=prefetch) for prefetch in (False, True)]
    drafts = SpeculationConfig(draft_experts=(1,), tau=0.0)
    engines = [HFEngine(model, cuda_graph=mode, speculation=drafts) for model in models]
    ids, lengths = prompt(2, 5).cuda(), torch.tensor([5, 2], device="cuda")
    assert torch.equal(*[engine.prefill(ids, lengths, 100) for engine in engines])
    drawn = torch.Generator().manual_seed(3)
    for count in range(24):
        tokens = torch.randint(VOCABULARY, (2, 3), generator=drawn).cuda()
        made = []
        for engine in engines:
            before = engine.lengths.clone()
            made.append([engine.draft(tokens[:, 0])])
            engine.rewind(before)
            made[-1].append(engine.verify(tokens))
            engine.rewind(before + torch.tensor([1 + count % 3, 2], device="cuda"))
            made[-1].append(engine.decode(tokens[:, 2]))
        for kind, first, second in zip(("draft", "verify", "decode"), *made, strict=True):
            assert torch.equal(first, second), f"round {count}, {kind}"
    for engine in engines:
        engine.check()
        assert bool(engine.why_eager) == (mode == "off")
    report = cache_report(models[1])
    print(report)
    assert report.prefetched >= report.prefetched_needed > 0
    assert cache_report(models[0]).prefetched == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_writes_what_it_writes_without_it(family: str, tmp_path: Path) -> None:
    models = [load(family, torch.bfloat16, tmp_path, prefetch=prefetch) for prefetch in (False, "auto")]
    assert [cache_report(model).prefetch for model in models] == [False, True]
    for batch, length in ((1, 1), (2, 9), (1, 3)):
        assert torch.equal(*[greedy(model, prompt(batch, length).cuda()) for model in models])
    assert cache_report(models[1]).prefetched_needed > 0
