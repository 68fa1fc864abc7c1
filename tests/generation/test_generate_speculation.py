"""Self-speculative decoding of comet's GPT and of Hugging Face folders: the passes, whole texts, and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import drafting_rounds, graphs_on_cpu
from hf_cases import FAMILIES, save_model, tiny_model
from ranks import run_ranks
from refusals import refusal
from tiers import slow
from torch import Tensor
from training_cases import MODEL, MOE, Rank, awake_model, make_job

from comet.config import MoEConfig, SpeculationConfig
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate, warm_up
from comet.generation.hf import HFEngine
from comet.generation.job import generate_job
from comet.generation.sampling import Sampler, tokens_seen
from comet.generation.source import find_source, model_of
from comet.generation.speculation import Speculation
from comet.generation.text import ByteCodec, Continuation
from comet.integrations import hf
from comet.integrations.hf.modules import drafting_gate, gate_beside, routed_by, router_beside, routing_config
from comet.jobs.generate import GenerateConfig
from comet.models.config import ModelConfig
from comet.training.trainer import train

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


EXPERTS = MoEConfig(hidden_size=32, ffn_size=32, num_experts=8, top_k=4)
MODELS = {
    "softmax": replace(MODEL, moe=EXPERTS),
    "first layer dense, shared expert in decode steps": replace(
        MODEL, num_layers=3, dense_layers=1, moe=replace(EXPERTS, shared_ffn_size=32)
    ),
    "sigmoid, groups, bias": replace(
        MODEL, moe=replace(EXPERTS, score="sigmoid", balance="bias", num_groups=2, top_groups=1, renormalize=False)
    ),
}
SLOTS = 5
PROMPTS = ["def f(x):", "a", "the quick brown fox jumps ove"]  # the third has room for three tokens
DRAFTS = SpeculationConfig(draft_experts=(3,), tau=0.0)


def engine_of(
    config: ModelConfig = MODELS["softmax"], *, slots: int | None = SLOTS, drafts: SpeculationConfig | None = DRAFTS,
    cuda_graph: str = "auto", sharpness: float = 0.3,
) -> GPTEngine:  # fmt: skip
    """A model whose logits depend on all weights, with few of its experts in slots, or all resident (``None``)."""
    model, group = awake_model(config, in_slots=slots is not None, sharpness=sharpness)
    return GPTEngine(model, group, expert_slots=slots, speculation=drafts, cuda_graph=cuda_graph)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(8))
    return ids, torch.tensor([9, 4, 1])


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_is_a_step_of_the_model_with_a_smaller_top_k(name: str) -> None:
    config = replace(MODELS[name], dense_layers=0)  # whose width would be another one
    engine = engine_of(config)
    few = engine_of(replace(config, moe=replace(config.moe, top_k=3)), slots=None, drafts=None)
    ids, lengths = batch()
    for each in (engine, few):
        each.prefill(ids[:, :1], torch.ones_like(lengths), 8)
    few._cache.keys.copy_(engine._cache.keys)
    few._cache.values.copy_(engine._cache.values)
    torch.testing.assert_close(engine.draft(ids[:, 1]), few.decode(ids[:, 1]), rtol=1e-4, atol=1e-4)


def test_a_number_of_draft_experts_for_each_layer() -> None:
    engine = engine_of(drafts=SpeculationConfig(draft_experts=(1, 2)))
    assert [router.config.top_k for router in engine._drafts] == [1, 2]
    ids, lengths = batch()
    engine.prefill(ids, lengths, 12)
    before = [int(cache.tables.totals[0]) for cache in engine.caches]
    engine.draft(ids[:, 0])
    needed = [int(cache.tables.totals[0]) - start for cache, start in zip(engine.caches, before, strict=True)]
    assert needed[0] <= 3 * 1
    assert needed[1] <= 3 * 2


def run(
    prompts: list[str], *, codec: ByteCodec | None = None, engine: Callable[[], GPTEngine] = engine_of,
    show: Callable | None = None, context: int = 32, **changes: object,
) -> Generated:  # fmt: skip
    settings = {"max_new_tokens": 12, "temperature": 0.0, "speculate": "conservative", "tau": 0.0, **changes}
    config = GenerateConfig(prompts=tuple(prompts), **settings)
    codec = codec or ByteCodec()
    tokens = encode_prompts(config, codec, context)
    return generate(engine(), codec, tokens, config, context=context, show=show)


def same_texts(prompts: list[str], **changes: object) -> Generated:
    """What speculation makes; asserts that it is what plain decoding makes, as it is shown."""
    shown: dict[str, list[str]] = {}
    made, ends = {}, []
    for mode in ("off", "conservative"):
        texts = shown[mode] = [""] * len(prompts)

        def show(index: int, sequence: Continuation, text: str, texts: list[str] = texts) -> None:
            texts[index] += text
            ends.extend([index] if sequence.done else [])

        made[mode] = run(prompts, show=show, **{**changes, "speculate": mode})
    plain, found = made["off"], made["conservative"]
    assert found.texts == plain.texts
    assert found.stopped_by == plain.stopped_by
    assert found.new_tokens == plain.new_tokens
    assert shown["conservative"] == shown["off"] == list(plain.texts)
    assert sorted(ends) == sorted(2 * [*range(len(prompts))]), "the end of a text is shown once"
    assert plain.speculation is None
    return found


def test_a_batch_writes_what_plain_decoding_writes_with_eviction_at_work() -> None:
    made = same_texts(PROMPTS)
    assert made.stopped_by == ("length", "length", "context"), "the context ends inside a draft of the third"
    assert made.speculation["drafted"] > made.speculation["accepted"] > 0
    assert made.speculation["plain_rounds"] > 0
    assert made.steps > made.speculation["rounds"]
    alone = [run([prompt]).texts[0] for prompt in PROMPTS]
    assert alone == list(made.texts), "each sequence of a batch accepts as many drafts as it would alone"


@pytest.mark.parametrize("changes", [{"tau": 0.5}, {"repetition_penalty": 1.5}, {"draft_tokens": 1}, {"top_k": 3}])
def test_settings_change_no_greedy_text(changes: dict) -> None:
    same_texts(PROMPTS[:2], **changes)


@pytest.mark.parametrize(
    "prompts", [PROMPTS, PROMPTS[:2] * 7], ids=["few tokens a pass", "more than warp decode takes"]
)
def test_resident_experts_with_a_shared_expert_in_the_passes(prompts: list[str]) -> None:
    config = MODELS["first layer dense, shared expert in decode steps"]
    same_texts(prompts, engine=lambda: engine_of(config, slots=None))


def test_more_prompts_than_a_draft_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="speculate is for at most 64 prompts at a time, not 65"):
        run(65 * ["a"], engine=lambda: engine_of(slots=None), max_new_tokens=3)


class EndingCodec(ByteCodec):
    """Some bytes end a text."""

    def __init__(self, *end_ids: int) -> None:
        self.end_ids = frozenset(end_ids)


def test_an_end_token_inside_a_draft() -> None:
    engine, prompt = engine_of(drafts=None), torch.tensor([list(PROMPTS[0].encode())])
    logits, tokens = engine.prefill(prompt, torch.tensor([9]), 24), []
    for _ in range(8):
        tokens.append(int(logits.argmax()))
        logits = engine.decode(logits.argmax(-1))
    for end in dict.fromkeys(tokens[1:7]):
        made = same_texts(PROMPTS[:2], codec=EndingCodec(end))
        assert made.stopped_by[0] == "end token"
        assert made.new_tokens >= tokens.index(end) + 1


def test_a_stop_text_inside_a_draft() -> None:
    text = run(PROMPTS[:1]).texts[0]
    places = [place for place in range(1, len(text) - 2) if text.find(text[place : place + 2]) == place]
    assert places
    for place in places[:4]:
        found = same_texts(PROMPTS[:1], stop=text[place : place + 2])
        assert found.stopped_by == ("stop",)
        assert found.texts[0] == text[:place]


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
def test_a_text_is_never_too_long(max_new_tokens: int) -> None:
    made = same_texts(PROMPTS[1:2], max_new_tokens=max_new_tokens)
    assert made.new_tokens == max_new_tokens
    assert (made.speculation["rounds"] == 0) == (max_new_tokens == 1), "one token drafts nothing"


def test_sampled_texts_follow_the_seed_and_the_mode() -> None:
    sampled = {"temperature": 0.8, "seed": 3}
    first = run(PROMPTS, **sampled)
    assert run(PROMPTS, **sampled).texts == first.texts
    assert run(PROMPTS, **{**sampled, "seed": 4}).texts != first.texts
    adaptive = run(PROMPTS, **sampled, adaptive_tolerance=1.0, speculate="adaptive")
    assert adaptive.speculation["mode"] == "adaptive"
    assert adaptive.speculation["acceptance"] == 1.0, "T = 1 and tau = 0 accept whatever is drafted"
    assert run(PROMPTS, **sampled, tau=1.0, speculate="adaptive").speculation["accepted"] == 0


def test_captured_passes_make_the_texts_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, made = graphs_on_cpu(monkeypatch), {}
    config = GenerateConfig(prompts=tuple(PROMPTS[:2]), max_new_tokens=16, temperature=0.0, speculate="conservative",
                            tau=0.0, draft_tokens=3)  # fmt: skip
    prompts = [[1, 2, 3], [4]]
    for mode in ("off", "on"):
        engine = engine_of(slots=None, cuda_graph=mode)
        warm_up(engine, prompts, config, context=32)
        counted = captures.count
        made[mode] = generate(engine, ByteCodec(), prompts, config, context=32)
        assert captures.count == counted, "all kinds of passes are captured in the warm-up"
    assert captures.count == 1 + 1 + 3, "plain, draft, and verification of two, three and four tokens"
    assert made["off"].texts == made["on"].texts
    assert made["off"].speculation == made["on"].speculation
    assert (made["off"].graph_fallback_reason, made["on"].graph_fallback_reason) == ("cuda_graph='off'", "")


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids, lengths = torch.tensor([[7, 8, 7], [9, 0, 0]]), torch.tensor([3, 1])
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))
    seen = tokens_seen(ids, lengths, 20)
    assert seen.nonzero().tolist() == [[0, 7], [0, 8], [1, 9]]
    sampler = Sampler(GenerateConfig(repetition_penalty=1.8), 2, torch.device("cpu"), seen=seen)
    processor = RepetitionPenaltyLogitsProcessor(1.8)
    for row, prompt in enumerate(([7, 8, 7], [9])):
        wanted = processor(torch.tensor([prompt]), logits[row : row + 1].clone())
        torch.testing.assert_close(sampler.penalised(logits, seen)[row : row + 1], wanted)
    assert same_texts(PROMPTS[:1], repetition_penalty=3.0).texts != run(PROMPTS[:1], speculate="off").texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model = replace(MODEL, moe=replace(MOE, num_experts=8, top_k=3))
    train(make_job(folder, model=model, steps=20, eval_batches=1, sample_bytes=0), Rank())
    return folder / "out"


def test_the_task_reports_what_was_drafted(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = []
    for mode in ("off", "conservative"):
        settings = GenerateConfig(source=str(trained), prompt="1", max_new_tokens=20, temperature=0.0,
                                  expert_budget=0.5, speculate=mode, draft_experts=(2,), tau=0.1)  # fmt: skip
        model = replace(MODEL, moe=replace(MOE, num_experts=8, top_k=3))
        found.append(generate_job(replace(make_job(tmp_path, model=model), generate=settings), Rank()))
    plain, speculative = found
    assert speculative["text"] == plain["text"]
    assert "speculation" not in plain
    *_, table, line = capsys.readouterr().out.splitlines()
    facts = json.loads(line)["speculation"]
    assert table == (
        f"drafts        {facts['acceptance']:.1%} of {facts['drafted']} accepted, "
        f"{facts['tokens_per_round']:.2f} tokens per round of a sequence"
    )
    assert facts == speculative["speculation"]
    assert facts["mode"] == "conservative"
    assert facts["drafted"] >= facts["accepted"] > 0
    assert len(facts["acceptance_by_position"]) == 4
    assert speculative["expert_cache"]["fetched"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draft_experts=[3]"], "draft_experts=[3] must be below top_k=3 of the model"),
        (["draft_cached_only=true"], "generate.draft_cached_only is no longer a setting: leave it out"),
        (["speculate=yes"], "generate.speculate='yes' must be one of off, conservative, adaptive"),
    ],
)
def test_mistakes_are_one_line(trained: Path, words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    given = ["speculate=conservative", *words]
    words = [f"generate.{word}" for word in [f"source={trained}", "prompt=x", *given]]
    assert message in refusal(capsys, "generate", *words, "parallel=single")


GREEDY = GenerateConfig(
    prompts=("def f(x):", "a", "the quick brown fox"),
    max_new_tokens=14,
    draft_tokens=3,
    temperature=0.0,
    speculate="conservative",
    tau=0.0,
)
ONE_EXPERT = SpeculationConfig(draft_experts=(1,), tau=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in ("qwen3_moe", "mixtral")}
    save_model(found["qwen3_moe"], "qwen3_moe", num_experts_per_tok=2, max_position_embeddings=32)
    save_model(found["mixtral"], "mixtral")
    return found


def hf_engine(family: str, cuda_graph: Any = "auto") -> HFEngine:
    return HFEngine(hf.convert(tiny_model(family)), cuda_graph=cuda_graph, speculation=ONE_EXPERT)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_draft_routes_as_the_model_does_with_a_smaller_top_k(family: str) -> None:
    model, drawn = tiny_model(family), torch.Generator().manual_seed(3)
    name = next(name for name, module in model.named_modules() if hasattr(module, "is_concatenated"))
    gate = gate_beside(model, name)
    tokens = torch.randn(1, 7, 32, generator=drawn)
    router, drafting = router_beside(gate, routing_config(model.config)), drafting_gate(model, name)
    for top_k in (1, 2):
        gate.top_k = top_k
        _, weights, ids = gate(tokens)
        router.config = replace(router.config, top_k=top_k)
        with routed_by([drafting], [router]):
            _, found_weights, found = drafting(tokens)
        order, found_order = ids.argsort(1), found.argsort(1)
        assert torch.equal(found.gather(1, found_order), ids.gather(1, order))
        torch.testing.assert_close(found_weights.gather(1, found_order), weights.gather(1, order).float())
        assert torch.equal(drafting(tokens)[2], ids), "the gate decides again"


def test_captured_passes_make_the_logits_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    # As on a stream that captures, where masks are not looked at.
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda tensor=None: True)
    found = []
    for mode in ("off", "on"):
        engine = hf_engine("qwen3_moe", mode)
        found.append(drafting_rounds(engine, 3))
    assert captures.count == 3, "drafts, verification and steps"
    for eager, captured in zip(*found, strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-5)


def jobs_of(
    rank: int, world_size: int, folder: str, ep: int, tp: int, cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    job, found = make_job(Path(folder), ep=ep, tp=tp, model=model_of(find_source(folder))), []
    Speculation.__init__.__defaults__ = (itertools.count().__next__,)
    for changes in cases:
        settings = replace(GREEDY, source=folder, **changes)
        found.append(generate_job(replace(job, generate=settings), Rank(rank, world_size)))
    return found


CASES: list[dict[str, Any]] = [
    {},
    {"expert_budget": 0.75, "expert_prefetch": True},
    {"expert_budget": 0.75, "expert_store": "file", "host_budget": 0.75},
]
LAYOUTS = [
    ("qwen3_moe", 1, 1),
    ("mixtral", 1, 1),
    ("qwen3_moe", 2, 1),
    slow("qwen3_moe", 1, 2),
    slow("qwen3_moe", 2, 2),
]


@pytest.mark.parametrize(("family", "ep", "tp"), LAYOUTS)
def test_greedy_texts_are_those_of_plain_decoding(family: str, ep: int, tp: int, folders: dict[str, Path]) -> None:
    """The context of 32 tokens ends inside drafts; half of the slots are given away again and again."""
    folder = str(folders[family])
    (plain,) = jobs_of(0, 1, folder, 1, 1, [{"speculate": "off"}])
    for changes, *made in zip(CASES, *run_ranks(jobs_of, ep * tp, folder, ep, tp, CASES), strict=True):
        facts, cache = made[0]["speculation"], made[0].get("expert_cache")
        for each in made:
            assert (each["texts"], each["speculation"]) == (plain["texts"], facts), changes
        assert facts["drafted"] >= facts["accepted"] > 0, changes
        if cache is not None:
            assert cache["needed"] > cache["fetched"] > 2 * cache["slots"], "slots were given away"
            assert (cache["prefetched_needed"] > 0) == ("expert_prefetch" in changes)


def test_what_cannot_draft() -> None:
    sliding = hf.convert(tiny_model("mixtral", sliding_window=64))
    with pytest.raises(NotImplementedError, match="speculate must be 'off' for models with StaticSlidingWindowLayer"):
        HFEngine(sliding, speculation=ONE_EXPERT)
    model = hf.convert(tiny_model("mixtral"))
    model.model.layers[1].mlp.gate = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate \(Identity\) must have a weight \(E, D\)"):
        HFEngine(model, speculation=ONE_EXPERT)
