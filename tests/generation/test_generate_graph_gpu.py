"""Decode steps, drafts and verification of whole models from CUDA graphs: the tokens of eager steps, no waiting."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import drafting_rounds
from gpus import ON_GPUS, no_wait
from ranks import in_ranks
from torch import Tensor
from training_cases import MODEL, MOE, Rank, awake_model, make_generation, make_group, make_job, slots_of

from comet.config import MoEConfig, SpeculationConfig
from comet.generation.engine import Engine, GPTEngine
from comet.generation.generate import Generated, generate, warm_up
from comet.generation.job import generate_job
from comet.generation.text import ByteCodec
from comet.graphed.step import Passes
from comet.jobs.generate import GenerateConfig
from comet.models.config import ModelConfig
from comet.training.trainer import train

GPU = torch.device("cuda", 0)
MODEL_GPU = replace(
    MODEL, context=1024, hidden_size=128, dense_layers=1, num_heads=4, num_kv_heads=2,
    moe=replace(MOE, hidden_size=128, ffn_size=128, num_experts=8, shared_ffn_size=128),
)  # fmt: skip
BATCHES = {1: (5,), 2: (4, 2), 5: (6, 1, 3, 6, 2)}
STEPS = 12


def prompts_of(num_sequences: int, seed: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random ids ``(B, S)`` and the lengths, which leave padding."""
    lengths = torch.tensor(BATCHES[num_sequences])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (num_sequences, int(lengths.max())), generator=generator)
    return ids.to(device), lengths.to(device)


def continued(engine: Engine, ids: Tensor, lengths: Tensor, room: int = 64) -> tuple[Tensor, Tensor]:
    """Greedy tokens ``(B, STEPS)`` and the logits ``(STEPS, B, V)`` they were chosen from."""
    logits = [engine.prefill(ids, lengths, room)]
    for taken in range(STEPS - 1):
        chosen = logits[-1].argmax(-1)
        if taken < 2 or engine.graph_fallback_reason:  # the warm-up and the capture may wait
            logits.append(engine.decode(chosen))
        else:
            with no_wait():
                logits.append(engine.decode(chosen))
    return torch.stack([each.argmax(-1) for each in logits], dim=1), torch.stack(logits)


def assert_same(eager: Engine, captured: Engine, vocabulary: int, num_sequences: int, room: int = 64) -> None:
    """Two prompts, one after the other in the same memory."""
    for seed in (1, 2):
        ids, lengths = prompts_of(num_sequences, seed, vocabulary, eager.device)
        wanted, wanted_logits = continued(eager, ids, lengths, room)
        tokens, logits = continued(captured, ids, lengths, room)
        assert torch.equal(tokens, wanted), f"seed {seed}: {tokens.tolist()}, not {wanted.tolist()}"
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-5, atol=1e-5)
    assert eager.graph_fallback_reason == "cuda_graph='off'"
    assert captured.graph_fallback_reason == ""
    for engine in (eager, captured):
        engine.check()


def gpt_engines(
    dtype: torch.dtype, device: torch.device, ep: int = 1, config: ModelConfig = MODEL_GPU
) -> tuple[list[GPTEngine], Any]:
    group = make_group(config.moe, ep=ep, max_tokens=512, dtype=dtype, device=device)
    return [GPTEngine(*awake_model(config, group), cuda_graph=mode) for mode in ("off", "on")], group


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_sequences", BATCHES)
def test_comet_gpt(num_sequences: int, dtype: torch.dtype) -> None:
    (eager, captured), group = gpt_engines(dtype, GPU)
    assert all(layer.experts.shared is not None for layer in captured.model.moe_layers()), "part of the steps"
    assert_same(eager, captured, 256, num_sequences)
    lengths = captured._cache.lengths.tolist()
    assert lengths == [length + STEPS - 1 for length in BATCHES[num_sequences]]
    torch.testing.assert_close(captured._cache.keys, eager._cache.keys, rtol=1e-5, atol=1e-5)
    group.close()


@pytest.mark.gpu
def test_comet_gpt_with_a_long_cache_and_a_long_prompt() -> None:
    """The prompt takes the fused path, attention several chunks."""
    (eager, captured), group = gpt_engines(torch.bfloat16, GPU)
    ids = torch.randint(256, (1, 700), generator=torch.Generator().manual_seed(5)).to(GPU)
    lengths = torch.tensor([700], device=GPU)
    found = [continued(engine, ids, lengths, 1000) for engine in (eager, captured)]
    assert torch.equal(found[0][0], found[1][0])
    whole = torch.cat([ids, found[0][0][:, :-1]], dim=1)
    with torch.no_grad():
        logits = eager.model.prefill(whole, torch.tensor([whole.shape[1]], device=GPU), eager._cache).logits[:, 0]
    assert torch.cosine_similarity(found[1][1][-1].double(), logits.double()).min() > 0.99
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_sequences", BATCHES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_transformers(family: str, num_sequences: int, dtype: torch.dtype) -> None:
    engines = [hf_engine(family, dtype, mode) for mode in ("off", "on")]
    assert_same(*engines, 64, num_sequences)
    for layer, other in zip(*(engine._decoder.cache.layers for engine in engines), strict=True):
        assert layer.cumulative_length.item() == other.cumulative_length.item() == max(BATCHES[num_sequences]) + 11
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-5, atol=1e-5)


def hf_engine(family: str, dtype: torch.dtype, cuda_graph: str, speculation: Any = None, **changes: Any) -> Any:
    pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
    from hf_cases import tiny_model

    from comet.generation.hf import HFEngine
    from comet.integrations import hf

    model = hf.convert(tiny_model(family, dtype, **changes).to(GPU))
    return HFEngine(model, cuda_graph=cuda_graph, speculation=speculation)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_drafts_and_verification_of_a_transformers_model(family: str) -> None:
    """Three graphs over one static cache, whose sequences take different numbers of tokens back."""
    drafts = SpeculationConfig(draft_experts=(1,), tau=0.0)
    engines = [hf_engine(family, torch.float32, mode, speculation=drafts) for mode in ("off", "on")]
    for eager, captured in zip(*(drafting_rounds(engine, 6) for engine in engines), strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-4, atol=1e-4)
    assert not engines[1].graph_fallback_reason


@pytest.mark.gpu
def test_a_checkpoint_of_the_training_job(tmp_path: Path) -> None:
    """Run the task itself; compare texts, draws and the report."""
    train(make_job(tmp_path, model=MODEL_GPU, steps=30, batch_size=8, checkpoint_every=30), Rank(device=GPU))
    made = {}
    for mode in ("off", "on", "auto"):
        settings = GenerateConfig(source=str(tmp_path / "out"), prompts=("3 times 4", "17"), max_new_tokens=60)
        job = make_generation(model=MODEL_GPU, generate=replace(settings, cuda_graph=mode))
        made[mode] = generate_job(job, Rank(device=GPU))
    assert made["off"]["texts"] == made["on"]["texts"] == made["auto"]["texts"]
    assert [made[mode]["cuda_graph"] for mode in ("off", "on", "auto")] == [False, True, True]
    assert [made[mode]["graph_fallback_reason"] for mode in ("off", "on", "auto")] == ["cuda_graph='off'", None, None]


@pytest.mark.gpu
def test_replays_allocate_nothing_that_stays() -> None:
    (_, engine), group = gpt_engines(torch.bfloat16, GPU)
    engine.prefill(*prompts_of(2, 1, 256, GPU), 512)
    chosen = torch.tensor([1, 2], device=GPU)
    for _ in range(5):
        logits = engine.decode(chosen)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        logits = engine.decode(logits.argmax(-1))
    assert torch.cuda.memory_allocated() == before
    group.close()


@pytest.mark.multi_gpu(n=2)
@in_ranks(2, backend=ON_GPUS, timeout=400)
def test_two_ranks(rank: int, world_size: int) -> None:
    """Steps of a model whose experts lie on two GPUs; the sums over ranks are inside the graph."""
    (eager, captured), group = gpt_engines(
        torch.bfloat16, torch.device("cuda", torch.cuda.current_device()), ep=world_size
    )
    assert_same(eager, captured, 256, 2)
    group.close()


@pytest.mark.gpu
def test_what_waits_for_the_device_runs_eagerly_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """This test is the last of the file, as a failed capture may leave damage behind."""
    given = torch.tensor([[10], [20]], device=GPU)
    count = torch.zeros(1, dtype=torch.int64, device=GPU)

    def waits(ids: Tensor, drafts: bool) -> Tensor:
        count.add_(1)
        return ids[:, :, None].float() + count.item()

    here = torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING):
        step = Passes(waits)
        for number in range(1, 5):
            assert step(given).flatten().tolist() == [10.0 + number, 20.0 + number]
    assert step.graph_fallback_reason.startswith("the step cannot be captured: ")
    assert len(caplog.messages) == 1
    assert torch.cuda.current_stream() == here
    insisting = Passes(waits, cuda_graph="on")
    insisting(given)
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: the step cannot be captured"):
        insisting(given)
    assert torch.cuda.current_stream() == here
    assert torch.rand(1000, device=GPU).std() > 0.2, "the device still draws"
    (eager, captured), group = gpt_engines(torch.float32, GPU)
    assert_same(eager, captured, 256, 2)
    group.close()


EXPERTS = MoEConfig(hidden_size=128, ffn_size=128, num_experts=16, top_k=4)
CONFIG = replace(MODEL, context=512, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, moe=EXPERTS)
PROMPTS = [[7, 1, 9, 4], [3], [*range(40, 60)]]
NEW_TOKENS = 300


def engine_of(dtype: torch.dtype, drafts: SpeculationConfig | None, cuda_graph: str = "on") -> GPTEngine:
    """Six of sixteen experts in slots."""
    model, group = awake_model(CONFIG, in_slots=True, dtype=dtype, device=GPU)
    return GPTEngine(
        model, group, store=slots_of(6, 16, expert_prefetch=False), speculation=drafts, cuda_graph=cuda_graph
    )


def made_by(engine: GPTEngine, mode: str) -> Generated:
    config = GenerateConfig(
        prompts=("a", "b", "c"), max_new_tokens=NEW_TOKENS, temperature=0.0, speculate=mode, tau=0.0
    )
    warm_up(engine, PROMPTS, config, context=512)
    made = generate(engine, ByteCodec(), PROMPTS, config, context=512)
    engine.check()
    engine.runner.group.close()
    return made


@pytest.mark.gpu
def test_captured_passes_make_the_texts_of_eager_ones_and_of_plain_decoding() -> None:
    drafts = SpeculationConfig(draft_experts=(2,), tau=0.0)
    plain = made_by(engine_of(torch.float32, None), "off")
    made = [made_by(engine_of(torch.float32, drafts, mode), "conservative") for mode in ("on", "off")]
    assert made[0].texts == made[1].texts == plain.texts
    assert (made[0].graph_fallback_reason, made[1].graph_fallback_reason) == ("", "cuda_graph='off'")
    assert made[0].speculation["drafted"] > made[0].speculation["accepted"] > 0
