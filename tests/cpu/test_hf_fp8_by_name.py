"""``experts_implementation="comet"`` on block FP8: FP8 experts of transformers are computed, or refused by name."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import Expected, prompt, tiny_model
from hf_fp8_cases import WHOLE, fp8_by_name, publish, published, stock

from comet.integrations import hf
from comet.integrations.hf.by_name import fp8_weights

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("whole"), WHOLE)


def test_experts_in_fp8_compute_what_the_dequantised_ones_do(whole: Path) -> None:
    """Prefills of more tokens than warp decode takes, and steps; copies and moved weights are read anew."""
    model, expected = fp8_by_name(whole), Expected.of(stock(whole))
    assert not hasattr(model.model.layers[1].mlp.experts, "runner"), "the stock modules stay"
    logits = expected.check(model, "by name")
    copied = copy.deepcopy(model)
    for layer in copied.model.layers[1:]:
        kept = fp8_weights(layer.mlp.experts)
        assert fp8_weights(layer.mlp.experts) is kept
        layer.mlp.experts.down_proj_scale_inv.data.zero_()
        layer.mlp.experts.down_proj.data = layer.mlp.experts.down_proj.data.clone()
    without = expected.logits - copied(expected.ids).logits
    assert without.abs().max() > 0.1, "the experts are a part of the logits, and weights that moved are read"
    assert torch.equal(expected.check(model, "after the copy was changed"), logits)


def test_many_tokens_and_a_gradient(whole: Path) -> None:
    model, same = fp8_by_name(whole), stock(whole)
    ids = prompt(1, 100)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, same(ids).logits, rtol=1e-4, atol=1e-4)
    grads = []
    for each in (model, same):
        embedded = each.get_input_embeddings()(ids[:, :5]).detach().requires_grad_()
        each(inputs_embeds=embedded).logits.sum().backward()
        grads.append(embedded.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(block_size=(64, 128)),
            r"weight_block_size=\(64, 128\) of the model's experts must be \(128, 128\); comet",
        ),
        (dict(block_size=None), r"weight_block_size=\(\) of the model's experts must be \(128, 128\); comet"),
        (dict(activation_scheme="static"), "activation_scheme=static of the model's experts must be dynamic; comet"),
        (dict(swiglu_limit=7.0), "swiglu_limit=7.0 of the model's experts must be None; comet"),
        (dict(has_bias=True), r"has_bias=True of the model's experts \(FP8Experts\) must be False"),
    ],
)
def test_other_experts_are_refused(whole: Path, change: dict[str, Any], message: str) -> None:
    model = fp8_by_name(whole)
    vars(model.model.layers[1].mlp.experts).update(change)
    with pytest.raises(ValueError, match=message):
        model(prompt(1, 3))


def test_other_types_and_widths_are_refused(whole: Path) -> None:
    rule = r"; comet\.integrations\.hf\.load_pretrained\(folder\) dequantises block FP8, with keep_fp8=True it keeps"
    tensors = {
        "gate_up_proj": (torch.zeros(8, 512, 80, dtype=torch.int8), f"dtype=torch.int8 of .* must be .*e4m3fn{rule}"),
        "gate_up_proj_scale_inv": (torch.zeros(8, 4, 2, dtype=torch.uint8), f"scales of dtype torch.uint8 .*{rule}"),
        "down_proj": (torch.zeros(8, 160, 64).to(torch.float8_e4m3fn), f"ffn_size=64 .* multiple of 128{rule}"),
    }
    for name, (tensor, message) in tensors.items():
        model = fp8_by_name(whole)
        experts = model.model.layers[1].mlp.experts
        setattr(experts, name, torch.nn.Parameter(tensor, requires_grad=False))
        with pytest.raises(ValueError, match=message):
            model(prompt(1, 3))
    model = fp8_by_name(whole)
    model.model.layers[1].mlp.experts.down_proj_scale_inv.data[3, 1, 1] = float("nan")
    with pytest.raises(ValueError, match=r"w2_scales\[3, 1, 1\]=nan must be finite and not negative"):
        model(prompt(1, 3))


def test_from_pretrained_without_a_gpu(tmp_path: Path) -> None:
    """transformers dequantises, or names what it lacks."""
    from transformers import AutoModelForCausalLM

    hf.register()
    sizes = dict(hidden_size=128, moe_intermediate_size=256, intermediate_size=128, head_dim=32)
    tiny_model("qwen3_moe", **sizes).save_pretrained(tmp_path)
    publish(tmp_path)
    if not HAS_ACCELERATE:
        with pytest.raises(ImportError, match="accelerate"):
            AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="comet")
        return
    if torch.cuda.is_available():
        pytest.skip("transformers dequantises only where there is no GPU")
    named = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="comet").eval()
    Expected.of(stock(tmp_path)).check(named, "dequantised by transformers")
