"""Block FP8 checkpoints against stock models of the dequantised weights: dequantised, kept, with the shared expert."""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fp8_cases import compare, fp8_shard
from hf_cases import (
    DECODE_TOKENS,
    CountedReads,
    Expected,
    assert_ranks_agree,
    edit_state,
    logits_with_cache,
    make_group,
    prompt,
    same_state,
    tiny_config,
)
from hf_fp8_cases import (
    PUBLISHED,
    WHOLE,
    check_kept,
    dequantized,
    load_on_ranks,
    published,
    quantized,
    stock,
)
from layer_cases import LayerCase, rank_inputs
from ranks import in_ranks, run_ranks
from safetensors.torch import load_file
from tiers import slow
from torch import Tensor, nn

from comet.decode.runners import LocalRunner, ReplicatedRunner
from comet.integrations import hf
from comet.integrations.hf.fp8 import FP8Experts, FP8SharedSlots
from comet.integrations.hf.stored import FUSED, dequantize_slice
from comet.layer.group import make_expert_group
from comet.layer.paths import make_path
from comet.quantization.formats import FP8

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


State = dict[str, Tensor]
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def test_a_rank_alone_equals_the_stock_model_of_the_dequantised_weights(
    ragged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = stock(ragged)
    with caplog.at_level(logging.INFO, logger="comet"):
        loaded = hf.load_pretrained(ragged, decode_tokens=DECODE_TOKENS)
    (said,) = [record.message for record in caplog.records if "block FP8" in record.message]
    assert said == "block FP8 is dequantised to torch.float32, 4 times its size; experts are not with keep_fp8=True"
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
    published(tmp_path, "qwen3_moe", scale_dtype=torch.bfloat16, hidden_size=160)
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


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), slow(1, 2)])
def test_two_ranks_read_their_own_experts(ragged: Path, whole: Path, ep: int, tp: int) -> None:
    run_ranks(load_on_ranks, 2, {"ragged": ragged, "whole": whole}, ep, tp, timeout=300)


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
        ({SCALES: torch.ones(2, 2)}, rf"{SCALES} of shape \(2, 2\) must be \(3, 2\) for a tensor of shape .*160\)$"),
        ({OTHER_SCALES: torch.ones(160)}, rf"{OTHER_SCALES} of shape \(160,\) must be \(2, 1\) for a tensor of shape"),
        ({SCALES: torch.ones(3, 2).byte()}, f"{SCALES} of dtype U8 must be one of F32, F16, BF16, F8_E8M0$"),
        ({EXPERT: torch.zeros(256, 128), SCALES: torch.ones(2, 1)}, f"{EXPERT} of dtype F32 must be F8_E4M3 beside"),
        ({OTHER: torch.zeros(9).to(torch.float8_e5m2)}, f"{OTHER} of dtype F8_E5M2 must be F8_E4M3 or one of F32"),
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
    refuse(ragged, r"ffn_size / tp=288 must be a multiple of 128: keep_fp8=True", keep_fp8=True)
    refuse(whole / "plain", "keep_fp8=True must come with a block FP8 checkpoint: config.json of", keep_fp8=True)

    def leave_one(state: State) -> None:
        state[EXPERT] = dequantized(state[EXPERT], state.pop(f"{EXPERT}_scale_inv"))

    edited(whole, tmp_path, leave_one)
    refuse(tmp_path, f"{EXPERT} of dtype F32 must be F8_E4M3 with scales to be kept as it is$", keep_fp8=True)
    assert same_state(hf.load_pretrained(tmp_path), stock(whole)), "some experts in FP8 are fine where none is kept"


BLOCK = "model.layers.1.mlp"


def kept(folder: Path, **settings: Any) -> Any:
    return hf.load_pretrained(folder, decode_tokens=DECODE_TOKENS, keep_fp8=True, **settings)


def experts_of(model: Any) -> list[FP8Experts]:
    return [module for module in model.modules() if isinstance(module, FP8Experts)]


def test_steps_read_the_stored_pieces_and_prefills_the_module(
    whole: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Expected.of(stock(whole))
    with caplog.at_level(logging.INFO, logger="comet"):
        model = kept(whole)
    assert "dequantised" not in caplog.text
    check_kept(model, whole, share=1)
    with pytest.raises(ValueError, match=r"save_pretrained: experts are kept in block FP8; load .* keep_fp8=False"):
        model.save_pretrained(whole / "copy")
    called: list[int] = []
    (own,) = model.get_submodule(f"{BLOCK}.shared_experts")._own
    forward = type(own).forward

    def counting(module: nn.Module, tokens: Tensor) -> Tensor:
        if module is own:
            called.append(tokens.shape[:-1].numel())
        return forward(module, tokens)

    monkeypatch.setattr(type(own), "forward", counting)
    expected.check(model, "joined")
    assert called, "a prefill of more tokens than a step has"
    assert all(count > DECODE_TOKENS for count in called), called
    gates = logits_with_cache(copy.deepcopy(model), expected.ids, 1)
    torch.testing.assert_close(gates, logits_with_cache(model, expected.ids, 1), rtol=0, atol=0)


def test_joined_tensors_are_there_once(whole: Path) -> None:
    model = kept(whole)
    held = {name: weight.clone() for name, weight in model.named_parameters() if ".experts." in name}
    model(prompt(2, 9))  # more tokens than a step has
    with torch.no_grad():
        model(prompt(1, 2))
    for experts in experts_of(model):
        for weight in experts.parameters(recurse=False):
            assert weight.untyped_storage().nbytes() == weight.nbytes
        assert experts.shared._joined.w1.data_ptr() == experts.gate_up_proj.data_ptr()
        assert vars(experts)["_comet_decode_weights"][1].w1.data_ptr() == experts.gate_up_proj.data_ptr()
    for name, weight in held.items():
        assert torch.equal(model.get_parameter(name), weight), name


def test_kept_experts_made_in_one_mode_are_used_in_the_other(whole: Path) -> None:
    wanted = stock(whole)
    for made in (True, False):
        with torch.inference_mode(made):
            model = kept(whole)
        for used in (not made, made, not made):
            for length in (2, 9, 3):
                with torch.inference_mode(used), torch.no_grad():
                    found = model(prompt(1, length)).logits
                    torch.testing.assert_close(found, wanted(prompt(1, length)).logits, rtol=1e-3, atol=1e-3)


def scale(weight: Tensor) -> None:
    weight.mul_(2)


def scale_by_data(weight: Tensor) -> None:
    weight.data *= 2


def swap_in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.copy_(weight.flip(0))


@pytest.mark.parametrize("write", [scale, scale_by_data, swap_in_inference_mode])
@pytest.mark.parametrize(("part", "used"), [("gate_proj", True), ("up_proj", True), ("down_proj", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_shared_expert_that_is_written_to_is_refused(
    whole: Path, write: Callable[[Tensor], None], part: str, used: bool, dtype: torch.dtype
) -> None:
    model = kept(whole, dtype=dtype)
    if used:
        model(prompt(1, 2))
        model(prompt(1, 2))
    write(model.get_parameter(f"{BLOCK}.shared_experts.{part}.weight"))
    model(prompt(1, DECODE_TOKENS + 1))  # its own module
    with pytest.raises(ValueError, match=r"the shared expert must not be written to: .* load .* keep_fp8=False"):
        model(prompt(1, 2))


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
def test_a_shared_expert_that_is_stored_otherwise_runs_by_itself(whole: Path, tmp_path: Path, part: str) -> None:
    name = f"model.layers.2.mlp.shared_experts.{part}.weight"
    edit_state(
        whole, lambda state: state.update({name: dequantized(state[name], state.pop(f"{name}_scale_inv"))}), tmp_path
    )
    model = kept(tmp_path)
    assert all(experts.shared is None for experts in experts_of(model))
    Expected.of(stock(whole)).check(model, part)


def test_a_gate_weighs_it(tmp_path: Path) -> None:
    sizes = dict(hidden_size=160, moe_intermediate_size=128, intermediate_size=144, shared_expert_intermediate_size=384)
    model = kept(published(tmp_path, "qwen2_moe", **sizes))
    assert all(isinstance(experts.shared, FP8SharedSlots) for experts in experts_of(model))
    Expected.of(stock(tmp_path)).check(model, "qwen2_moe")


NARROW = WHOLE | dict(n_shared_experts=1)


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    return published(tmp_path, **NARROW)


@pytest.mark.parametrize(("ep", "tp"), [slow(2, 1), (1, 2)])
@in_ranks(2)
def test_ranks_hold_pieces_in_turn(rank: int, world_size: int, narrow: Path, ep: int, tp: int) -> None:
    """With EP 2 rank 0 has the only piece; with TP 2 each rank has a slice of it."""
    group = make_group(tiny_config("deepseek_v3", **NARROW), ep, tp)
    model = kept(narrow, group=group)
    pieces = 1 if tp == 2 else 1 - rank
    for experts in experts_of(model):
        assert isinstance(experts.shared, FP8SharedSlots)
        assert [len(weight) for weight in experts.parameters()] == [experts.layout.experts_local + pieces] * 4
    assert_ranks_agree(Expected.of(stock(narrow)).check(model, f"rank {rank}"), f"ep {ep}, tp {tp}")
    hf.check(model)
    group.close()


FEW_TOKENS = 4
CASES = [
    LayerCase("ep2", 2, 1, (30, 30), hidden_size=256, ffn_size=128),
    LayerCase("tp2", 1, 2, (25, 25), hidden_size=128, ffn_size=256),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@in_ranks(2, interpret=True, timeout=300)
def test_more_tokens_than_a_decode_step(rank: int, world_size: int, case: LayerCase) -> None:
    """All ranks have the same 75 tokens, which take several rounds of the fused path; no layer is dequantised."""
    most = max(case.num_tokens)
    group = make_expert_group(case.config, case.parallel, max_tokens=most, dtype=case.dtype, device="cpu")
    runner = ReplicatedRunner(case.config, group, FEW_TOKENS)
    assert not runner.takes_fp8, "on a CPU weights are dequantised"
    runner.path = make_path("fused", case.config, group, case.overlap)
    runner.takes_fp8 = runner.path.takes_fp8
    layout = group.layout(case.config)
    experts = FP8Experts(case.hidden_size, case.ffn_size // case.tp, layout, runner, group.device)
    shards = [fp8_shard(case, holder) for holder in range(world_size)]
    inputs = rank_inputs(replace(case, num_tokens=(75,)), 0)
    refused = mock.patch.object(FP8, "dequantize", side_effect=AssertionError("the layer was dequantised"))
    with torch.no_grad():
        for name, weight in zip(FUSED, shards[rank], strict=True):
            experts.get_parameter(name).copy_(weight.elements)
            experts.get_parameter(f"{name}_scale_inv").copy_(weight.scales)
        with refused:
            output = experts(inputs.tokens, inputs.top_k_ids.long(), inputs.top_k_weights)
    runner.check()
    compare(case, inputs, shards, output, f"{case.name}, rank {rank}")
    assert_ranks_agree(output, case.name)


@pytest.mark.usefixtures("interpreted")
def test_what_computes_in_fp8() -> None:
    case = LayerCase("one rank", 1, 1, (8,), hidden_size=128, ffn_size=128)
    narrow = LayerCase("one rank", 1, 1, (8,), hidden_size=144, ffn_size=128)
    for each, expected in ((case, True), (narrow, False)):
        group = make_expert_group(each.config, each.parallel, max_tokens=8, dtype=torch.float32, device="cpu")
        assert make_path("fused", each.config, group, each.overlap).takes_fp8 == expected
        assert not make_path("twin", each.config, group, each.overlap).takes_fp8
        assert not make_path("plain", each.config, group).takes_fp8
        group.close()
    assert not LocalRunner(2).takes_fp8
