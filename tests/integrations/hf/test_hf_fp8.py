"""Block FP8 checkpoints against stock models that hold the dequantised weights, and what makes one be refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import DECODE_TOKENS, CountedReads, Expected, edit_state, same_state, tiny_model
from hf_fp8_cases import (
    PUBLISHED,
    check_kept,
    dequantized,
    load_on_ranks,
    publish,
    quantized,
    stock,
)
from ranks import run_ranks
from safetensors.torch import load_file

from comet.integrations import hf
from comet.integrations.hf.fp8.blocks import dequantize_slice

State = dict[str, Tensor]
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def test_a_rank_alone_equals_the_stock_model_of_the_dequantised_weights(
    ragged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = stock(ragged)
    with caplog.at_level(logging.INFO, logger="comet"):
        loaded = hf.load_pretrained(ragged, decode_tokens=DECODE_TOKENS)
    said = [record.message for record in caplog.records if "block FP8" in record.message]
    numbers = sum(weight.numel() for name, weight in model.state_dict().items() if "_proj" in name)
    assert said == [
        f"block FP8 weights are dequantised to float32, {4 * numbers / 1e9:.3f} GB per rank in place of "
        f"{numbers / 1e9:.3f} GB; experts as well, unless keep_fp8=True"
    ]
    assert same_state(loaded, model), "dequantising in float32 is exact to the bit"
    Expected.of(model).check(loaded, "block FP8")
    assert not hasattr(loaded.config, "quantization_config"), "what is saved is not quantised any more"
    loaded.save_pretrained(tmp_path)
    assert same_state(hf.load_pretrained(tmp_path), model)


def test_the_dtype_of_the_model_is_rounded_to_once(ragged: Path) -> None:
    loaded, model = hf.load_pretrained(ragged, dtype=torch.bfloat16), stock(ragged, torch.bfloat16)
    assert same_state(loaded, model)
    assert loaded.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_another_family_with_scales_in_bfloat16(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", hidden_size=160).save_pretrained(tmp_path)
    publish(tmp_path, torch.bfloat16)
    assert same_state(hf.load_pretrained(tmp_path), stock(tmp_path))


def test_fused_experts_whose_gate_and_up_share_a_block(ragged: Path, tmp_path: Path) -> None:
    state = load_file(ragged / "model.safetensors")
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.experts"
        parts = [[f"{name}.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")] for expert in range(8)]
        plain = load_file(ragged / "plain" / "model.safetensors")
        gate_up = [quantized(torch.cat([plain[gate], plain[up]])) for gate, up, _ in parts]
        down = [(state[part], state[f"{part}_scale_inv"]) for _, _, part in parts]
        for fused, pairs in (("gate_up_proj", gate_up), ("down_proj", down)):
            elements, scales = zip(*pairs, strict=True)
            state[f"{name}.{fused}"] = torch.stack([element.view(torch.uint8) for element in elements]).view(
                torch.float8_e4m3fn
            )
            state[f"{name}.{fused}_scale_inv"] = torch.stack(scales)
        for part in (name for names in parts for name in names):
            del state[part], state[f"{part}_scale_inv"]
    edit_state(ragged, lambda old: (old.clear(), old.update(state)), tmp_path)
    loaded = hf.load_pretrained(tmp_path)
    experts, name = loaded.model.layers[2].mlp.experts, "model.layers.2.mlp.experts.gate_up_proj"
    assert torch.equal(experts.gate_up_proj[3], dequantized(state[name][3], state[f"{name}_scale_inv"][3]))


@pytest.mark.parametrize("seed", range(8))
def test_slices_that_begin_anywhere(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shape = draw(1, 400), draw(1, 400)
    elements, scales = quantized(torch.randn(shape, generator=generator))
    row, column = draw(0, shape[0]), draw(0, shape[1])
    rows, columns = slice(row, draw(row + 1, shape[0] + 1)), slice(column, draw(column + 1, shape[1] + 1))
    touched = scales[row // 128 : -(-rows.stop // 128), column // 128 : -(-columns.stop // 128)]
    part = dequantize_slice(elements[rows, columns], touched, row, column, torch.float32)
    assert torch.equal(part, dequantized(elements, scales)[rows, columns]), f"seed {seed}: {shape}, {rows}, {columns}"


def test_the_example_of_dequantize_slice() -> None:
    ones = torch.ones(3, 1).to(torch.float8_e4m3fn)
    part = dequantize_slice(ones, torch.tensor([[2.0], [10.0]]), 127, 0, torch.float32)
    assert part.tolist() == [[2.0], [10.0], [10.0]]


def test_kept_experts_compute_the_same_and_take_what_they_take_on_disk(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="comet"):
        loaded = hf.load_pretrained(whole, decode_tokens=DECODE_TOKENS, keep_fp8=True)
    assert "experts stay as they are" in caplog.text
    check_kept(loaded, whole, share=1)
    Expected.of(stock(whole)).check(loaded, "kept")
    with pytest.raises(ValueError, match=r"save_pretrained: experts are kept in block FP8; load .* keep_fp8=False"):
        loaded.save_pretrained(whole / "copy")


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), slow(1, 2)])
def test_two_ranks_read_their_own_experts(ragged: Path, whole: Path, ep: int, tp: int) -> None:
    first, second = run_ranks(load_on_ranks, 2, {"ragged": ragged, "whole": whole}, ep, tp, timeout=300)
    assert len(first) == 3
    for what, logits in first.items():
        assert torch.equal(logits, second[what]), f"{what}: ranks 0 and 1 differ"


def refuse(folder: Path, message: str, **settings: Any) -> None:
    with CountedReads() as counted, pytest.raises(ValueError, match=message):
        hf.load_pretrained(folder, **settings)
    assert counted.reads == [], "nothing is read before everything is checked"


def edited(source: Path, folder: Path, change: Callable[[State], object], **quantization: Any) -> Path:
    """A copy of a checkpoint with other tensors or another ``quantization_config``; a value of ... removes a field."""
    edit_state(source, change, folder)
    config = json.loads((source / "config.json").read_text())
    fields = {name: value for name, value in (PUBLISHED | quantization).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    return folder


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (dict(quant_method="gptq"), "quant_method='gptq' of quantization_config must be 'fp8': only block FP8 is read"),
        (dict(quant_method=...), "quant_method=None of quantization_config must be 'fp8'"),
        (dict(weight_block_size=[64, 128]), r"weight_block_size=\[64, 128\] of .* must be \[128, 128\]: only"),
        (dict(weight_block_size=...), r"weight_block_size=None of quantization_config must be \[128, 128\]"),
        (dict(fmt="e5m2"), "fmt='e5m2' of quantization_config must be 'e4m3'"),
        (dict(activation_scheme="static"), "activation_scheme='static' of quantization_config must be 'dynamic'"),
    ],
)
def test_other_quantisations(ragged: Path, tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    refuse(edited(ragged, tmp_path, lambda state: None, **quantization), message)


OTHER = "model.layers.0.self_attn.o_proj.weight"


SCALES, OTHER_SCALES, NORM = f"{EXPERT}_scale_inv", f"{OTHER}_scale_inv", "model.norm.weight"


def vector_in_fp8(state: State) -> None:
    state |= {NORM: state[NORM].to(torch.float8_e4m3fn), f"{NORM}_scale_inv": torch.ones(2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(SCALES), f"must have its scales: missing {SCALES}$"),
        (lambda state: state.pop(OTHER_SCALES), f"must have its scales: missing {OTHER_SCALES}$"),
        (lambda state: state.pop(EXPERT), f"must have its scales: surplus {SCALES}$"),
        (
            {SCALES: torch.ones(2, 2)},
            rf"{SCALES} of shape \(2, 2\) must be \(3, 2\) for a tensor of shape \(288, 160\)$",
        ),
        ({OTHER_SCALES: torch.ones(160)}, rf"{OTHER_SCALES} of shape \(160,\) must be \(2, 1\) for a tensor of shape"),
        ({SCALES: torch.ones(3, 2).byte()}, f"{SCALES} of dtype U8 must be one of F32, F16, BF16, F8_E8M0$"),
        ({EXPERT: torch.zeros(256, 128), SCALES: torch.ones(2, 1)}, f"{EXPERT} of dtype F32 must be F8_E4M3 beside"),
        (
            {OTHER: torch.zeros(160, 32).to(torch.float8_e5m2)},
            f"{OTHER} of dtype F8_E5M2 must be F8_E4M3 or one of F32",
        ),
        (vector_in_fp8, rf"{NORM} of shape \(160,\) must have rows and columns$"),
    ],
)
def test_broken_scales(ragged: Path, tmp_path: Path, change: Any, message: str) -> None:
    refuse(edited(ragged, tmp_path, change if callable(change) else lambda state: state.update(change)), message)


@pytest.mark.parametrize("keep_fp8", [False, True])
@pytest.mark.parametrize(("name", "value"), [(EXPERT, float("nan")), (EXPERT, -1.0), (OTHER, float("inf"))])
def test_scales_that_mean_nothing(whole: Path, tmp_path: Path, name: str, value: float, keep_fp8: bool) -> None:
    edited(whole, tmp_path, lambda state: state[f"{name}_scale_inv"].fill_(value))
    with pytest.raises(ValueError, match=f"{name}_scale_inv holds {value}, must be finite and not negative$"):
        hf.load_pretrained(tmp_path, keep_fp8=keep_fp8)


def test_what_cannot_be_kept(ragged: Path, whole: Path, tmp_path: Path) -> None:
    refuse(ragged, r"ffn_size=288 / tp=1 = 288 must be a multiple of 128 for keep_fp8=True", keep_fp8=True)
    refuse(whole / "plain", "keep_fp8=True must come with a block FP8 checkpoint: config.json of", keep_fp8=True)

    def leave_one(state: State) -> None:
        state[EXPERT] = dequantized(state[EXPERT], state.pop(f"{EXPERT}_scale_inv"))

    edited(whole, tmp_path, leave_one)
    refuse(tmp_path, f"{EXPERT} of dtype F32 must be F8_E4M3 with scales to be kept as it is$", keep_fp8=True)
    assert same_state(hf.load_pretrained(tmp_path), stock(whole)), "some experts in FP8 are fine where none is kept"
