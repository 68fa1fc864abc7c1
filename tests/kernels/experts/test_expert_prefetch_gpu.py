"""Experts that travel before their step, replayed: outputs of resident ones, and texts stay."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from cache_cases import cache_of, check_slots, resident_weights
from cached_layers import CUDA, LAYERS, CachedLayers, D, E, K, case_of
from gpus import captured
from training_cases import MODEL, awake_model, slots_of

from comet.config import MoEConfig, SpeculationConfig
from comet.decode.runners import LocalRunner
from comet.experts.cache import report_of
from comet.generation.engine import GPTEngine
from comet.generation.generate import generate, warm_up
from comet.generation.speculation import Speculation
from comet.generation.text import ByteCodec
from comet.jobs.generate import GenerateConfig
from comet.kernels.experts.prefetch import plan, travel
from comet.kernels.experts.tables import GATE

pytestmark = pytest.mark.gpu
DRAFTS = SpeculationConfig(speculate="conservative", draft_experts=(2,), draft_tokens=3, tau=0.0)


class Pass:
    def __init__(self, layers: CachedLayers, num_tokens: int, num_experts: int, replayed: bool) -> None:
        self.layers, self.replayed = layers, replayed
        self.tokens = torch.zeros(num_tokens, D, dtype=torch.bfloat16, device="cuda")
        self.weights = torch.zeros(num_tokens, num_experts, device="cuda")
        if replayed:
            self.graph, self.outputs = captured(lambda: layers.cached(self.tokens, self.weights))

    def __call__(self, made: torch.Generator) -> None:
        self.tokens.copy_(torch.randn(self.tokens.shape, generator=made).bfloat16())
        self.weights.copy_(torch.rand(self.weights.shape, generator=made))
        if self.replayed:
            self.graph.replay()
        else:
            self.outputs = self.layers.cached(self.tokens, self.weights)
        expected = self.layers.expected(self.tokens, self.weights)
        for layer in range(LAYERS):
            assert torch.equal(self.outputs[layer], expected[layer]), f"layer {layer}"


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 20), (5, 12), (1, E)])
@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
def test_steps_equal_resident_experts_bit_for_bit(num_tokens: int, num_slots: int, replayed: bool) -> None:
    """Steps of all experts alternate with draft-like steps of half of the experts for one token."""
    print("seed", num_slots)
    made, drawn = torch.Generator().manual_seed(num_slots), random.Random(num_slots)
    layers = CachedLayers(num_slots, num_tokens, made)
    step, draft = Pass(layers, num_tokens, K, replayed), Pass(layers, 1, K // 2, replayed)
    for _ in range(200):
        layers.draw(made)
        drawn.choice([step, step, draft])(made)
    torch.cuda.synchronize()
    layers.check_slots()
    assert all(int(cache.tables.header[GATE.value]) == 0 for cache in layers.caches)
    report = report_of(layers.caches)
    print(report)
    if num_slots < E:
        assert report.prefetched > report.prefetched_needed > 0
        assert report.prefetch_precision is not None


def test_what_travels_until_its_step_begins_arrives_whole() -> None:
    """Experts of Qwen3 have a thousand pieces each; the step begins while they travel."""
    print("seed 0")
    made, drawn, num_experts, num_slots = torch.Generator().manual_seed(0), random.Random(0), 24, 12
    case, place = case_of(1, K=4, E=num_experts, D=2048, F=768), (None, CUDA, torch.bfloat16)
    cache, everything = cache_of(case, num_slots, *place), resident_weights(case, *place)
    cache.expect_prefetch()
    runner, side = LocalRunner(4, 1), torch.cuda.Stream()
    tokens, weights = torch.randn(1, 2048, generator=made).bfloat16().cuda(), torch.full((1, 4), 0.25, device=CUDA)
    for step in range(400):
        ids, guesses = (torch.rand(1, num_experts, generator=made).argsort(1)[:, :4].int().cuda() for _ in range(2))
        guesses[:, :3] = ids[:, :3]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            plan(guesses, cache.weights.parts, cache.host)
            planned = side.record_event()
            travel(cache.weights.parts, cache.host)
        torch.cuda.current_stream().wait_event(planned)
        torch.cuda._sleep(drawn.randrange(1_000_000))
        runner.decode(tokens, ids, weights, cache.weights)
        torch.cuda.synchronize()
        owners = cache.tables.owners.long()
        held = owners >= 0
        for slots, stored in zip(cache.weights.parts, everything.parts, strict=True):
            assert torch.equal(slots[held], stored[owners[held]]), f"step {step}"
    begun, needed = cache.tables.totals[4:6].tolist()
    assert begun > needed > 0


def test_whoever_streams_tokens_waits_for_what_travels() -> None:
    """Another thread may read a prompt while experts of Qwen3's size travel to a step."""
    case, place = case_of(1, K=4, E=8, D=2048, F=768), (None, CUDA, torch.bfloat16)
    cache = cache_of(case, 6, *place)
    cache.expect_prefetch()
    cache.travel_stream = torch.cuda.Stream()
    with torch.cuda.stream(cache.travel_stream):
        torch.cuda._sleep(20_000_000)
        plan(torch.tensor([[5, 2, 7, 1]], dtype=torch.int32, device=CUDA), cache.weights.parts, cache.host)
        travel(cache.weights.parts, cache.host)
    assert sorted(cache.owners()) == [-1, -1, 1, 2, 5, 7]
    check_slots(cache)


EXPERTS = MoEConfig(hidden_size=128, ffn_size=128, num_experts=16, top_k=4)
PROMPTS = [[7, 1, 9, 4], [3], [*range(40, 60)]]


@pytest.fixture
def rounds_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation.__init__, "__defaults__", (itertools.count().__next__,))


@pytest.mark.usefixtures("rounds_take_equally_long")
def test_greedy_texts_of_captured_passes_are_those_without_prefetch() -> None:
    config = replace(MODEL, context=512, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, moe=EXPERTS)
    asked = GenerateConfig(
        prompts=("a", "b", "c"), max_new_tokens=200, temperature=0.0, speculate="conservative", tau=0.0
    )
    made = []
    for prefetch in (False, True):
        model, group = awake_model(config, in_slots=True, device=torch.device("cuda", 0))
        store = slots_of(11, EXPERTS.num_experts, expert_prefetch=prefetch)
        engine = GPTEngine(model, group, store=store, speculation=DRAFTS, cuda_graph="on")
        warm_up(engine, PROMPTS, asked, context=512)
        made.append(generate(engine, ByteCodec(), PROMPTS, asked, context=512))
        engine.check()
        assert engine.graph_fallback_reason == ""
        report = engine.cache_report()
        print(report)
        group.close()
    assert made[0].texts == made[1].texts
    assert made[1].speculation["drafted"] > made[1].speculation["accepted"] > 0
    assert report is not None
    assert report.prefetched_needed > 0
