"""Experts of transformers by name, each class with its own defaults; activations that Comet has, and others."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_cases import Expected, prompt, routed, tiny_model
from torch import nn

from comet.integrations import hf

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


REFUSED = {
    "AriaExperts": "is_transposed=True of NAME must be",
    "DeepseekV4Experts": "NAME, with act_fn=(.|\n)*, must compute",
    "Glm5NextTextExperts": "NAME, with act_fn=(.|\n)*, must compute",
    "HYV4Experts": "NAME, with act_fn=(.|\n)*, must compute",
    "Inkling2Experts": "NAME, with act_fn=(.|\n)*, must compute",
    "MiniMaxM3VLExperts": "NAME, with act_fn=(.|\n)*, must compute",
    "MuseSparkExperts": "has_post_expert_norm=True of NAME must be",
    "NemotronHExperts": "has_gate=False of NAME must be",
    "OpenAIPrivacyFilterExperts": "has_bias=True of NAME must be",
}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZES = {
    **dict.fromkeys(COUNTS, 8),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 24),  # F = 48 over two ranks
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "silu"),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "mlp_gate_softcap", "mlp_up_softcap"), 0.5),
    **dict.fromkeys(("rms_norm_eps", "post_norm_eps"), 1e-6),
    "num_experts_per_tok": 2,
    "moe_latent_size": None,
}
WHOLE_NUMBERS = {name for name, value in SIZES.items() if isinstance(value, int) or value is None}


ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
NOT_SILU = {"DiffusionGemmaTextExperts": "GELUTanh()", "Gemma4TextExperts": "GELUTanh()"}


def experts_classes() -> dict[str, Any]:
    import transformers

    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)\(", file.read_text()):
            found[name] = getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)
    return found


def own_settings(kind: Any) -> dict[str, Any]:
    """The activation and the bounds that the configuration of a class of experts has by default."""
    from transformers import PreTrainedConfig

    module = importlib.import_module(kind.__module__.replace(".modeling_", ".configuration_"))
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, PreTrainedConfig)]
    names, found = {*ACTIVATIONS, *SIZES} - WHOLE_NUMBERS, []
    for each in kinds:
        settings = each().to_dict()
        settings |= {new: settings[old] for new, old in each.attribute_map.items() if old in settings}
        if any(settings.get(count) for count in COUNTS) or "num_experts" in settings:
            found.append({name: settings[name] for name in names & settings.keys()})
    activations = {settings.get(name) for settings in found for name in ACTIVATIONS} - {None}
    assert len(activations) <= 1, f"{kind.__name__}: {activations}"
    return {name: value for settings in found for name, value in settings.items()}


def random_experts(kind: Any, settings: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    experts = kind(SimpleNamespace(**{**SIZES, **settings}, _experts_implementation="comet"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


@torch.no_grad()
def test_every_class_of_experts_is_right_or_refused() -> None:
    """Each class has its own configuration's default activation; COMPATIBILITY.md has the counts."""
    hf.register()
    classes = experts_classes()
    right, others = [], {}
    for name, kind in classes.items():
        settings = own_settings(kind)
        experts = random_experts(kind, settings)
        if name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[name].replace("NAME", rf"the model's experts \({name}\)")):
                experts(*routed(5, seed=5))
            continue
        right.append(name)
        if "silu" not in str(getattr(experts, "act_fn", "silu")).lower():
            others[name] = str(experts.act_fn)
        exact = random_experts(kind, settings).double()
        exact.config._experts_implementation = "eager"
        for num_tokens in (0, 5, 70):
            tokens, ids, weights = routed(num_tokens, seed=num_tokens)
            wanted = exact(tokens.double(), ids, weights.double())
            actual = experts(tokens, ids, weights).double()
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-3, msg=f"{name}, {num_tokens} tokens")
    assert others == NOT_SILU
    line = f"All {len(classes)} experts classes that ask the registry, by name | {len(right)} equal"
    assert line in (Path(__file__).parents[3] / "COMPATIBILITY.md").read_text()


@pytest.mark.parametrize("function", ["gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "relu"])
@torch.no_grad()
def test_other_activations_by_name(function: str) -> None:
    model = tiny_model("qwen3_moe", hidden_act=function)
    expected = Expected.of(model)
    hf.register()
    model.set_experts_implementation("comet")
    hf.check(model)
    expected.check(model, function)
    expected.check(hf.convert(model), f"{function}, converted")


@pytest.mark.parametrize("function", ["gelu", "quick_gelu", "relu2", "tanh"])
def test_activations_that_comet_has_not_are_refused_by_name(function: str) -> None:
    model = tiny_model("qwen3_moe", hidden_act=function)
    hf.register()
    model.set_experts_implementation("comet")
    with pytest.raises(
        ValueError, match=r"with act_fn=.*, must compute .* SiLU or GELU of the tanh form or ReLU, and nothing else$"
    ):
        model(prompt(1, 3))
