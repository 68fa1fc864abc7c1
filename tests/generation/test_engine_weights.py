"""Weights that are written to, replaced, or made in another mode, after an engine was made."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from engine_cases import PROMPTS, SHARED, engine_of, tokens_of
from torch import nn
from training_cases import MODEL, MOE, awake_model, slots_of

from comet.generation.engine import Engine, GPTEngine
from comet.layer.paths import make_path


@pytest.mark.parametrize("slots", [None, 2])
def test_an_engine_refuses_weights_that_its_steps_do_not_read(slots: int | None) -> None:
    """Graphs, slots and the pieces of a shared expert do not follow other tensors, nor do slots follow new numbers."""
    moe = replace(MOE, shared_ffn_size=32, top_k=1)
    model, group = awake_model(replace(MODEL, moe=moe), in_slots=slots is not None)
    engine = GPTEngine(model, group, store=slots_of(slots))
    before = tokens_of(engine)
    others = {name: weight * 2 for name, weight in model.state_dict().items()}
    if slots is None:
        model.load_state_dict(others)
    else:
        model.blocks[0].ffn.w1.mul_(2)
        with pytest.raises(ValueError, match="must not be written to, for slots hold copies: make a new engine"):
            tokens_of(engine)
        engine = GPTEngine(model, group, store=slots_of(slots))
    assert not torch.equal(tokens_of(engine), before)
    model.load_state_dict(others, assign=True)
    with pytest.raises(ValueError, match=r"must not be replaced \(load_state_dict\(assign=True\)\): write .* in place"):
        tokens_of(engine)
    fresh = awake_model(replace(MODEL, moe=moe), group)[0]
    fresh.load_state_dict(others)
    assert torch.equal(tokens_of(GPTEngine(model, group, store=slots_of(slots))), tokens_of(GPTEngine(fresh, group)))


@pytest.mark.parametrize("slots", [None, 2])
def test_an_engine_sees_weights_that_torch_saw_nobody_write(slots: int | None) -> None:
    """Writes go through ``.data`` or happen in inference mode, between two prompts of one token or more."""
    moe = replace(MOE, shared_ffn_size=64, top_k=1)
    model, group = awake_model(replace(MODEL, moe=moe), in_slots=slots is not None)
    engine, ffn = GPTEngine(model, group, store=slots_of(slots)), model.blocks[0].ffn
    assert ffn.shared is not None
    before = tokens_of(engine)
    ffn.shared.w1.data.mul_(-3)
    assert not torch.equal(tokens_of(engine), before)
    assert torch.equal(tokens_of(engine), tokens_of(GPTEngine(model, group, store=slots_of(slots))))
    with torch.inference_mode():
        ffn.shared.w2.copy_(ffn.shared.w2.flip(0))
        assert torch.equal(tokens_of(engine), tokens_of(GPTEngine(model, group, store=slots_of(slots))))
    ffn.w2.data.mul_(2)
    if slots is None:
        assert torch.equal(tokens_of(engine), tokens_of(GPTEngine(model, group)))
    else:
        with pytest.raises(ValueError, match="must not be written to, for slots hold copies: make a new engine"):
            tokens_of(engine)


@torch.no_grad()
def test_replaced_experts_are_the_ones_that_run() -> None:
    model, wanted = engine_of(SHARED[0]).model, engine_of(SHARED[0]).model
    before = model(PROMPTS).logits
    for each in (model, wanted):
        other = copy.deepcopy(each.moe_layers()[0].shared)
        other.w2.mul_(3)
        each.moe_layers()[0].shared = other
    for each in wanted.moe_layers():
        each.experts = make_path("twin", each.config, each.group, None)
    found = model(PROMPTS).logits
    assert (found - before).abs().max() > 1e-3, "the change matters"
    torch.testing.assert_close(found, wanted(PROMPTS).logits)
    model = engine_of(SHARED[0]).model
    model(PROMPTS)
    layer = model.moe_layers()[-1]
    tokens = torch.randn(2, layer.config.hidden_size)
    ids, weights = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.ones(2, 2)
    routed = wanted.moe_layers()[-1].routed_experts(tokens, ids, weights)
    torch.testing.assert_close(layer.routed_experts(tokens, ids, weights), routed, msg="without the shared expert")
    wanted = engine_of(SHARED[0]).model
    for each in (model, wanted):
        layer = each.moe_layers()[-1]
        layer.w1 = nn.Parameter(layer.w1 * 2)
    layer.experts = make_path("twin", layer.config, layer.group, None)
    torch.testing.assert_close(model(PROMPTS).logits, wanted(PROMPTS).logits)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", [*SHARED, "slots"])
def test_an_engine_runs_in_and_out_of_inference_mode(name: str, made: bool) -> None:
    """The engine may have been made in the other mode, and reads new prompts into its memory."""

    def make() -> Engine:
        if name != "slots":
            return engine_of(name)
        model, group = awake_model(replace(MODEL, moe=MOE), in_slots=True)
        return GPTEngine(model, group, store=slots_of(2))

    wanted = tokens_of(make())
    with torch.inference_mode(made):
        engine = make()
    for used in (True, False, True):
        with torch.inference_mode(used):
            assert torch.equal(tokens_of(engine), wanted), f"made {made}, used {used}"
