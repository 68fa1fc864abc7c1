"""Hugging Face models on one GPU: answers as the stock model, and a decode step replayed from a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import FAMILIES, PROMPT, logits_with_cache, prompt, tiny_model
from layer_cases import assert_as_close

from comet.integrations import hf


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_models_answer_as_stock(family: str) -> None:
    ids = prompt(2, 80).cuda()  # a prefill of the grouped path, then decode steps
    model = tiny_model(family).cuda()
    same = logits_with_cache(model, ids, 70).cpu()
    exact = logits_with_cache(tiny_model(family).double().cuda(), ids, 70).cpu()
    actual = logits_with_cache(hf.convert(model), ids, 70)
    assert_as_close(actual, exact, same, torch.float32, family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_decode_replays_from_a_cuda_graph(family: str) -> None:
    model = hf.convert(tiny_model(family, torch.bfloat16).cuda())
    batch, length = PROMPT
    ids = prompt(batch, length + 8).cuda()
    eager, captured = (prefilled(model, ids[:, :length]) for _ in range(2))
    for position in range(length, length + 3):  # warms up: memory is allocated, kernels are compiled
        assert torch.equal(step(model, ids[:, position], eager), step(model, ids[:, position], captured))
    token, graph = ids[:, 0].clone(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = step(model, token, captured)
    for position in range(length + 3, length + 8):
        token.copy_(ids[:, position])
        graph.replay()
        assert torch.equal(logits, step(model, token, eager)), f"{family}: token {position}"


def prefilled(model: Any, ids: Tensor) -> Any:
    """A static cache that holds the prompt."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def step(model: Any, token: Tensor, cache: Any) -> Tensor:
    """Logits ``(batch, 1, V)`` of the next token; the cache counts positions on the device."""
    logits: Tensor = model(token[:, None], past_key_values=cache).logits
    return logits
