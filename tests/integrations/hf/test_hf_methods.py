"""Which experts of transformers Comet computes: every class that asks the registry, and what is refused by name."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import Expected, prompt, routed, tiny_model

from comet.integrations import hf

# Every class of 5.23 whose arithmetic is its own, and what of it is named.
REFUSED = {
    "AriaExperts": "is_transposed=True",
    "BeamExperts": "forward, _apply_gate",
    "DeepseekV4Experts": "forward, _apply_gate",
    "Glm5NextTextExperts": "forward, _apply_gate",
    "HYV4Experts": "forward, _apply_gate",
    "Inkling2Experts": "forward, _apply_gate",
    "MiniMaxM3VLExperts": "forward, _apply_gate",
    "MuseSparkExperts": "has_post_expert_norm=True",
    "NemotronHExperts": "has_gate=False",
    "OpenAIPrivacyFilterExperts": "has_bias=True",
}
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 24),  # as of F = 48 over two ranks
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "silu"),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "mlp_gate_softcap", "mlp_up_softcap"), 0.5),
    **dict.fromkeys(("rms_norm_eps", "post_norm_eps"), 1e-6),
    "num_experts_per_tok": 2,
    "moe_latent_size": None,
}


def experts_classes() -> dict[str, Any]:
    import transformers

    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)\(", file.read_text()):
            found[name] = getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)
    return found


def random_experts(kind: Any) -> Any:
    torch.manual_seed(3)
    experts = kind(SimpleNamespace(**SIZES, _experts_implementation="comet"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


@torch.no_grad()
def test_every_class_of_experts_is_right_or_refused() -> None:
    hf.register()
    classes = experts_classes()
    assert len(classes) > 50
    for name, kind in classes.items():
        experts = random_experts(kind)
        if name in REFUSED:
            with pytest.raises(ValueError, match=rf"{REFUSED[name]} of the model's experts \({name}\) must be"):
                experts(*routed(5, seed=5))
            continue
        exact = random_experts(kind).double()
        exact.config._experts_implementation = "eager"
        for num_tokens in (0, 5, 70):
            tokens, ids, weights = routed(num_tokens, seed=num_tokens)
            wanted = exact(tokens.double(), ids, weights.double())
            actual = experts(tokens, ids, weights).double()
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-3, msg=f"{name}, {num_tokens} tokens")


def test_methods_that_a_class_inherits_or_overrides() -> None:
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Same(MixtralExperts):
        """Nothing of its own."""

    class Doubled(MixtralExperts):
        def forward(self, *arguments: Any) -> Tensor:
            return 2 * super().forward(*arguments)

    class Gate(Same):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up.chunk(2, dim=-1)[0]

    class Inherited(Gate, DeepseekV4Experts):
        """By way of two classes."""

    model = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    expected = Expected.of(model)
    hf.register()
    model.set_experts_implementation("comet")
    for kind in (Same, use_experts_implementation(type("Again", (Same,), {}))):
        experts.__class__ = kind
        expected.check(model, kind.__name__)
        expected.check(hf.convert(copy.deepcopy(model)), kind.__name__)
    experts.__class__ = Doubled
    with pytest.raises(ValueError, match=r"forward of model\.layers\.1\.mlp\.experts \(Doubled\) must be as in Mixt"):
        hf.convert(model)
    for kind in (Gate, Inherited):
        experts.__class__ = kind
        for call in (hf.convert, hf.check, lambda model: model(prompt(1, 3))):
            with pytest.raises(ValueError, match=rf"_apply_gate of .*experts \({kind.__name__}\) must be as in Mixt"):
                call(model)
    experts.__class__ = MixtralExperts
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[1]
    with pytest.raises(ValueError, match="_apply_gate of the model's experts"):
        model(prompt(1, 3))
    del experts._apply_gate
    experts.forward = experts.forward
    expected.check(model, "as hooks of accelerate put it")
    with pytest.raises(ValueError, match=r"forward of model\.layers\.1.* must be its class's: it would be lost"):
        hf.convert(model)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_a_shared_expert_that_adds_up_otherwise_stays_outside_of_steps(family: str) -> None:
    for part in ("block", "shared", "activation"):
        model = tiny_model(family)
        block = model.model.layers[1].mlp
        shared = block.shared_expert if family == "qwen2_moe" else block.shared_experts
        if part == "activation":
            shared.act_fn = nn.Tanh()
        else:
            module = block if part == "block" else shared
            kind = type(module)
            other = {"forward": lambda self, tokens, kind=kind: 3 * kind.forward(self, tokens) - 1}
            module.__class__ = type("Other", (kind,), other)
        expected = Expected.of(model)
        hf.convert(model)
        assert block.experts.shared is None
        expected.check(model, f"{family}, another {part}")


def test_a_scan_names_models_that_never_call_comet() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2, pad_token_id=0)
    config = AutoConfig.for_model("llama4_text", **sizes, **heads)
    hf.register()
    deaf = AutoModelForCausalLM.from_config(config, experts_implementation="comet")
    with pytest.raises(ValueError, match=r"model=Llama4ForCausalLM must have experts that call Comet.*; Llama4TextEx"):
        hf.check(deaf)
    mixtral = tiny_model("mixtral")
    with pytest.raises(ValueError, match=r"experts_implementation='comet' for a model whose experts ask .* registry$"):
        hf.check(mixtral)
    mixtral.set_experts_implementation("comet")
    hf.check(mixtral)
    mixtral.model.layers[1].mlp.experts.has_bias = True
    with pytest.raises(ValueError, match=r"has_bias=True of model\.layers\.1\.mlp\.experts"):
        hf.check(mixtral)
