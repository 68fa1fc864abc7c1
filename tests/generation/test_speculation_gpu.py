"""Self-speculative decoding on a GPU: captured passes through the expert cache, and what verification rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from training_cases import MODEL

from comet.config import MoEConfig, ParallelConfig, SpeculationConfig
from comet.experts import DraftRouter, Speculation
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, generate, warm_up
from comet.generation.text import ByteCodec
from comet.jobs.generate import GenerateConfig
from comet.layer.group import make_expert_group
from comet.models.gpt import GPT
from comet.router.router import Router

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
EXPERTS = MoEConfig(hidden_size=128, ffn_size=128, num_experts=16, top_k=4)
CONFIG = replace(MODEL, context=512, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, moe=EXPERTS)
PROMPTS = [[7, 1, 9, 4], [3], [*range(40, 60)]]
NEW_TOKENS = 300


@pytest.fixture(autouse=True)
def rounds_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation.__init__, "__defaults__", (itertools.count().__next__,))


def engine_of(dtype: torch.dtype, drafts: SpeculationConfig | None, cuda_graph: str = "on") -> GPTEngine:
    """Six of sixteen experts in slots."""
    group = make_expert_group(EXPERTS, ParallelConfig(), max_tokens=256, dtype=dtype, device=GPU)
    model = GPT(CONFIG, group, seed=1, expert_device=torch.device("cpu"))
    drawn = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(1))
    model.head.weight.data.copy_(drawn * 0.3)
    return GPTEngine(model, group, expert_slots=6, expert_prefetch=False, speculation=drafts, cuda_graph=cuda_graph)


def made_by(engine: GPTEngine, mode: str) -> Generated:
    config = GenerateConfig(
        prompts=("a", "b", "c"), max_new_tokens=NEW_TOKENS, temperature=0.0, speculate=mode, tau=0.0
    )
    warm_up(engine, PROMPTS, config, context=512)
    made = generate(engine, ByteCodec(), PROMPTS, config, context=512)
    engine.check()
    engine._group.close()
    return made


def test_captured_passes_make_the_texts_of_eager_ones_and_of_plain_decoding() -> None:
    drafts = SpeculationConfig(draft_experts=(2,), tau=0.0)
    plain = made_by(engine_of(torch.float32, None), "off")
    made = [made_by(engine_of(torch.float32, drafts, mode), "conservative") for mode in ("on", "off")]
    assert made[0].texts == made[1].texts == plain.texts
    assert (made[0].why_eager, made[1].why_eager) == ("", "cuda_graph='off'")
    assert made[0].speculation["drafted"] > made[0].speculation["accepted"] > 0


@torch.no_grad()
def test_in_bfloat16_a_text_leaves_plain_decoding_only_where_two_tokens_are_as_likely() -> None:
    """Products of one row and of five round differently; what differs first must have been nearly equal."""
    plain, drafting = (
        engine_of(torch.bfloat16, each) for each in (None, SpeculationConfig(draft_experts=(2,), tau=0.0))
    )
    tokens = torch.tensor(made_tokens(drafting))
    prompts = torch.zeros(3, 20, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        prompts[row, : len(prompt)] = torch.tensor(prompt)
    logits = plain.prefill(prompts.to(GPU), torch.tensor([len(prompt) for prompt in PROMPTS], device=GPU), 400)
    gaps = []
    for column in tokens.T.to(GPU):  # plain steps over the very tokens of speculation
        best = logits.max(dim=1).values
        gaps.append(best - logits.gather(1, column[:, None])[:, 0])
        scale = logits.abs().max()
        logits = plain.decode(column)
    gap = torch.stack(gaps)
    print(
        f"{int((gap > 0).sum())} of {gap.numel()} tokens are not the most probable one, by at most {float(gap.max())}"
    )
    assert float(gap.max()) <= float(scale) * 2**-5, "a few times the rounding of bfloat16, 2^-8 of the largest logit"


def made_tokens(engine: GPTEngine) -> list[list[int]]:
    """Tokens of greedy speculation, as they come."""
    config = GenerateConfig(
        prompts=("a", "b", "c"), max_new_tokens=120, temperature=0.0, speculate="conservative", tau=0.0
    )
    tokens: list[list[int]] = [[], [], []]

    class Listening(ByteCodec):
        def stream(self, prompt):
            return Stream(tokens[PROMPTS.index(list(prompt))])

    class Stream:
        def __init__(self, heard: list[int]) -> None:
            self.heard = heard

        def push(self, token: int) -> str:
            self.heard.append(token)
            return ""

        def finish(self) -> str:
            return ""

    generate(engine, Listening(), PROMPTS, config, context=512)
    return tokens


@pytest.mark.parametrize("balance", ["none", "bias"])
def test_the_draft_router_on_kernels_equals_plain_torch(balance: str) -> None:
    drawn = torch.Generator().manual_seed(4)
    tokens, slots = torch.randn(9, 128, generator=drawn), torch.full((16,), -1, dtype=torch.int32)
    slots[[1, 5, 6, 11]] = torch.arange(4, dtype=torch.int32)
    router = Router(replace(EXPERTS, balance=balance))
    if router.selection_bias is not None:
        router.selection_bias.copy_(torch.rand(16, generator=drawn) * 0.1)
    for held in (None, slots):
        wanted = DraftRouter(router.cpu(), 2, held)(tokens)
        found = DraftRouter(router.to(GPU), 2, None if held is None else held.to(GPU))(tokens.to(GPU))
        assert torch.equal(found.top_k_ids.cpu(), wanted.top_k_ids)
        torch.testing.assert_close(found.top_k_weights.cpu(), wanted.top_k_weights, rtol=1e-5, atol=1e-6)


def test_a_draft_among_cached_experts_waits_for_nothing() -> None:
    engine = engine_of(torch.bfloat16, SpeculationConfig(draft_experts=(2,), draft_cached_only=True))
    ids: Tensor = torch.tensor(PROMPTS[2], device=GPU)[None]
    engine.prefill(ids, torch.tensor([20], device=GPU), 64)
    token = torch.tensor([3], device=GPU)
    for _ in range(3):
        engine.draft(token)
    fetched = engine.cache_report().fetched
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            engine.draft(token)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.cache_report().fetched == fetched
    assert engine.why_eager == ""
    engine._group.close()
