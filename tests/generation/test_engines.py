"""Steps, graphs of steps and drafts of every engine, for comet's GPT and for converted transformers models."""

import copy
import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from generate_cases import NOT_PERMITTED, graphs_on_cpu, greedy_tokens
from ranks import in_ranks

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from engine_cases import (
    DRAFTS,
    ENGINES,
    LENGTHS,
    MODELS,
    PROMPTS,
    SHARED,
    STEPS,
    engine_of,
    plain_model,
    tokens_of,
)
from hf_cases import VOCABULARY, tiny_model
from tiers import slow
from torch import Tensor
from torch.nn.modules import module as of_all
from training_cases import MODEL, MOE, awake_model, slots_of

from comet.config import SpeculationConfig
from comet.decode import DataParallelDecode
from comet.generation.engine import GPTEngine
from comet.generation.sampling import Sampler
from comet.generation.speculation import Draft, Speculation
from comet.graphed.step import Passes
from comet.integrations import hf
from comet.jobs.generate import GenerateConfig
from comet.models.cache import CHUNK, allocated_places, attend_to_cache
from comet.modular import GroupedContiguous, ModularMoE, SingleRank
from comet.utils.graphs import TOO_FEW, first_line


@pytest.mark.parametrize(("name", "ep", "tp", "node_size"), [
    ("shared expert in decode steps", 2, 1, None), slow("shared expert in decode steps", 1, 2, None),
    ("gpt-oss", 1, 2, None), slow("mixtral", 1, 2, None),
    ("shared expert in decode steps", 2, 1, 1), ("gpt-oss", 2, 1, 1), slow("mixtral", 2, 1, 1),
])  # fmt: skip
@in_ranks(2)
def test_two_ranks_take_the_steps_of_one(
    rank: int, world_size: int, name: str, ep: int, tp: int, node_size: int | None
) -> None:
    engine = engine_of(name, ep=ep, tp=tp, node_size=node_size)
    assert torch.equal(tokens_of(engine), tokens_of(engine_of(name)))
    assert all(runner.decode.max_tokens == 64 for runner in engine.runners)
    engine.check()


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "sdpa") for name in ENGINES), ("mixtral", "eager"), ("deepseek_v3", "eager")]
)
def test_a_captured_step_makes_the_tokens_of_an_eager_one(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = graphs_on_cpu(monkeypatch)
    # transformers up to 5.20 makes the mask of eager attention from a number of the host.
    insists = "on" if attention == "sdpa" else "auto"
    eager, captured = (engine_of(name, mode, attn_implementation=attention) for mode in ("off", insists))
    found: list[list[Tensor]] = []
    for prompts, lengths in ((PROMPTS, LENGTHS), ((PROMPTS.flip(0) + 20) % VOCABULARY, LENGTHS.flip(0))):
        found.append([engine.prefill(prompts, lengths, 16) for engine in (eager, captured)])
        for _ in range(STEPS):
            found.append([engine.decode(found[-1][0].argmax(-1)) for engine in (eager, captured)])
    for logits in found:  # no later step has overwritten them
        assert torch.equal(*logits)
    assert eager.graph_fallback_reason == "cuda_graph='off'"
    if captured.graph_fallback_reason:
        assert attention == "eager"
        assert NOT_PERMITTED in captured.graph_fallback_reason
    else:  # one eager step, then one capture for both prompts
        assert (captures.count, captures.replays) == (1, STEPS - 1 + STEPS)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_captured_step_follows_parameters_that_were_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New parameters hold from the next prompt on. deepseek_v3's first step moves experts, which is no replacement."""
    captures, engine, other = graphs_on_cpu(monkeypatch), engine_of(name, "on"), engine_of(name, "off")
    before = tokens_of(engine), tokens_of(engine)
    assert torch.equal(*before)
    assert captures.count == 1
    for parameter in other.model.parameters():
        parameter.data.mul_(1.5)
    engine.model.load_state_dict(other.model.state_dict(), assign=True)
    wanted = tokens_of(other)
    assert not torch.equal(wanted, before[0])
    assert torch.equal(tokens_of(engine), wanted)
    assert torch.equal(tokens_of(engine), wanted)
    assert captures.count == 2


def test_a_sequence_that_ended_takes_no_room_of_those_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two prompts drafts well and ends; the other goes on in plain steps to its own end."""
    engine, most = engine_of("qwen3_moe", drafts=DRAFTS), 40

    def of_first(config: object, draft: Draft, likely: Tensor, p: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        accepted = draft.proposed.sum(1) * torch.tensor([1, 0])
        return accepted, p[torch.arange(2), accepted]

    monkeypatch.setattr("comet.generation.speculation.verdict", of_first)
    config = GenerateConfig(max_new_tokens=most, temperature=0.0, speculate="conservative", draft_tokens=4, tau=0.0)
    loop = Speculation(engine, Sampler(config, 2, torch.device("cpu")), config, torch.rand(most, 2, 9).double())
    last, made = engine.prefill(PROMPTS[:, :2], torch.tensor([2, 2]), 2 + most).argmax(-1), [1, 1]
    while min(made) < most:
        loop._next_length = 4 * (made[0] < most)
        last, tokens = loop(last, [number < most for number in made], most - min(made))
        made = [number + len(each) for number, each in zip(made, tokens, strict=True)]
    assert loop.report.facts()["plain_rounds"] > most // 2
    assert engine._room().lengths.tolist() == [made[1] + 1] * 2


def test_a_sliding_window_is_not_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    captures, window = graphs_on_cpu(monkeypatch), dict(sliding_window=64)
    wanted = greedy_tokens(plain_model("mixtral", **window)[0], PROMPTS, LENGTHS, STEPS)
    with caplog.at_level(logging.INFO):
        engine = engine_of("mixtral", **window)
        assert torch.equal(tokens_of(engine), wanted)
    why = "transformers counts the positions of StaticSlidingWindowLayer on the host"
    assert (captures.count, engine.graph_fallback_reason) == (0, why)
    assert [why in message for message in caplog.messages] == [True]
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: transformers counts"):
        tokens_of(engine_of("mixtral", "on", **window))


@pytest.mark.parametrize(("sequences", "places", "message"), [(0, 4, "num_sequences=0"), (1, 0, "num_places=0")])
def test_sizes_of_static_decoders_must_be_positive(sequences: int, places: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be at least 1"):
        hf.StaticDecoder(tiny_model("mixtral"), sequences, places)


@pytest.mark.parametrize(("decode_tokens", "why"), [
    (1, "2 tokens are more than the 1 of warp decode"),
    (0, "steps wait for the host, because warp decode is off or collectives join nodes"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["softmax", "mixtral"])
def test_more_sequences_than_warp_decode_takes_are_not_captured(
    name: str, decode_tokens: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, engine = graphs_on_cpu(monkeypatch), engine_of(name, decode_tokens=decode_tokens)
    tokens_of(engine)
    assert (captures.count, engine.graph_fallback_reason) == (0, why)


def shared_weights(engine: Any) -> Iterable[Tensor]:
    if isinstance(engine, GPTEngine):
        return [weight for layer in engine.model.moe_layers() for weight in layer.shared.parameters()]
    joined = [module.shared for module in engine.model.modules() if getattr(module, "shared", None) is not None]
    return [weight for slots in joined for weight in slots.module.parameters()]


@pytest.mark.parametrize("name", SHARED)
@torch.no_grad()
def test_a_replayed_step_reads_the_shared_expert_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    engines = [engine_of(name, mode) for mode in ("off", "on")]
    for engine in engines:
        engine.prefill(PROMPTS, LENGTHS, 16)
    for step in range(STEPS):
        assert torch.equal(*(engine.decode(torch.tensor([step, 2])) for engine in engines)), f"step {step}"
        for engine in engines if step % 2 else []:
            for seed, weight in enumerate(shared_weights(engine)):
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(STEPS * step + seed))
    assert (captures.count, captures.replays) == (1, STEPS - 1)


def hook_shared(engine: Any, *, once: bool = False) -> None:
    """Let shared experts return zeros, for one step only or for all."""
    is_gpt = isinstance(engine, GPTEngine)
    for layer in engine.model.moe_layers() if is_gpt else engine.model.modules():
        if getattr(layer, "shared", None) is not None:
            module, handles = layer.shared if is_gpt else layer.shared.module, []

            def zero(_: Any, __: Any, output: Tensor, handles: list[Any] = handles) -> Tensor:
                for handle in handles if once else []:
                    handle.remove()
                return torch.zeros_like(output)

            handles.append(module.register_forward_hook(zero))


def zero_shared(engine: Any) -> None:
    for weight in shared_weights(engine):
        weight.zero_()


@pytest.mark.parametrize("name", SHARED)
@torch.no_grad()
def test_hooks_of_shared_experts_run_in_decode_steps(name: str) -> None:
    """A hook may remove itself, before the routed experts are computed or after."""
    found = []
    for alter in (zero_shared, hook_shared, partial(hook_shared, once=True)):
        engine = engine_of(name)
        engine.prefill(PROMPTS, LENGTHS, 16)
        alter(engine)
        found.append(engine.decode(torch.tensor([3, 5])))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


@pytest.mark.parametrize("name", SHARED)
@torch.no_grad()
def test_a_copied_model_reads_its_own_experts(name: str) -> None:
    model = engine_of(name).model
    before, copied = model(PROMPTS).logits, copy.deepcopy(model)
    for weight in copied.parameters():
        weight.mul_(0.5)
    found = copied(PROMPTS).logits
    assert torch.equal(model(PROMPTS).logits, before)
    for weight in model.parameters():
        weight.mul_(0.5)
    assert torch.equal(model(PROMPTS).logits, found)


@pytest.mark.parametrize("other", ["slots", "modular", "own tokens"])
@torch.no_grad()
def test_other_experts_behind_an_engine_leave_no_shared_expert_out(other: str) -> None:
    model, group = plain_model(SHARED[0])
    wanted, moe = model(PROMPTS).logits, model.config.moe
    GPTEngine(model, group)
    torch.testing.assert_close(model(PROMPTS).logits, wanted)
    if other == "slots":
        GPTEngine(model, group, store=slots_of(3))
    for layer in model.moe_layers():
        if other == "modular":
            layer.experts = ModularMoE(SingleRank(moe, group), GroupedContiguous(moe, group))
        elif other == "own tokens":
            layer.experts = DataParallelDecode(moe, group)
    torch.testing.assert_close(model(PROMPTS).logits, wanted)


@pytest.mark.parametrize("ep", [1, 2])
@in_ranks(2)
def test_a_model_whose_experts_an_engine_quantised_has_none_to_give(rank: int, world_size: int, ep: int) -> None:
    model, group = awake_model(in_slots=True, ep=ep)
    store = slots_of(2, MOE.num_experts // ep, expert_dtype="mxfp8")
    state = copy.deepcopy(model.state_dict())
    engine = GPTEngine(model, group, store=store)
    before = tokens_of(engine)
    for use in (
        model.state_dict, model.blocks[0].ffn.double, partial(copy.deepcopy, model), partial(GPTEngine, model, group),
        partial(GPTEngine, model, group, store=store),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"expert_dtype of an engine has taken w1 and w2 .*: build the model again"
        ):
            use()
    assert torch.equal(tokens_of(engine), before)
    moe = model.config.moe
    for layer in model.moe_layers():
        layer.experts = DataParallelDecode(moe, group)
    with torch.no_grad(), pytest.raises(ValueError, match=r"taken w1 and w2 .* or to compute with other experts"):
        model(PROMPTS)
    model.load_state_dict(state, assign=True)
    assert torch.equal(tokens_of(GPTEngine(model, group, store=store)), before)


@in_ranks(2)
def test_slots_over_ranks_hold_copies_of_weights_as_on_one(rank: int, world_size: int) -> None:
    model, group = awake_model(in_slots=True, ep=2)
    engine = GPTEngine(model, group, store=slots_of(2, MOE.num_experts // 2))
    tokens_of(engine)
    with torch.no_grad():
        model.blocks[0].ffn.w2.mul_(2)
    with pytest.raises(ValueError, match="must not be written to, for slots hold copies: make a new engine"):
        tokens_of(engine)


def test_an_engine_refuses_a_selection_bias_that_its_steps_do_not_read() -> None:
    model, group = awake_model(replace(MODEL, moe=replace(MOE, balance="bias", shared_ffn_size=32)))
    engine, ffn = GPTEngine(model, group), model.blocks[0].ffn
    ffn.router.selection_bias.fill_(0.5)
    tokens_of(engine)
    bias, shared = ffn.router.selection_bias, ffn.shared
    for module, name, other in ((ffn.router, "selection_bias", bias.clone()), (ffn, "shared", None)):
        setattr(module, name, other)
        with pytest.raises(ValueError, match=r"parameters and buffers of the model must not be replaced"):
            tokens_of(engine)
        ffn.router.selection_bias, ffn.shared = bias, shared
        tokens_of(engine)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "off") for name in ENGINES),
        *((name, "on") for name in (*SHARED[:2], "sigmoid, groups, bias", "mixtral")),
    ],
)
@torch.no_grad()
def test_one_pass_verifies_what_steps_compute_one_by_one(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts before it leave no trace, and sequences keep different numbers of tokens, again and again."""
    captures = graphs_on_cpu(monkeypatch) if mode == "on" else None
    if captures is not None:  # like a stream that captures, where masks are not looked at
        monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda tensor=None: True)
    engine, (plain, _) = engine_of(name, mode, drafts=DRAFTS), plain_model(name)
    engine.prefill(PROMPTS, LENGTHS, 30)
    rows = [PROMPTS[row, :length].tolist() for row, length in enumerate(LENGTHS.tolist())]
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(9))
    for kept in ((1, 4), (4, 1), (2, 2), (4, 1)):
        before = engine.lengths.clone()
        assert before.tolist() == [len(row) for row in rows]
        for token in tokens.T[:3]:
            engine.draft(token)
        engine.rewind(before)
        found = engine.verify(tokens[:, :4])
        engine.rewind(before + torch.tensor(kept))
        for row, count in enumerate(kept):
            whole = plain(torch.tensor([rows[row] + tokens[row, :4].tolist()])).logits[0, -4:]
            torch.testing.assert_close(found[row], whole, rtol=1e-4, atol=1e-4)
            rows[row] += tokens[row, :count].tolist()
        tokens = tokens.roll(3, dims=1)
    logits = engine.decode(tokens[:, 0])
    for row, ids in enumerate(rows):
        whole = plain(torch.tensor([[*ids, int(tokens[row, 0])]])).logits[0, -1]
        torch.testing.assert_close(logits[row], whole, rtol=1e-4, atol=1e-4)
    assert captures is None or captures.count == 2, "drafts and verification; it decoded once"


@pytest.mark.parametrize("name", ENGINES)
def test_a_draft_is_a_step_of_the_model_with_a_smaller_top_k(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer has keys and values that depend on no expert."""
    one_layer, found = dict(num_hidden_layers=1, mlp_only_layers=[], first_k_dense_replace=0), []
    for top_k in (3, 2):
        if name in MODELS:
            moe = replace(MODELS[name].moe, top_k=top_k)
            monkeypatch.setitem(MODELS, name, replace(MODELS[name], num_layers=1, dense_layers=0, moe=moe))
        changes = {} if name in MODELS else one_layer | dict(num_experts_per_tok=top_k)
        engine = engine_of(
            name, drafts=SpeculationConfig(draft_experts=(2,), tau=0.0) if top_k == 3 else None, **changes
        )
        engine.prefill(PROMPTS, LENGTHS, 16)
        found.append((engine.draft if top_k == 3 else engine.decode)(torch.tensor([3, 5])))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_what_a_sequence_left_behind_does_not_reach_the_next() -> None:
    engine = engine_of(SHARED[0])
    wanted, cache = tokens_of(engine), engine._cache
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.inf)
    assert torch.equal(tokens_of(engine), wanted)
    assert engine._cache is cache


@pytest.mark.parametrize("name", SHARED)
def test_other_room_or_hooks_are_another_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures, engine = graphs_on_cpu(monkeypatch), engine_of(name)
    assert engine.graph_fallback_reason == TOO_FEW
    for max_length, hooked in (16, 0), (17, 0), (17, 0), (16, 0), (16, 1), (16, 1), (16, 2):
        if hooked and captures.count == 3:
            list(engine.model.modules())[-1].register_forward_hook(lambda *_: None)
        if hooked == 2:
            monkeypatch.setitem(of_all._global_forward_hooks, -1, lambda *_: None)
        engine.prefill(PROMPTS, LENGTHS, max_length)
        for token in range(3):
            engine.decode(torch.tensor([token, token]))
    assert captures.count == 5


def test_a_captured_step_joins_streams_first_and_is_refused_once_the_group_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures, engine = graphs_on_cpu(monkeypatch), engine_of(SHARED[0], "on")
    engine.prefill(PROMPTS, LENGTHS, 16)
    engine.decode(torch.tensor([0, 0]))
    order, (ids,) = [], engine._passes._ids.values()
    monkeypatch.setattr(engine.runner.group.comm.stream_order, "join", lambda: order.append(ids[:, 0].tolist()))
    for token in range(1, 3):
        engine.decode(torch.tensor([token, token]))
    assert order[-1] == [1, 1], "the tokens of the call before are still there when a replay joins"
    engine.runner.group.close()
    with pytest.raises(RuntimeError, match=r"was used after close\(\)"):
        engine.decode(torch.tensor([3, 3]))
    assert captures.replays == 2


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = graphs_on_cpu(monkeypatch)
    taken = []

    def run(ids: torch.Tensor, drafts: bool) -> torch.Tensor:
        taken.append(int(ids.sum().item()))  # waits for the device
        return ids[:, :, None].float()

    with caplog.at_level(logging.INFO):
        step = Passes(run)
        for token in range(4):
            assert step(torch.tensor([[token]])).item() == token
    assert (captures.count, captures.replays, taken) == (1, 0, [0, 1, 2, 3])
    assert NOT_PERMITTED in step.graph_fallback_reason
    assert [NOT_PERMITTED in message for message in caplog.messages] == [True]
    insisting = Passes(run, cuda_graph="on")
    insisting(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: the step cannot be captured"):
        insisting(torch.tensor([[2]]))


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
