"""Self-speculative decoding of comet's GPT and of Hugging Face folders: the passes, whole texts, and the command."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from generate_cases import graphs_on_cpu
from hf_cases import save_model, tiny_model
from ranks import in_ranks, run_ranks
from refusals import refusal
from tiers import slow
from torch import Tensor
from training_cases import MODEL, MOE, Rank, awake_model, make_generation, make_group, make_job, slots_of

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
from comet.jobs.generate import GenerateConfig
from comet.layer.group import ExpertGroup
from comet.models.config import ModelConfig
from comet.training.trainer import train

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


EXPERTS = MoEConfig(hidden_size=32, ffn_size=32, num_experts=8, top_k=4)
CONFIG = replace(MODEL, moe=EXPERTS)
SLOTS = 5
PROMPTS = ["def f(x):", "a", "the quick brown fox jumps ove"]  # the third has room for three tokens
DRAFTS = SpeculationConfig(draft_experts=(3,), tau=0.0)


def engine_of(
    config: ModelConfig = CONFIG, group: ExpertGroup | None = None, *, slots: int | None = SLOTS,
    drafts: SpeculationConfig | None = DRAFTS, cuda_graph: str = "auto", **options: Any,
) -> GPTEngine:  # fmt: skip
    """A model whose logits depend on all weights, with few of its experts in slots, or all resident (``None``)."""
    model, group = awake_model(config, group, in_slots=slots is not None)
    store = slots_of(slots, config.moe.num_experts // group.parallel.ep, **options)
    return GPTEngine(model, group, store=store, speculation=drafts, cuda_graph=cuda_graph)


def test_a_number_of_draft_experts_for_each_layer() -> None:
    engine = engine_of(drafts=SpeculationConfig(draft_experts=(1, 2)))
    assert [router.config.top_k for router in engine._drafts] == [1, 2]
    ids = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(8))
    engine.prefill(ids, torch.tensor([9, 4, 1]), 12)
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
    """Return what speculation makes, and assert that plain decoding makes and shows the same."""
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
    config = replace(MODEL, num_layers=3, dense_layers=1, moe=replace(EXPERTS, shared_ffn_size=32))
    same_texts(prompts, engine=lambda: engine_of(config, slots=None))


def test_more_prompts_than_a_draft_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts=65 must be at most 64: speculate='off' takes more"):
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
    for drafts in ({}, dict(speculate="conservative", draft_experts=(2,), tau=0.1)):
        settings = GenerateConfig(source=str(trained), prompt="1", max_new_tokens=20, temperature=0.0,
                                  expert_budget=0.5, **drafts)  # fmt: skip
        model = replace(MODEL, moe=replace(MOE, num_experts=8, top_k=3))
        found.append(generate_job(make_generation(model, settings), Rank()))
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
        ("speculate=conservative draft_experts=[3]", "draft_experts=[3] must be below top_k=3 of the model"),
        ("draft_cached_only=true", "generate.draft_cached_only is no longer a setting: leave it out"),
        (
            "expert_policy=lfu",
            "generate.expert_policy is no longer a setting: leave it out: the expert used longest ago",
        ),
        ("draft_experts=[1]", "draft_experts=(1,) must come with speculate=conservative or adaptive: speculate="),
        (
            "speculate=conservative adaptive_tolerance=0.1",
            "adaptive_tolerance=0.1 must come with speculate=adaptive: speculate=conservative",
        ),
    ],
)
def test_mistakes_are_one_line(trained: Path, words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    given = [f"generate.{word}" for word in [f"source={trained}", "prompt=x", *words.split()]]
    assert message in refusal(capsys, "generate", "--dry-run", *given)


GREEDY = GenerateConfig(
    prompts=("def f(x):", "a", "the quick brown fox"),
    max_new_tokens=14,
    draft_tokens=3,
    temperature=0.0,
    speculate="conservative",
    tau=0.0,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in ("qwen3_moe", "mixtral")}
    save_model(found["qwen3_moe"], "qwen3_moe", num_experts_per_tok=2, max_position_embeddings=32)
    save_model(found["mixtral"], "mixtral")
    return found


def jobs_of(
    rank: int, world_size: int, folder: str, ep: int, tp: int, cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    job, found = make_generation(model_of(find_source(folder)), ep=ep, tp=tp), []
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
    slow("qwen3_moe", 2, 1),
    slow("qwen3_moe", 1, 2),
]


@pytest.mark.parametrize(("family", "ep", "tp"), LAYOUTS)
def test_greedy_texts_are_those_of_plain_decoding(family: str, ep: int, tp: int, folders: dict[str, Path]) -> None:
    """The context of 32 tokens ends inside drafts; half of the slots are given away again and again."""
    folder = str(folders[family])
    (plain,) = jobs_of(0, 1, folder, 1, 1, [{"speculate": "off", "draft_tokens": 4, "tau": 0.5}])
    for changes, *made in zip(CASES, *run_ranks(jobs_of, ep * tp, folder, ep, tp, CASES), strict=True):
        facts, cache = made[0]["speculation"], made[0].get("expert_cache")
        for each in made:
            assert (each["texts"], each["speculation"]) == (plain["texts"], facts), changes
        assert facts["drafted"] >= facts["accepted"] > 0, changes
        if cache is not None:
            assert cache["needed"] > cache["fetched"] > 2 * cache["slots"], "slots were given away"
            assert (cache["prefetched_needed"] > 0) == ("expert_prefetch" in changes)


def test_what_cannot_draft() -> None:
    drafts = SpeculationConfig(draft_experts=(1,))
    sliding = hf.convert(tiny_model("mixtral", sliding_window=64))
    with pytest.raises(NotImplementedError, match="speculate must be 'off' for models with StaticSlidingWindowLayer"):
        HFEngine(sliding, speculation=drafts)
    model = hf.convert(tiny_model("mixtral"))
    model.model.layers[1].mlp.gate = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate \(Identity\) must have a weight \(E, D\)"):
        HFEngine(model, speculation=drafts)


# Prompts, slots of the four experts of an EP rank, and settings. 14 x 5 tokens a pass are more than warp decode takes,
# 4 x 5 more than it takes from caches.
OVER_RANKS: list[tuple[list[str], int | None, dict[str, bool]]] = [
    (7 * PROMPTS[:2], None, {}),
    (2 * PROMPTS[:2], 3, {}),
    (PROMPTS[:2], 3, {"expert_prefetch": True}),
]


def clock_of(rank: int) -> Callable[[], float]:
    """Return the clock of a rank: by that of rank 0 the longest drafts are best, by those of others plain steps."""
    ticks = itertools.count()
    if rank == 0:
        return lambda: float(next(ticks))
    return lambda: float(100 * min(tick := next(ticks), 6) + tick)  # the first three rounds, which draft, are slow


def disturbed(engine: GPTEngine, rank: int, broadcasts: list[Tensor]) -> GPTEngine:
    """Every rank has its clock and, but rank 0, logits of its own; broadcasts are noted."""
    take, noise, broadcast = engine._take, torch.Generator().manual_seed(rank), dist.broadcast

    def noisy(ids: Tensor, *, drafts: bool = False) -> Tensor:
        logits = take(ids, drafts=drafts)
        return logits + 3 * torch.randn(logits.shape, generator=noise) if rank else logits

    def noted(values: Tensor, source: int) -> None:
        broadcasts.append(values)
        broadcast(values, source)

    engine._take = noisy
    dist.broadcast = noted
    Speculation.__init__.__defaults__ = (clock_of(rank),)
    return engine


@pytest.mark.parametrize(("ep", "tp"), [slow(2, 1), slow(1, 2)])
@in_ranks("ep tp")
def test_ranks_write_what_rank_0_decides(rank: int, world_size: int, ep: int, tp: int) -> None:
    """Other ranks compute and measure other values."""
    moe, drafts = replace(EXPERTS, top_k=2), SpeculationConfig(tau=0.0)
    group = make_group(moe, ep=ep, tp=tp, max_tokens=64, timeout_s=60.0)
    for prompts, slots, settings in OVER_RANKS:
        config = replace(MODEL, context=64, moe=moe if slots else replace(moe, shared_ffn_size=32))
        made_by = partial(engine_of, config, group, slots=slots, **settings)
        write = partial(run, prompts, context=64, max_new_tokens=24, seed=5)
        plain = write(engine=partial(made_by, drafts=None), speculate="off")
        for temperature in (0.0, 1.0):
            broadcasts: list[Tensor] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "broadcast", dist.broadcast)  # restored behind
                engine = disturbed(made_by(drafts=drafts), rank, broadcasts)
                made = write(engine=lambda engine=engine: engine, temperature=temperature)
            assert len(broadcasts) == 1 + made.steps, "one of the first token, and one of every pass"
            assert max(each.numel() for each in broadcasts) == 5 * len(prompts)
            assert (made.texts == plain.texts) == (temperature == 0), "the logits of rank 0 are those of plain steps"
            assert made.speculation["drafted"] > made.speculation["accepted"] > 0
            assert made.speculation["rounds"] - made.speculation["plain_rounds"] > 3, "by the clock of rank 0"
            found = [(made.texts, made.speculation)] * world_size
            dist.all_gather_object(found, found[rank])
            assert all(each == found[0] for each in found)
    group.close()
