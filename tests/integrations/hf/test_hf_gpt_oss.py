"""transformers' own gpt-oss, tiny and random: by name, converted, over ranks, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import make_group, prompt, tiny_model
from ranks import run_ranks

from comet.integrations import hf
from comet.integrations.hf.by_name import check_named
from comet.kernels.runtime.activation import Activation


def tiny(**changes: Any) -> Any:
    """Experts whose activation clamps, with biases of about the size of the products, that three ranks can share."""
    return tiny_model("gpt_oss", **{"intermediate_size": 48, **changes})


@torch.no_grad()
def logits(model: Any, num_tokens: int) -> Tensor:
    found: Tensor = model(prompt(1, num_tokens)).logits
    return found


LENGTHS = (1, 5, 80)  # decode steps, and more tokens than they take


def check_logits(model: Any, expected: list[Tensor]) -> None:
    for length, wanted in zip(LENGTHS, expected, strict=True):
        torch.testing.assert_close(logits(model, length), wanted, rtol=1e-4, atol=1e-4, msg=f"{length} tokens".__add__)


def test_by_name_and_converted_answer_as_stock() -> None:
    model = tiny()
    expected = [logits(model, length) for length in LENGTHS]
    hf.register()
    model.set_experts_implementation("comet")
    hf.check(model)
    check_logits(model, expected)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.mul_(0.5)  # what is kept of them has to follow
    changed = copy.deepcopy(model)
    changed.set_experts_implementation("eager")
    expected = [logits(changed, length) for length in LENGTHS]
    check_logits(model, expected)
    converted = hf.convert(copy.deepcopy(changed))
    check_logits(converted, expected)
    with pytest.raises(ValueError, match="experts are laid out as Comet multiplies them; save the model before"):
        converted.save_pretrained("anywhere")
    group = make_group(changed)
    check_logits(hf.convert(changed, group), expected)
    group.close()


def test_gradients_by_name_are_those_of_stock() -> None:
    model = tiny()
    found = []
    hf.register()
    for implementation in ("eager", "comet"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        model(prompt(2, 40), labels=prompt(2, 40)).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert any("down_proj_bias" in name for name in found[0])
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-3, atol=1e-5, msg=name.__add__)


def converted_on_a_rank(rank: int, world_size: int, ep: int, tp: int) -> list[Tensor]:
    model = tiny()
    group = make_group(model, ep=ep, tp=tp)
    hf.convert(model, group)
    found = [logits(model, length) for length in LENGTHS]
    hf.check(model)
    group.close()
    return found


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 3)])
def test_ranks_answer_as_stock(ep: int, tp: int) -> None:
    model = tiny()
    for found in run_ranks(converted_on_a_rank, ep * tp, ep, tp):
        for length, got in zip(LENGTHS, found, strict=True):
            torch.testing.assert_close(got, logits(model, length), rtol=1e-4, atol=1e-4, msg=f"{length}: ".__add__)


def test_the_shape_of_its_layers() -> None:
    config = hf.moe_config(tiny(swiglu_alpha=2.0).config)
    assert config.activation == Activation("clamped_swiglu", alpha=2.0, limit=1.5)
    assert config.expert_bias
    assert (config.hidden_size, config.ffn_size, config.num_experts, config.top_k) == (32, 48, 4, 2)


def test_other_arithmetic_is_refused() -> None:
    model = tiny()
    hf.register()
    model.set_experts_implementation("comet")
    experts: nn.Module = model.model.layers[1].mlp.experts
    experts._apply_gate = lambda gate_up: gate_up[..., ::2]
    with pytest.raises(ValueError, match=r"_apply_gate of model.layers.1.mlp.experts \(GptOssExperts\) must be as in"):
        check_named(model)
