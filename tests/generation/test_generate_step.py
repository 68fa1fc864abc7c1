"""The decode step: over memory that stays in place it makes the tokens of a plain loop, captured or not."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from generate_cases import NOT_PERMITTED, graphs_on_cpu
from training_cases import MODEL, MOE, awake_model

from comet.generation.engine import GPTEngine
from comet.generation.generate import generate, warm_up
from comet.generation.text import ByteCodec
from comet.graphed.step import DecodeStep, batch_obstacle
from comet.jobs.generate import GenerateConfig
from comet.models.cache import CHUNK, KeyValueCache, allocated_places, attend_to_cache
from comet.models.config import ModelConfig
from comet.utils.graphs import TOO_FEW, first_line

SHARED = replace(MODEL, dense_layers=1, moe=replace(MOE, shared_ffn_size=32))  # a part of decode steps
PROMPTS = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
LENGTHS = torch.tensor([4, 2])


def engine_of(config: ModelConfig = SHARED, ep: int = 1, tp: int = 1, cuda_graph: str = "auto") -> GPTEngine:
    return GPTEngine(*awake_model(config, ep=ep, tp=tp, max_tokens=64), cuda_graph=cuda_graph)


def step_loop(engine: GPTEngine, steps: int) -> torch.Tensor:
    chosen = [engine.prefill(PROMPTS, LENGTHS, 16).argmax(-1)]
    while len(chosen) < steps:
        chosen.append(engine.decode(chosen[-1]).argmax(-1))
    return torch.stack(chosen, dim=1)


def cache_of(engine: GPTEngine) -> KeyValueCache:
    cache = engine._cache
    assert cache is not None
    return cache


def test_what_a_sequence_left_behind_does_not_reach_the_next() -> None:
    engine = engine_of()
    wanted = step_loop(engine, 9)
    cache = cache_of(engine)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.inf)
    assert torch.equal(step_loop(engine, 9), wanted)
    assert cache_of(engine) is cache


def test_other_room_is_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    engine = engine_of()
    assert engine.graph_fallback_reason == TOO_FEW
    for max_length in (16, 17, 17, 16):
        engine.prefill(PROMPTS, LENGTHS, max_length)
        for token in range(3):
            engine.decode(torch.tensor([token, token]))
    assert captures.count == 3


def test_generated_texts_are_the_same_with_and_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, config = graphs_on_cpu(monkeypatch), GenerateConfig(prompt="x", max_new_tokens=10, seed=3)
    prompts = [[1, 2, 3], [4]]
    made = []
    for mode in ("off", "on"):
        engine = engine_of(cuda_graph=mode)
        warm_up(engine, prompts, config, context=32)
        made.append(generate(engine, ByteCodec(), prompts, config, context=32))
    assert captures.count == 1, "in the warm-up, so that no capture is measured"
    assert captures.replays == 1 + made[1].steps
    assert made[0].texts == made[1].texts
    assert (made[0].graph_fallback_reason, made[1].graph_fallback_reason) == ("cuda_graph='off'", "")


def counting_step(cuda_graph: str = "auto", obstacle: str = "") -> tuple[DecodeStep, torch.Tensor]:
    """A step whose logits are ids plus the number of steps, and the counter."""
    ids, count = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def run() -> torch.Tensor:
        count.add_(1)
        return (ids + count)[:, None].float()

    return DecodeStep(run, ids, cuda_graph=cuda_graph, obstacle=obstacle), count


def test_logits_are_not_overwritten_by_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)
    step, count = counting_step()
    logits = [step(torch.tensor([10 * token, 0])) for token in range(4)]
    assert torch.stack(logits)[:, :, 0].tolist() == [[1, 1], [12, 2], [23, 3], [34, 4]]
    assert count.item() == 4, "a capture computes nothing"


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = graphs_on_cpu(monkeypatch)
    ids = torch.zeros(1, dtype=torch.int64)
    taken = []

    def run() -> torch.Tensor:
        taken.append(int(ids.sum().item()))  # waits for the device
        return ids[:, None].float()

    with caplog.at_level(logging.INFO):
        step = DecodeStep(run, ids)
        for token in range(4):
            assert step(torch.tensor([token])).item() == token
    assert (captures.count, captures.replays, taken) == (1, 0, [0, 1, 2, 3])
    assert NOT_PERMITTED in step.graph_fallback_reason
    assert [NOT_PERMITTED in message for message in caplog.messages] == [True]
    insisting = DecodeStep(run, ids, cuda_graph="on")
    insisting(torch.tensor([1]))
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: the step cannot be captured"):
        insisting(torch.tensor([2]))


def test_the_reason_is_the_mistake_and_not_its_consequence() -> None:
    def fail() -> None:
        try:
            raise RuntimeError("it waits\nfor the device")
        finally:
            raise RuntimeError("the capture failed before")

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert first_line(caught.value) == "it waits"
    assert first_line(RuntimeError("alone")) == "alone"
    assert first_line(NotImplementedError("")) == "NotImplementedError"


def test_a_cpu_and_an_obstacle_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        step, _ = counting_step()
        assert step(torch.tensor([1, 2])).tolist() == [[2.0], [3.0]]
    assert step.graph_fallback_reason == "the model is on the device 'cpu'"
    assert len(caplog.messages) == 1
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: the model is on the device"):
        counting_step(cuda_graph="on")
    with pytest.raises(ValueError, match="must be 'auto' or 'off' here: too hot"):
        counting_step(cuda_graph="on", obstacle="too hot")
    caplog.clear()
    quiet, _ = counting_step(cuda_graph="off", obstacle="too hot")
    assert (quiet.graph_fallback_reason, caplog.messages) == ("cuda_graph='off'", [])


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_attention_to_a_cache_equals_the_formula(length: int, groups: int) -> None:
    places = allocated_places(length)
    print("seed", seed := length * 10 + groups)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 6, 1, 16, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 2, groups, places, 16, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([length, max(1, length // 2)])
    unseen = (torch.arange(places) >= lengths[:, None])[:, None, None]
    wide = [part.repeat_interleave(6 // groups, 1) for part in (keys, values)]
    scores = (query @ wide[0].mT / 4).masked_fill(unseen, -torch.inf)
    exact = scores.softmax(-1) @ wide[1]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        with torch.autocast("cpu", torch.bfloat16):
            found = attend_to_cache(query.to(dtype), keys.to(dtype), values.to(dtype), unseen)
        assert (found.dtype, found.shape) == (dtype, query.shape)
        assert (found.double() - exact).abs().max() < tolerance


def test_places_of_a_cache() -> None:
    assert [allocated_places(length) for length in (1, 200, 256, 257, 300, 512)] == [1, 200, 256, 512, 512, 512]


def test_a_captured_step_joins_streams_first_and_is_refused_once_the_group_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures, engine = graphs_on_cpu(monkeypatch), engine_of(cuda_graph="on")
    engine.prefill(PROMPTS, LENGTHS, 16)
    engine.decode(torch.tensor([0, 0]))
    order, (step,) = [], engine._passes.steps.values()
    monkeypatch.setattr(engine.runner.group.comm.stream_order, "join", lambda: order.append(step._ids[:, 0].tolist()))
    for token in range(1, 3):
        engine.decode(torch.tensor([token, token]))
    assert order[-1] == [1, 1], "the tokens of the call before are still there when a replay joins"
    engine.runner.group.close()
    with pytest.raises(RuntimeError, match=r"was used after close\(\)"):
        engine.decode(torch.tensor([3, 3]))
    assert captures.replays == 2


def test_why_a_batch_is_not_captured_names_warp_decode_only_where_it_is_on():
    assert batch_obstacle(64, 64) == ""
    assert batch_obstacle(65, 64) == "65 tokens are more than the 64 of warp decode"
    assert batch_obstacle(1, 0) == "warp decode is off, and other paths wait for the host"
