"""Hugging Face models in a static cache: steps in fixed memory, captured or not, against the stock model."""

from __future__ import annotations

import logging

import pytest
import torch
from generate_cases import NOT_PERMITTED, graphs_on_cpu, greedy_tokens
from ranks import run_ranks
from tiers import slow

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import FAMILIES, VOCABULARY, make_group, tiny_model
from torch import nn

from comet.generation.hf import HFEngine
from comet.integrations import hf
from comet.integrations.hf.experts import CometExperts

PROMPTS = torch.tensor([[5, 6, 7, 8, 9], [11, 3, 0, 0, 0]])
LENGTHS = torch.tensor([5, 2])
STEPS = 8


def step_loop(decoder: hf.StaticDecoder) -> torch.Tensor:
    """The same by steps."""
    chosen = [decoder.read(PROMPTS, LENGTHS).argmax(-1)]
    while len(chosen) < STEPS:
        chosen.append(decoder.append(chosen[-1]).argmax(-1))
    return torch.stack(chosen, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_the_stock_models_loop(family: str) -> None:
    model = tiny_model(family)
    wanted = greedy_tokens(model, PROMPTS, LENGTHS, STEPS)
    decoder = hf.StaticDecoder(hf.convert(model), 2, 12)
    assert decoder.num_places == 16
    memory = None
    for _ in range(2):  # the second time in the memory of the first
        assert torch.equal(step_loop(decoder), wanted)
        assert decoder.place.item() == 5 + STEPS - 1
        assert [layer.cumulative_length.item() for layer in decoder.cache.layers] == [12] * len(decoder.cache.layers)
        assert memory in (None, [layer.keys.data_ptr() for layer in decoder.cache.layers])
        memory = [layer.keys.data_ptr() for layer in decoder.cache.layers]
    check_cache(model, decoder, wanted)


@torch.no_grad()
def check_cache(model: nn.Module, decoder: hf.StaticDecoder, tokens: torch.Tensor) -> None:
    """What a whole forward pass remembers of each sequence stands behind its padding, and nothing behind that."""
    for row, length in enumerate(LENGTHS.tolist()):
        sequence = torch.cat([PROMPTS[row, :length], tokens[row, :-1]])
        whole = model(sequence[None], use_cache=True).past_key_values
        first = 5 - length
        for held, exact in zip(decoder.cache.layers, whole.layers, strict=True):
            for name in ("keys", "values"):
                found = getattr(held, name)[row]
                torch.testing.assert_close(found[:, first:12], getattr(exact, name)[0], rtol=1e-4, atol=1e-5)
                assert not found[:, 12:].any()


def on_ranks(rank: int, world_size: int, family: str, ep: int, tp: int) -> tuple:
    model = tiny_model(family)
    group = make_group(model, ep, tp)
    decoder = hf.StaticDecoder(hf.convert(model, group), 2, 12)
    tokens = step_loop(decoder)
    hf.check(model)
    group.close()
    return tokens, decoder.place, [layer.keys for layer in decoder.cache.layers]


@pytest.mark.parametrize(("family", "ep", "tp"), [slow("qwen3_moe", 2, 1), ("mixtral", 1, 2)])
def test_two_ranks_take_the_steps_of_one(family: str, ep: int, tp: int) -> None:
    tokens, place, keys = on_ranks(0, 1, family, 1, 1)
    for found in run_ranks(on_ranks, 2, family, ep, tp):
        assert torch.equal(found[0], tokens)
        assert torch.equal(found[1], place)
        torch.testing.assert_close(found[2], keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_captured_step_makes_the_tokens_of_an_eager_one(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = graphs_on_cpu(monkeypatch)
    models = [hf.convert(tiny_model(family, attn_implementation=attention)) for _ in range(2)]
    # transformers up to 5.20 makes the mask of eager attention from a number of the host.
    modes = ("off", "on" if attention == "sdpa" else "auto")
    eager, captured = (HFEngine(model, cuda_graph=mode) for model, mode in zip(models, modes, strict=True))
    for prompts, lengths in ((PROMPTS, LENGTHS), ((PROMPTS.flip(0) + 20) % VOCABULARY, LENGTHS.flip(0))):
        logits = [engine.prefill(prompts, lengths, 13) for engine in (eager, captured)]
        for _ in range(STEPS):
            assert torch.equal(*logits)
            logits = [engine.decode(logits[0].argmax(-1)) for engine in (eager, captured)]
        assert eager.weight_bytes_per_step() == captured.weight_bytes_per_step() > 0
    if captured.graph_fallback_reason:
        assert attention == "eager"
        assert NOT_PERMITTED in captured.graph_fallback_reason
    else:
        assert (captures.count, captures.replays) == (1, STEPS - 1 + STEPS)
    assert eager.graph_fallback_reason == "cuda_graph='off'"
    for layer, other in zip(eager._decoder.cache.layers, captured._decoder.cache.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.cumulative_length, other.cumulative_length)


def test_a_sliding_window_is_not_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    captures = graphs_on_cpu(monkeypatch)
    model = tiny_model("mixtral", sliding_window=64)
    wanted = greedy_tokens(model, PROMPTS, LENGTHS, STEPS)
    with caplog.at_level(logging.INFO):
        decoder = hf.StaticDecoder(hf.convert(model), 2, 12)
        assert torch.equal(step_loop(decoder), wanted)
    why = "transformers counts the positions of StaticSlidingWindowLayer on the host"
    assert (captures.count, decoder.step.graph_fallback_reason) == (0, why)
    assert [why in message for message in caplog.messages] == [True]
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: transformers counts"):
        hf.StaticDecoder(model, 2, 12, cuda_graph="on")


def test_more_sequences_than_warp_decode_takes_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)
    model = hf.convert(tiny_model("mixtral"), decode_tokens=1)
    assert hf.StaticDecoder(model, 2, 12).step.graph_fallback_reason == "2 tokens are more than the 1 of warp decode"
    assert "warp decode" not in hf.StaticDecoder(model, 1, 12).step.graph_fallback_reason


def test_the_stock_experts_wait_for_the_device_and_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated capture notices what a real one would: the loop over experts asks which ones were hit."""
    captures = graphs_on_cpu(monkeypatch)
    model = tiny_model("mixtral")
    decoder = hf.StaticDecoder(model, 2, 12)
    assert torch.equal(step_loop(decoder), greedy_tokens(model, PROMPTS, LENGTHS, STEPS))
    assert captures.count == 1
    assert NOT_PERMITTED in decoder.step.graph_fallback_reason
    assert not any(isinstance(module, CometExperts) for module in model.modules())


@pytest.mark.parametrize(("sequences", "places", "message"), [(0, 4, "num_sequences=0"), (1, 0, "num_places=0")])
def test_sizes_must_be_positive(sequences: int, places: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be at least 1"):
        hf.StaticDecoder(tiny_model("mixtral"), sequences, places)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@torch.no_grad()
def test_a_replayed_step_reads_the_shared_expert_as_it_is(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    models = [hf.convert(tiny_model(family)) for _ in range(2)]
    engines = [HFEngine(model, cuda_graph=mode) for model, mode in zip(models, ("off", "on"), strict=True)]
    for engine in engines:
        engine.prefill(PROMPTS, LENGTHS, 13)
    for step in range(STEPS):
        assert torch.equal(*(engine.decode(torch.tensor([step, 2])) for engine in engines)), f"step {step}"
        for model in models:
            joined = [module.shared for module in model.modules() if getattr(module, "shared", None) is not None]
            assert joined
            weights = [weight for slots in joined for weight in slots.module.parameters()]
            weights[step % len(weights)].normal_(std=0.5, generator=torch.Generator().manual_seed(step))
    assert captures.count == 1
