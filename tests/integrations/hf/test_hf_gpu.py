"""Hugging Face models on GPUs: answers as the stock model, block FP8 folders, prefetch, steps from CUDA graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import drafting_rounds
from gpus import ON_GPUS
from hf_cases import (
    FAMILIES,
    logits_with_cache,
    make_group,
    prompt,
    tiny_config,
    tiny_model,
)
from hf_fp8_cases import RAGGED, WHOLE, fp8_by_name, load_on_ranks, published, stock
from layer_cases import assert_as_close
from ranks import run_ranks
from torch import Tensor

from comet.config import SpeculationConfig
from comet.decode import MAX_DECODE_TOKENS
from comet.generation.hf import HFEngine
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_models_answer_as_stock(family: str) -> None:
    ids = prompt(2, 80).cuda()  # a prefill of the grouped path, then decode steps
    model = tiny_model(family).cuda()
    same = logits_with_cache(model, ids, 70).cpu()
    exact = logits_with_cache(tiny_model(family).double().cuda(), ids, 70).cpu()
    actual = logits_with_cache(hf.convert(model), ids, 70)
    assert_as_close(actual, exact, same, torch.float32, family)


DTYPES = (torch.bfloat16, torch.float32)
TOKENS = (1, 2, 9, 65)  # the last takes the path for many, which dequantises the layer
BATCH, PREFILL, STEPS = 2, 40, 12  # a prompt for that path, too


def routed(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randn(num_tokens, WHOLE["hidden_size"], generator=generator).to(dtype)
    ids = torch.rand(num_tokens, 8, generator=generator).argsort(dim=1)[:, :2]
    return tokens.cuda(), ids.cuda(), torch.rand(num_tokens, 2, generator=generator).cuda()


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["dequantised", "kept", "by name"])
def test_models_answer_as_the_dequantised_one(whole: Path, how: str) -> None:
    """A prefill takes the path for many tokens; steps follow, with and without a CUDA graph, and routing changes."""
    ids = prompt(BATCH, PREFILL + STEPS).cuda()
    answers = [logits_with_cache(stock(whole, kind).cuda(), ids, PREFILL) for kind in (torch.float64, torch.float32)]
    if how == "by name":
        model = fp8_by_name(whole).cuda()
    else:
        model = hf.load_pretrained(whole, device="cuda", keep_fp8=how == "kept")
        assert_as_close(logits_with_cache(model, ids, PREFILL), *answers, torch.float32, how)
    assert_as_close(steps(model, ids), *(each[:, PREFILL - 1 :] for each in answers), torch.float32, f"captured, {how}")


@pytest.mark.gpu
def test_a_graph_in_bfloat16_takes_the_steps_of_eager_ones(whole: Path) -> None:
    model = hf.load_pretrained(whole, dtype=torch.bfloat16, device="cuda", keep_fp8=True)
    ids = prompt(BATCH, PREFILL + STEPS).cuda()
    torch.testing.assert_close(steps(model, ids), steps(model, ids, "off"), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_decoder_follows_parameters_that_were_replaced(family: str) -> None:
    """Parameters are replaced or moved after the capture; the step that joins a shared expert moves the experts."""
    ids = prompt(BATCH, PREFILL + STEPS).cuda()
    model, others = (hf.convert(tiny_model(family).cuda()) for _ in range(2))
    for parameter in others.parameters():
        parameter.mul_(1.25)
    decoder = hf.StaticDecoder(model, BATCH, PREFILL + STEPS, cuda_graph="on")
    before = steps(model, ids, decoder=decoder)
    assert torch.equal(steps(model, ids, decoder=decoder), before)
    model.load_state_dict(others.state_dict(), assign=True)
    assert torch.equal(steps(model, ids, decoder=decoder), steps(others, ids))
    model.cpu().cuda()
    assert torch.equal(steps(model, ids, decoder=decoder), steps(others, ids))
    assert not torch.equal(steps(others, ids), before)


def steps(model: Any, ids: Tensor, cuda_graph: Any = "on", decoder: Any = None) -> Tensor:
    """Logits ``(B, STEPS + 1, V)`` behind the prompt and behind each step of a ``StaticDecoder``."""
    decoder = decoder or hf.StaticDecoder(model, BATCH, PREFILL + STEPS, cuda_graph=cuda_graph)
    lengths = torch.full((BATCH,), PREFILL, device=ids.device)
    logits = [decoder.read(ids[:, :PREFILL], lengths)]
    logits += [decoder.append(ids[:, position]) for position in range(PREFILL, PREFILL + STEPS)]
    assert decoder.step.graph_fallback_reason == ("" if cuda_graph == "on" else "cuda_graph='off'")
    return torch.stack(logits, dim=1)


@pytest.mark.gpu
def test_a_rank_of_a_group_reads_kept_and_dequantised_experts(ragged: Path, whole: Path) -> None:
    load_on_ranks(0, 1, {"ragged": ragged, "whole": whole}, 1, 1, "cuda")


FAMILIES = {"qwen3_moe": {"num_hidden_layers": 6, "mlp_only_layers": [2]}, "deepseek_v3": {"num_hidden_layers": 5}}


def load(family: str, dtype: torch.dtype, folder: Path, *, prefetch: bool | str) -> Any:
    if not (folder / "config.json").is_file():
        tiny_model(family, dtype, **FAMILIES[family]).save_pretrained(folder)
    return hf.load_pretrained(folder, device="cuda", dtype=dtype, expert_budget=0.5, expert_prefetch=prefetch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["off", "on"])
def test_steps_and_verification_are_those_without_it_bit_for_bit(
    mode: Any, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """``on`` requires three graphs: of steps, drafts and verification."""
    models = [load(family, dtype, tmp_path, prefetch=prefetch) for prefetch in (False, True)]
    drafts = SpeculationConfig(draft_experts=(1,), tau=0.0)
    engines = [HFEngine(model, cuda_graph=mode, speculation=drafts) for model in models]
    for number, (first, second) in enumerate(zip(*(drafting_rounds(engine, 24) for engine in engines), strict=True)):
        assert torch.equal(first, second), f"pass {number}"
    for engine in engines:
        engine.check()
        assert bool(engine.graph_fallback_reason) == (mode == "off")
    report = cache_report(models[1])
    print(report)
    assert report.prefetched >= report.prefetched_needed > 0
    assert cache_report(models[0]).prefetched == 0


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2)])
def test_two_ranks_read_their_own_experts(tmp_path: Path, ep: int, tp: int) -> None:
    folders = {"ragged": published(tmp_path / "ragged", **RAGGED), "whole": published(tmp_path / "whole", **WHOLE)}
    run_ranks(load_on_ranks, 2, folders, ep, tp, "cuda", backend=ON_GPUS, timeout=400)
