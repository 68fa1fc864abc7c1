"""Models whose modules do not do what their classes say: hooks, objects' own ``forward`` and parametrizations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_cases import prompt, routed, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from comet.integrations import hf

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


def once(module: nn.Module) -> None:
    def pass_zeros(*_: Any) -> Tensor:
        handle.remove()
        return torch.zeros(1, 32)

    handle = module.register_forward_hook(pass_zeros)


def negate(module: nn.Module) -> None:
    module.forward = lambda *given: -type(module).forward(module, *given)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("where", "alter"),
    [
        ("", lambda each: each.register_forward_hook(lambda *given: 3 * given[-1])),
        ("", lambda each: each.register_forward_pre_hook(lambda _, given: (2 * given[0],))),
        ("", once),
        ("", negate),
        (".act_fn", lambda each: each.register_forward_hook(lambda *given: 3 * given[-1])),
        (".up_proj", negate),
        (".down_proj", torch.nn.utils.weight_norm),
        (".down_proj", lambda each: parametrize.register_parametrization(each, "weight", Doubled())),
    ],
)
@torch.no_grad()
def test_what_alters_a_shared_expert_holds_in_decode_steps(
    family: str, where: str, alter: Callable[[nn.Module], Any]
) -> None:
    """Hooks and other changes are on the module in its place, on it or inside it; some remove themselves."""
    name = {"qwen2_moe": "shared_expert", "deepseek_v3": "shared_experts"}[family] + where
    _, after, before = models = [tiny_model(family) for _ in range(3)]
    tokens, name = routed(1, seed=1)[0][None], f"model.layers.1.mlp.{name}"
    hf.convert(after).model.layers[1].mlp(tokens)
    for model in models:
        alter(model.get_submodule(name))
    hf.convert(before)
    for _ in range(2):
        wanted, *others = (model.model.layers[1].mlp(tokens) for model in models)
        for other in others:
            torch.testing.assert_close(other, wanted)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@torch.no_grad()
def test_hooks_of_experts_see_no_shared_expert(family: str) -> None:
    stock, model = tiny_model(family), hf.convert(tiny_model(family))
    tokens = routed(1, seed=1)[0][None]
    for each in (stock, model):
        each.model.layers[1].mlp(tokens)
        each.model.layers[1].mlp.experts.register_forward_hook(lambda *given: 3 * given[-1])
    torch.testing.assert_close(model.model.layers[1].mlp(tokens), stock.model.layers[1].mlp(tokens))


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda each: each.register_forward_hook(print), "_forward_hooks of NAME must be empty: they would be lost"),
        (lambda each: each.register_forward_pre_hook(print), "_forward_pre_hooks of NAME must be empty"),
        (lambda each: each.register_full_backward_hook(print), "_backward_hooks of NAME must be empty"),
        (
            lambda each: parametrize.register_parametrization(each, "down_proj", Doubled()),
            "down_proj of NAME must not be parametrized",
        ),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_a_conversion_would_lose_is_refused(family: str, alter: Callable[[nn.Module], Any], reason: str) -> None:
    model = tiny_model(family)
    alter(model.model.layers[1].mlp.experts)
    with pytest.raises(ValueError, match=reason.replace("NAME", r"model\.layers\.1\.mlp\.experts \(\w+\)")):
        hf.convert(model)
    hf.register()
    model.set_experts_implementation("comet")
    hf.check(model)


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, weight: Tensor) -> Tensor:
        return self.scale * weight


@torch.no_grad()
def test_parametrized_experts_of_gpt_oss_are_those_of_each_call() -> None:
    """Their weights are temporary, and the next ones may come to the same addresses."""
    stock, scaled = tiny_model("gpt_oss", num_hidden_layers=1), Scaled()
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(stock.model.layers[0].mlp.experts, name, scaled)
    hf.register()
    for step in range(10):
        scaled.scale, found = 1.0 + step, []
        for implementation in ("eager", "comet"):
            stock.set_experts_implementation(implementation)
            found.append(stock(prompt(1, 3)).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3, msg=f"step {step}")
