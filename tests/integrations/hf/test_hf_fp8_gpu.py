"""Block FP8 folders on a GPU: experts kept as they are stored, in decode steps and in a CUDA graph, or dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import logits_with_cache, make_group, prompt, same_state, tiny_config
from hf_fp8_cases import RAGGED, WHOLE, fp8_by_name, load_on_ranks, published, stock
from layer_cases import assert_as_close

from comet.decode import MAX_DECODE_TOKENS
from comet.integrations import hf

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float32)
TOKENS = (1, 2, 9, 65)  # the last takes the path for many, which dequantises the layer
BATCH, PREFILL, STEPS = 2, 40, 12  # a prompt for that path, too


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("whole"), WHOLE)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("ragged"), RAGGED)


def routed(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and routing weights of two of the eight experts, as a router gives them."""
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randn(num_tokens, WHOLE["hidden_size"], generator=generator).to(dtype)
    ids = torch.rand(num_tokens, 8, generator=generator).argsort(dim=1)[:, :2]
    return tokens.cuda(), ids.cuda(), torch.rand(num_tokens, 2, generator=generator).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_group", [False, True])
@torch.no_grad()
def test_kept_experts_against_the_dequantised_ones(whole: Path, dtype: torch.dtype, in_group: bool) -> None:
    group = make_group(tiny_config("deepseek_v3", **WHOLE), dtype=dtype, device="cuda") if in_group else None
    kept = hf.load_pretrained(whole, group, dtype=dtype, device="cuda", keep_fp8=True)
    models = [stock(whole, kind).cuda() for kind in (torch.float64, dtype)]
    for layer in (1, 2):
        block, exact, same = (model.model.layers[layer].mlp for model in (kept, *models))
        for num_tokens in TOKENS:
            tokens, ids, weights = routed(num_tokens, dtype)
            wanted, close = exact.experts(tokens.double(), ids, weights.double()), same.experts(tokens, ids, weights)
            wanted, close = wanted + exact.shared_experts(tokens.double()), close + same.shared_experts(tokens)
            found = block.experts(tokens, ids, weights) + block.shared_experts(tokens)
            assert (block.shared_experts(tokens).dim() == 0) == (num_tokens <= MAX_DECODE_TOKENS), "part of the step"
            what = f"layer {layer}, {num_tokens} tokens, {dtype}, in a group: {in_group}"
            assert_as_close(found, wanted, close, dtype, what)
    hf.check(kept)
    if group is not None:
        group.close()


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_models_answer_as_the_dequantised_one(whole: Path, keep_fp8: bool) -> None:
    """A prefill of the path for many tokens, then decode steps, from a CUDA graph and without; routing changes."""
    ids = prompt(BATCH, PREFILL + STEPS).cuda()
    exact, same = (
        logits_with_cache(stock(whole, kind).cuda(), ids, PREFILL) for kind in (torch.float64, torch.float32)
    )
    model = hf.load_pretrained(whole, device="cuda", keep_fp8=keep_fp8)
    found = logits_with_cache(model, ids, PREFILL)
    assert_as_close(found, exact, same, torch.float32, f"keep_fp8 {keep_fp8}")
    logits = steps(model, ids)
    assert_as_close(logits, exact[:, PREFILL - 1 :], same[:, PREFILL - 1 :], torch.float32, f"captured, {keep_fp8}")


def test_experts_that_transformers_keeps_in_fp8_by_name(whole: Path) -> None:
    ids = prompt(BATCH, PREFILL + STEPS).cuda()
    exact, same = (
        logits_with_cache(stock(whole, kind).cuda(), ids, PREFILL) for kind in (torch.float64, torch.float32)
    )
    logits = steps(fp8_by_name(whole).cuda(), ids)
    assert_as_close(logits, exact[:, PREFILL - 1 :], same[:, PREFILL - 1 :], torch.float32, "by name")


def test_a_graph_in_bfloat16_takes_the_steps_of_eager_ones(whole: Path) -> None:
    model = hf.load_pretrained(whole, dtype=torch.bfloat16, device="cuda", keep_fp8=True)
    ids = prompt(BATCH, PREFILL + STEPS).cuda()
    torch.testing.assert_close(steps(model, ids), steps(model, ids, "off"), rtol=1e-5, atol=1e-5)


def steps(model: Any, ids: Tensor, cuda_graph: str = "on") -> Tensor:
    """Logits ``(B, STEPS + 1, V)`` behind the prompt and behind each step of a ``StaticDecoder``."""
    decoder = hf.StaticDecoder(model, BATCH, PREFILL + STEPS, cuda_graph=cuda_graph)  # type: ignore[arg-type]
    lengths = torch.full((BATCH,), PREFILL, device=ids.device)
    logits = [decoder.read(ids[:, :PREFILL], lengths)]
    logits += [decoder.append(ids[:, position]) for position in range(PREFILL, PREFILL + STEPS)]
    assert decoder.step.why_eager == ("" if cuda_graph == "on" else "cuda_graph='off'")
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_are_dequantised_to_the_bit(ragged: Path, dtype: torch.dtype) -> None:
    assert same_state(hf.load_pretrained(ragged, dtype=dtype, device="cuda"), stock(ragged, dtype).cuda())


def test_a_rank_of_a_group_reads_kept_and_dequantised_experts(ragged: Path, whole: Path) -> None:
    load_on_ranks(0, 1, {"ragged": ragged, "whole": whole}, 1, 1, "cuda")
