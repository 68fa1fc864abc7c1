"""PEFT's adapters of expert parameters, made before a model is converted."""

from typing import Any

import pytest
import torch
from hf_cases import logits_with_cache, make_group, prompt, tiny_model
from ranks import in_ranks
from torch import Tensor

from comet.integrations import hf
from comet.integrations.hf import by_name
from comet.integrations.hf.adapters import trained_adapters

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
peft = pytest.importorskip("peft", reason="needs pip install peft")

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_adapters(model: Any, parameters: list[str], **others: Any) -> Any:
    torch.manual_seed(3)
    settings: dict[str, Any] = dict(r=2, lora_alpha=16, init_lora_weights=False, target_modules=[]) | others
    return peft.get_peft_model(model, peft.LoraConfig(target_parameters=parameters, **settings)).eval()


def adapted(family: str, parameters: list[str], **others: Any) -> Any:
    return with_adapters(tiny_model(family), parameters, **others)


def answers(model: Any) -> Tensor:
    ids = prompt(1, 73)
    return torch.cat([logits_with_cache(model, ids[:, : prefill + 3], prefill).flatten() for prefill in (2, 70)])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("parameters", [FUSED[:1], FUSED])
def test_a_model_whose_experts_have_adapters_is_converted_with_them(family: str, parameters: list[str]) -> None:
    stock, model = adapted(family, parameters), hf.convert(adapted(family, parameters))
    hf.check(model)
    torch.testing.assert_close(answers(model), answers(stock))
    with stock.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(answers(model), answers(stock))
    for each in (stock, model):
        each.merge_adapter()
    torch.testing.assert_close(answers(model), answers(stock))
    stock, model = stock.merge_and_unload(), model.merge_and_unload()
    for _ in range(2):  # steps include the shared expert now, which moves the experts
        torch.testing.assert_close(answers(model), answers(stock))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_experts_that_peft_copies_are_refused_before_and_right_after_a_conversion(family: str) -> None:
    """A copy of experts knows no shared expert."""
    settings: dict[str, Any] = dict(target_modules=["o_proj"], modules_to_save=["experts"])
    stock = adapted(family, [], **settings)
    with pytest.raises(ValueError, match=r"mlp.experts \(ModulesToSaveWrapper\), with act_fn=.*, must compute"):
        hf.convert(stock)
    model = hf.convert(tiny_model(family))
    answers(model)
    model = with_adapters(model, [], **settings)
    for each in (stock, model):
        for name, parameter in each.named_parameters():
            if "modules_to_save" in name:
                parameter.data.mul_(1.5)
    torch.testing.assert_close(answers(model), answers(stock))
    for each in (stock, model):
        each.base_model.disable_adapter_layers()
    torch.testing.assert_close(answers(model), answers(stock))


def test_learning_adapters_of_experts_gets_the_gradients_of_the_stock_model() -> None:
    stock, model = adapted("qwen2_moe", FUSED), hf.convert(adapted("qwen2_moe", FUSED))
    grads = []
    for each in (stock, model):
        each(prompt(2, 9)).logits.square().mean().backward()
        grads.append({name: p.grad for name, p in each.named_parameters() if "lora" in name and p.requires_grad})
    assert len(grads[0]) == len(grads[1]) > 0
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    ("rank", "parameters", "is_thin"), [(8, FUSED, True), (16, FUSED[1:], True), (3, FUSED, False)]
)
def test_by_name_rows_are_multiplied_with_the_factors_of_adapters(
    family: str, rank: int, parameters: list[str], is_thin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped GEMMs on a GPU take no rank of 3, whose adapters are added to the weights."""
    hf.register()
    model, found, grads = adapted(family, parameters, r=rank), [], []
    monkeypatch.setattr(by_name, "trained_adapters", lambda each: found.append(trained_adapters(each)) or found[-1])
    for experts in ("eager", "comet"):
        model.base_model.model.set_experts_implementation(experts)
        model.zero_grad()
        model(prompt(2, 9)).logits.square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    assert {each is not None for each in found} == {is_thin}
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@in_ranks(2)
def test_over_ranks_adapters_of_experts_are_refused_before_anything_is_changed(rank: int, world_size: int) -> None:
    for family, ep, tp in (("qwen2_moe", 2, 1), ("mixtral", 1, 2)):
        model = adapted(family, FUSED[1:])
        group = make_group(tiny_model(family), ep, tp)
        before = answers(model)
        with pytest.raises(ValueError, match=r"adapters of \S+mlp.experts.base_layer and 1 more must be merged"):
            hf.convert(model, group)
        with pytest.raises(ValueError, match="must have experts that call Comet"):
            hf.check(model)
        assert torch.equal(answers(model), before)
        model = hf.convert(model.merge_and_unload(), group)
        torch.testing.assert_close(answers(model), before)
        group.close()


def test_a_model_of_which_one_layer_is_not_converted_is_refused() -> None:
    model = hf.convert(tiny_model("qwen2_moe"))
    hf.check(model)
    model.model.layers[1].mlp.experts = tiny_model("qwen2_moe").model.layers[1].mlp.experts
    with pytest.raises(ValueError, match=r"^model.layers.1.mlp.experts must be experts of Comet, as the others"):
        hf.check(model)
