"""Block FP8 as transformers computes it by name, scales that are stored otherwise, and what is refused of both."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hf_cases import Expected, edit_state, prompt, tiny_model
from hf_fp8_cases import WHOLE, fp8_by_name, published, stack_experts, stock

from comet.integrations import hf

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


@pytest.mark.parametrize(
    ("is_fused", "message"),
    [
        (True, r"gate_up_proj_scale_inv of shape \(8, 4, 1\) may hold .* whose blocks differ with ffn_size=224: each"),
        (False, r"missing (\S+_scale_inv(, )?){3} and 69 more; surplus \S+down_proj_scale_inv, (\S+ ){2}and 3 more$"),
    ],
)
def test_scales_of_all_experts_in_one_tensor_are_refused(tmp_path: Path, is_fused: bool, message: str) -> None:
    """One tensor of scales, with elements in one tensor, whose gate and up may share a block, or in one an expert."""
    published(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=224, mlp_only_layers=[])

    def stack(state: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            name = f"model.layers.{layer}.mlp.experts"
            for part, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                if is_fused:
                    state[f"{name}.{part}"] = stack_experts(state, name, sources, "weight")
                state[f"{name}.{part}_scale_inv"] = stack_experts(state, name, sources, "weight_scale_inv")
        for name in [name for name in state if ".experts." in name and name.split(".")[5].isdigit()]:
            if is_fused or name.endswith("_scale_inv"):
                del state[name]

    edit_state(tmp_path, stack)
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)


def test_narrow_weights_that_nothing_explains(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)

    def narrow(state: dict[str, torch.Tensor]) -> None:
        state.update({name: state[name].to(torch.float8_e4m3fn) for name in state if ".self_attn." in name})

    edit_state(tmp_path, narrow)
    message = r"k_proj\.weight of dtype F8_E4M3, .* and 5 more must be one of F32, F16, BF16: config.json has no quant"
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)


def test_experts_in_fp8_compute_what_the_dequantised_ones_do(whole: Path) -> None:
    """Prefills have more tokens than warp decode takes; copies and moved weights are read again."""
    model, expected = fp8_by_name(whole), Expected.of(stock(whole))
    assert not hasattr(model.model.layers[1].mlp.experts, "runner"), "the stock modules stay"
    logits = expected.check(model, "by name")
    copied = copy.deepcopy(model)
    assert torch.equal(expected.check(copied, "copied"), logits)
    for layer in copied.model.layers[1:]:
        scales = layer.mlp.experts.down_proj_scale_inv
        layer.mlp.experts.down_proj_scale_inv = torch.nn.Parameter(torch.zeros_like(scales), requires_grad=False)
    without = expected.logits - copied(expected.ids).logits
    assert without.abs().max() > 0.1, "the experts are a part of the logits, and scales that were replaced are read"
    assert torch.equal(expected.check(model, "after the copy was changed"), logits)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """``scale_fmt="ue8m0"`` stores the exponents alone."""
    expected = Expected.of(stock(published(tmp_path, scale_dtype=torch.float8_e8m0fnu, **WHOLE)))
    model = fp8_by_name(tmp_path)
    expected.check(model, "by name")
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            scales = layer.mlp.experts.down_proj_scale_inv
            scales.copy_(torch.full_like(scales, 2.0**-100, dtype=torch.float32))
    assert (expected.logits - model(expected.ids).logits).abs().max() > 0.1, "scales that are written to are read"
    for keep_fp8 in (False, True):
        expected.check(hf.load_pretrained(tmp_path, keep_fp8=keep_fp8), f"keep_fp8 {keep_fp8}")


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
        (dict(block_size=(64, 128)), r"weight_block_size=\(64, 128\) of the model's experts must be \(128, 128\); c"),
        (dict(block_size=None), r"weight_block_size=\(\) of the model's experts must be \(128, 128\); comet"),
        (dict(activation_scheme="static"), "activation_scheme=static of the model's experts must be dynamic; comet"),
        (dict(limit=7.0), r"the model's experts \(FP8Experts\), with act_fn=.*, must compute the weighted sum"),
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


def from_folder(folder: Path) -> Any:
    """The model by Comet's name as transformers makes it of a block FP8 folder without a GPU."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    hf.register()
    with mock.patch.object(quantizer_finegrained_fp8, "is_accelerate_available", return_value=True):
        return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="comet", dtype=torch.float32).eval()


# D, F and the width of a head; what transformers gets wrong; whether that is a part of the experts.
WIDTHS = [
    ((128, 256, 32), ""),
    ((96, 64, 32), ""),
    ((256, 192, 32), r"experts\.\d\.down_proj"),
    ((192, 256, 32), "down_proj"),
    ((256, 256, 48), r"self_attn\.o_proj"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers dequantises only where there is no GPU")
@pytest.mark.parametrize(("sizes", "wrong"), WIDTHS)
def test_what_transformers_dequantises_wrongly_is_refused(
    tmp_path: Path, sizes: tuple[int, int, int], wrong: str
) -> None:
    names = dict(zip(("hidden_size", "moe_intermediate_size", "head_dim"), sizes, strict=True))
    published(tmp_path, "qwen3_moe", intermediate_size=128, **names)
    model, expected = from_folder(tmp_path), Expected.of(stock(tmp_path))
    if not wrong:
        hf.check(model)
        expected.check(model, str(sizes))
        return
    model.set_experts_implementation("eager")
    assert (model(expected.ids).logits - expected.logits).abs().max() > 0.1, "transformers is right now"
    model.set_experts_implementation("comet")
    for call in (hf.check, lambda model: model(prompt(1, 3))):
        with pytest.raises(ValueError, match=rf"{wrong}\.weight.* must have scales, and be .*load_pretrained"):
            call(model)
    expected.check(hf.load_pretrained(tmp_path), "loaded by Comet")


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers dequantises only where there is no GPU")
def test_attention_without_scales(tmp_path: Path) -> None:
    published(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    name = "model.layers.1.self_attn.q_proj.weight"
    edit_state(tmp_path, lambda state: state.pop(f"{name}_scale_inv"))
    with pytest.raises(ValueError, match=rf"{name} of .* must have scales"):
        from_folder(tmp_path)(prompt(1, 3))


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_scales_in_bfloat16_that_torch_saw_nobody_write_count_at_once(tmp_path: Path, in_inference_mode: bool) -> None:
    """Decode steps read these only copies; the first step may be of either mode."""
    model = fp8_by_name(published(tmp_path, "qwen3_moe", scale_dtype=torch.bfloat16, **WHOLE))
    experts = model.model.layers[0].mlp.experts
    assert experts.down_proj_scale_inv.dtype == torch.bfloat16
    with torch.inference_mode(in_inference_mode), torch.no_grad():
        before = model(prompt(1, 3)).logits
    with torch.no_grad():
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            getattr(experts, name).data.mul_(2)
        after = model(prompt(1, 3)).logits
        fresh = copy.deepcopy(model)
        for module in fresh.modules():
            vars(module).pop("_comet_decode_weights", None)
        assert not torch.equal(after, before)
        assert torch.equal(after, fresh(prompt(1, 3)).logits)
