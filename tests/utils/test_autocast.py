"""Tokens in float32 at experts in bfloat16 under autocast, as models have them whose norms stay in float32."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cases import FIELDS
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.graphed.moe import GraphedMoE
from comet.integrations import hf
from comet.integrations.megatron import moe_config
from comet.integrations.megatron.layer import Choices, CometExperts
from comet.layer.group import make_expert_group
from comet.moe import MoE

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import prompt, tiny_model

NARROW = torch.bfloat16


def with_wide_norms(model: Any) -> Any:
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    return model


def by_name(model: Any) -> Any:
    hf.register()
    model.set_experts_implementation("comet")
    return model


def logits_and_grads(model: Any, ids: Tensor, autocast: torch.dtype, grad: bool) -> dict[str, Tensor]:
    with torch.autocast("cpu", autocast), torch.set_grad_enabled(grad):
        logits = model(ids).logits
    if not grad:
        return {"logits": logits}
    model.zero_grad()
    logits.float().square().mean().backward()
    return {"logits": logits} | {name: p.grad for name, p in model.named_parameters() if ".experts." in name}


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [hf.convert, by_name])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_experts_of_a_model_take_tokens_as_eager_ones_do(family: str, way: Any, autocast: torch.dtype) -> None:
    """They deviate at most twice as much as eager experts, which multiply in autocast's type."""
    stock, model = (with_wide_norms(tiny_model(family, NARROW)) for _ in range(2))
    exact, model = with_wide_norms(tiny_model(family, NARROW)).float(), way(model)
    for length, grad in ((4, False), (4, True), (70, False)):
        ids = prompt(1, length)
        wanted, found = (logits_and_grads(each, ids, autocast, grad) for each in (stock, model))
        with torch.set_grad_enabled(grad):
            exactly = logits_and_grads(exact, ids, torch.float32, grad) if grad else {"logits": exact(ids).logits}
        for name, value in found.items():
            assert value.dtype == wanted[name].dtype, name
            theirs, ours = ((each[name].double() - exactly[name].double()).norm() for each in (wanted, found))
            assert ours <= 2 * theirs + 1e-3, f"{name}, {length} tokens: {ours}, eager {theirs}"


@pytest.mark.parametrize("way", [hf.convert, by_name])
@pytest.mark.parametrize("length", [4, 70])
def test_without_autocast_the_parameter_is_named(way: Any, length: int) -> None:
    model = way(with_wide_norms(tiny_model("qwen2_moe", NARROW)))
    experts = model.model.layers[1].mlp.experts
    ids = torch.tensor([[0, 1]]).expand(length, 2)
    rule = "gate_up_proj, down_proj must be of the tokens' dtype torch.float32, or the model run under torch.autocast"
    with torch.no_grad(), pytest.raises(ValueError, match=rule):
        experts(torch.randn(length, 32), ids, torch.rand(length, 2))
    with torch.no_grad(), torch.autocast("cpu", NARROW):
        output = experts(torch.randn(length, 32), ids, torch.rand(length, 2))
    assert output.dtype == torch.float32


def test_experts_in_a_store_take_them(tmp_path: Path) -> None:
    tiny_model("qwen2_moe", NARROW).save_pretrained(tmp_path)
    model, whole = (hf.load_pretrained(tmp_path, **given) for given in (dict(expert_budget=0.5), {}))
    with torch.no_grad(), torch.autocast("cpu", NARROW):
        for length in (2, 70):
            found, wanted = (with_wide_norms(each)(prompt(1, length)).logits for each in (model, whole))
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("path", ["twin", "plain", "reference"])
@pytest.mark.parametrize("make", [lambda layer: layer, GraphedMoE])
def test_a_layer_takes_them_in_the_type_of_its_group(path: str, make: Any) -> None:
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, shared_ffn_size=32)
    group = make_expert_group(config, ParallelConfig(), max_tokens=16, dtype=NARROW, device="cpu")
    layer = make(MoE(config, group, path=path))
    x = torch.randn(2, 5, 32, requires_grad=True)
    with torch.autocast("cpu", NARROW):
        output, _ = layer(x)
        wanted, _ = layer(x.to(NARROW))
    assert output.dtype == torch.float32
    assert torch.equal(output, wanted.float())
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    with pytest.raises(ValueError, match=r"dtype=torch.float32 of the input must be the group's torch.bfloat16"):
        layer(x)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"must be the group's torch\.bfloat16"):
        layer(x)


def test_experts_of_megatron_take_them() -> None:
    fields: dict[str, Any] = dict(params_dtype=NARROW, perform_initialization=False, tensor_model_parallel_size=1)
    config = SimpleNamespace(**FIELDS | fields)
    group = make_expert_group(moe_config(config), ParallelConfig(), max_tokens=8, dtype=NARROW, device="cpu")
    choices = Choices(group=group, path="plain", overlap=None, max_imbalance=None)
    experts = object.__new__(CometExperts)
    CometExperts._mark = lambda *_: None  # type: ignore[method-assign]
    experts.__init__(4, config, pg_collection=SimpleNamespace(expt_dp=None), choices=choices)  # type: ignore[misc]
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    tokens, ids, weights = torch.randn(5, 32), torch.tensor([[0, 1]] * 5).int(), torch.rand(5, 2)
    with torch.autocast("cpu", NARROW):
        found = experts(tokens, ids, weights)
        assert torch.equal(found, experts(tokens.to(NARROW), ids, weights).float())
