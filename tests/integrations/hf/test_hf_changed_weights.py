"""Weights that change behind torch's version counter, and modules that are replaced, after a model was used."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import graphs_on_cpu
from hf_cases import logits_with_cache, prompt, tiny_model
from torch import Tensor, nn

from comet.config import SpeculationConfig
from comet.generation.hf import HFEngine
from comet.integrations import hf

transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
peft = pytest.importorskip("peft", reason="needs pip install peft")

SHARED = {"qwen2_moe": "shared_expert", "deepseek_v3": "shared_experts"}
MATRICES = ["gate_proj", "up_proj", "down_proj"]
PREFILLS = (2, 70)  # a prompt that is a decode step itself, and one that is none


def answers(model: Any) -> Tensor:
    ids = prompt(1, 73)
    return torch.cat([logits_with_cache(model, ids[:, : prefill + 3], prefill).flatten() for prefill in PREFILLS])


def lora(names: list[str], **others: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=names, **others)


def merged(model: Any, kind: str, names: list[str]) -> Any:
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, lora(names))
    if kind == "merge_adapter":
        adapted.merge_adapter()
    return adapted.merge_and_unload() if kind == "merge_and_unload" else adapted


def shared_of(model: Any, family: str) -> Any:
    return model.model.layers[1].mlp.get_submodule(SHARED[family])


def merge(model: Any, family: str) -> Any:
    return merged(model, "merge_and_unload", [f"{SHARED[family]}.{name}" for name in MATRICES])


def scale_by_data(model: Any, family: str) -> Any:
    for name in MATRICES:
        getattr(shared_of(model, family), name).weight.data.mul_(1.5)
    return model


def rebind_data(model: Any, family: str) -> Any:
    weight = shared_of(model, family).down_proj.weight
    weight.data = weight.data * 1.5
    return model


def copy_in_inference_mode(model: Any, family: str) -> Any:
    with torch.inference_mode():
        for name in MATRICES:
            weight = getattr(shared_of(model, family), name).weight
            weight.copy_(weight.flip(0))
    return model


def load_in_inference_mode(model: Any, family: str) -> Any:
    with torch.inference_mode():
        state = {name: tensor * 1.25 for name, tensor in model.state_dict().items() if SHARED[family] in name}
        model.load_state_dict(state, strict=False)
    return model


def another_expert(model: Any, family: str) -> Any:
    block, name = model.model.layers[1].mlp, SHARED[family]
    other = copy.deepcopy(tiny_model(family).model.layers[1].mlp.get_submodule(name))
    other.down_proj.weight.data.mul_(1.5)
    setattr(block, name, other)
    return model


def another_matrix(model: Any, family: str) -> Any:
    shared = shared_of(model, family)
    other = nn.Linear(*reversed(shared.up_proj.weight.shape), bias=False)
    other.weight.data.copy_(1.5 * shared.up_proj.weight)
    shared.up_proj = other
    return model


def keep_copy(model: Any, family: str) -> Any:
    """Training of a whole module with the adapters: PEFT puts a wrapper with a copy in its place."""
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, lora(["o_proj"], modules_to_save=[SHARED[family]]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data.mul_(1.5)
    return adapted


CHANGES = [
    merge,
    scale_by_data,
    rebind_data,
    copy_in_inference_mode,
    load_in_inference_mode,
    another_expert,
    another_matrix,
    keep_copy,
]


def converted(family: str, by: str, folder: Path) -> Any:
    if by == "convert":
        return hf.convert(tiny_model(family))
    tiny_model(family).save_pretrained(folder)
    return hf.load_pretrained(folder)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("family", "by"), [("qwen2_moe", "load"), ("qwen2_moe", "convert"), ("deepseek_v3", "convert")]
)
def test_a_shared_expert_that_changed_counts_from_the_next_prompt_on(
    family: str, by: str, change: Callable[[Any, str], Any], tmp_path: Path
) -> None:
    stock, model = tiny_model(family), converted(family, by, tmp_path)
    before = answers(stock)
    torch.testing.assert_close(answers(model), before)
    stock, model = change(stock, family), change(model, family)
    wanted = answers(stock)
    assert (wanted - before).abs().max() > 0.05, "the change matters"
    torch.testing.assert_close(answers(model), wanted)


def lora_on_gate(model: Any) -> Any:
    return merged(model, "", ["shared_expert_gate"])


def merged_lora_on_gate(model: Any) -> Any:
    return merged(model, "merge_and_unload", ["shared_expert_gate"])


def copied_gate(model: Any) -> Any:
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, lora(["o_proj"], modules_to_save=["shared_expert_gate"]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data.mul_(-1)
    return adapted


def another_gate(model: Any) -> Any:
    for layer in model.model.layers:
        gate = nn.Linear(32, 1, bias=False)
        gate.weight.data.copy_(-layer.mlp.shared_expert_gate.weight)
        layer.mlp.shared_expert_gate = gate
    return model


@pytest.mark.parametrize("change", [lora_on_gate, merged_lora_on_gate, copied_gate, another_gate])
@pytest.mark.parametrize("by", ["load", "convert"])
def test_the_present_gate_weighs_the_shared_expert_in_steps(
    by: str, change: Callable[[Any], Any], tmp_path: Path
) -> None:
    stock, model = tiny_model("qwen2_moe"), converted("qwen2_moe", by, tmp_path)
    before = answers(model)
    stock, model = change(stock), change(model)
    wanted = answers(stock)
    assert (wanted - before).abs().max() > 0.05, "the change matters"
    torch.testing.assert_close(answers(model), wanted)


@pytest.mark.parametrize("family", SHARED)
def test_adapters_of_a_shared_expert_are_merged_and_taken_back(family: str) -> None:
    names = [f"{SHARED[family]}.down_proj"]
    stock, model = (merged(each, "", names) for each in (tiny_model(family), hf.convert(tiny_model(family))))
    for act in ("", "merge_adapter", "unmerge_adapter"):
        for each in (stock, model):
            getattr(each, act or "eval")()
        torch.testing.assert_close(answers(model), answers(stock), msg=act)
    with stock.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(answers(model), answers(tiny_model(family)))
    stock, model = stock.unload(), model.unload()
    torch.testing.assert_close(answers(model), answers(tiny_model(family)))


@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("cast", [False, True])
def test_weights_of_inference_mode_count_from_the_next_prompt_on(family: str, cast: bool) -> None:
    if cast:
        model = hf.convert(tiny_model(family))
    with torch.inference_mode():
        model = model.half().float() if cast else hf.convert(tiny_model(family))
        stock = tiny_model(family).half().float() if cast else tiny_model(family)
        torch.testing.assert_close(answers(model), answers(stock))
        for change in (copy_in_inference_mode, scale_by_data, load_in_inference_mode):
            stock, model = change(stock, family), change(model, family)
            torch.testing.assert_close(answers(model), answers(stock), msg=change.__name__)
    torch.testing.assert_close(answers(model), answers(stock))


@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("length", [1, 5, 70])
@pytest.mark.parametrize("captured", [False, True])
def test_an_engine_sees_what_was_merged_between_two_prompts(
    family: str, length: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        graphs_on_cpu(monkeypatch)
    model = hf.convert(tiny_model(family))
    engine, ids = HFEngine(model), prompt(2, length)

    def logits(engine: HFEngine) -> Tensor:
        found = [engine.prefill(ids, torch.tensor([length, length]), length + 3)]
        return torch.stack([*found, *[engine.decode(torch.tensor([step, 9])) for step in range(3)]])

    before = logits(engine)
    scale_by_data(model, family)
    after = logits(engine)
    assert (after - before).abs().max() > 0.05, "the change matters"
    torch.testing.assert_close(after, logits(HFEngine(hf.convert(scale_by_data(tiny_model(family), family)))))


@torch.no_grad()
@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("made", ["static", "dynamic"])
def test_one_token_in_a_cache_that_was_emptied_or_shortened_is_no_step(family: str, made: str) -> None:
    """This holds in inference mode, too, where torch does not count writes to the cache."""
    for mode in (False, True):
        logits = []
        for model in (tiny_model(family), hf.convert(tiny_model(family))):
            cache = transformers.StaticCache(model.config, 16) if made == "static" else transformers.DynamicCache()
            with torch.inference_mode(mode):
                for _ in range(3):
                    logits += [model(torch.full((2, 1), token), past_key_values=cache).logits for token in range(4)]
                    scale_by_data(model, family)
                    cache.reset() if made == "static" else cache.crop(-3)
        found, wanted = torch.stack(logits[12:]), torch.stack(logits[:12])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", SHARED)
def test_weights_that_change_in_the_middle_of_a_sequence_count_after_weights_changed(family: str) -> None:
    ids, found = prompt(1, 7), []
    for model in (tiny_model(family), hf.convert(tiny_model(family))):
        cache, logits = transformers.DynamicCache(), []
        for first, last in ((0, 3), (3, 4), (4, 5), (5, 6), (6, 7)):
            logits.append(model(ids[:, first:last], past_key_values=cache).logits[:, -1])
            if last == 5:
                scale_by_data(model, family)
                hf.weights_changed(model)
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_steps_behind_a_prompt_copy_nothing() -> None:
    model = hf.convert(tiny_model("qwen2_moe"))
    ids = prompt(1, 9)
    logits_with_cache(model, ids[:, :3], 2)
    slots = model.model.layers[1].mlp.experts.shared
    step = model(ids[:, :5], use_cache=True)
    copies = slots._joined.w1._version
    for position in range(5, 9):
        step = model(ids[:, position : position + 1], past_key_values=step.past_key_values, use_cache=True)
    assert slots._joined.w1._version == copies


def test_steps_of_an_engine_copy_nothing() -> None:
    """Passes of several tokens, which verify drafts, and prompts of one token copy nothing either."""
    drafts = SpeculationConfig(draft_experts=(1,), tau=0.0)
    model = hf.convert(tiny_model("qwen2_moe"))
    engine, slots = HFEngine(model, speculation=drafts), model.model.layers[1].mlp.experts.shared
    for length in (1, 4, 1):
        engine.prefill(prompt(2, length), torch.tensor([length, length]), 20)
        engine.decode(torch.tensor([3, 9]))
        copies = slots._joined.w1._version
        engine.decode(torch.tensor([3, 9]))
        engine.verify(torch.tensor([[3, 9, 4], [1, 2, 3]]))
        assert slots._joined.w1._version == copies
