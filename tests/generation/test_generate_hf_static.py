"""Hugging Face models in a static cache: steps in fixed memory, captured or not, against the stock model."""

from __future__ import annotations

import logging

import pytest
import torch
from generate_cases import NOT_PERMITTED, graphs_on_cpu, greedy_tokens

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import tiny_model

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
