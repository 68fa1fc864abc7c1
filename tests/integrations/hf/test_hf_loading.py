"""Loading folders, in one process and over ranks: what is understood, and that nothing broken is ever handed out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import (
    DECODE_TOKENS,
    FAMILIES,
    CountedReads,
    assert_ranks_agree,
    check_families,
    check_loading,
    check_token_counts,
    edit_state,
    greedy,
    logits_with_cache,
    make_group,
    prompt,
    same_state,
    save_fused,
    tiny_config,
    tiny_model,
)
from hf_fp8_cases import WHOLE
from ranks import in_ranks, run_ranks
from safetensors.torch import load_file, save_file
from tiers import slow
from torch import Tensor

import comet.experts.store
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report
from comet.quantization.formats import quantize_mx

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


State = dict[str, Tensor]
MIXTRAL = "model.layers.1.block_sparse_moe.experts."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Mixtral checkpoint as published: one tensor per expert and projection."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refuse(folder: Path, message: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(folder, **settings)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("style", ["expert by expert", "fused"])
def test_a_rank_alone(tmp_path: Path, family: str, style: str) -> None:
    model = tiny_model(family)
    if style == "fused":
        save_fused(model, tmp_path)
    else:
        model.save_pretrained(tmp_path, max_shard_size="30KB")
    loaded = hf.load_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert same_state(loaded, model)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(model, prompt(2, 9)))


def test_settings_of_the_folder_and_the_caller(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16, tie_word_embeddings=True)
    model.generation_config.repetition_penalty = 1.25
    model.save_pretrained(tmp_path)
    loaded = hf.load_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.dtype == torch.bfloat16, "the checkpoint's"
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.repetition_penalty == 1.25
    assert loaded.config._attn_implementation == "eager"
    assert loaded.name_or_path == str(tmp_path)
    wide = hf.load_pretrained(str(tmp_path), dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj.float())


def test_fp32_buffers_and_the_prediction_layer_of_deepseek(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3", torch.bfloat16)
    model.save_pretrained(tmp_path)
    extra = {f"model.layers.61.mlp.experts.{expert}.up_proj.weight": torch.zeros(2, 2) for expert in range(3)}
    edit_state(tmp_path, lambda state: state.update(extra))
    loaded = hf.load_pretrained(tmp_path)
    assert loaded.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert loaded.model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16


def has(name: str, tensor: Tensor) -> Callable[[State], object]:
    return lambda state: state.update({name: tensor})


def lacks(*names: str) -> Callable[[State], object]:
    return lambda state: [state.pop(name) for name in names]


MATRIX, NEXT = torch.zeros(32, 32), "model.layers.2.block_sparse_moe.experts.0.w1.weight"
DOWN = [f"{MIXTRAL}{expert}.w2.weight" for expert in range(4)]
EXPERT_EDITS: list[tuple[Callable[[State], object], str]] = [
    (lacks(f"{MIXTRAL}2.w3.weight"), "missing in layer 1: expert 2's up$"),
    (lacks(*DOWN), "missing in layer 1: expert 0's down, expert 1's down, expert 2's down and 1 more$"),
    (has(f"{MIXTRAL}4.w1.weight", MATRIX), f"surplus {MIXTRAL}4.w1.weight$"),
    (has(NEXT, MATRIX), f"surplus {NEXT}$"),
    (has(f"{MIXTRAL}0.w4.weight", torch.zeros(1)), f"surplus {MIXTRAL}0.w4.weight$"),
    (has(f"{MIXTRAL}0.w1.bias", torch.zeros(1)), f"surplus {MIXTRAL}0.w1.bias$"),
    # named twice: under the old and the new name
    (has("model.layers.1.mlp.experts.0.w1.weight", MATRIX), r"surplus model.layers.1.\w+.experts.0.w1.weight$"),
    (has(f"{MIXTRAL}gate_up_proj", torch.zeros(4, 64, 32)), "missing in layer 1: down_proj; surplus .* and 9 more$"),
    (has(DOWN[3], torch.zeros(32, 31)), rf"{DOWN[3]} of shape \(32, 31\) must be \(32, 32\)$"),
    (has(DOWN[3], MATRIX.to(torch.float8_e4m3fn)), f"{DOWN[3]} of dtype F8_E4M3 must be one of F32, F16, BF16$"),
]


@pytest.mark.parametrize(("change", "message"), EXPERT_EDITS)
def test_expert_tensors_are_checked_before_any_is_read(
    folder: Path, change: Callable[[State], object], message: str
) -> None:
    edit_state(folder, change)
    with CountedReads() as counted:
        refuse(folder, f"expert tensors of the checkpoint must be complete and no more: .*{message}")
    assert counted.reads == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacks("model.norm.weight"), "missing: model.norm.weight$"),
        (has("model.other.weight", torch.zeros(1)), "unexpected: model.other.weight$"),
        (has("model.norm.weight", torch.zeros(3)), r"mismatched: .*model.norm.weight.*\[3\].*\[32\]"),
        (lacks("model.layers.0.block_sparse_moe.gate.weight"), "missing: model.layers.0.mlp.gate.weight$"),
    ],
)
def test_other_tensors_are_checked(folder: Path, change: Callable[[State], object], message: str) -> None:
    edit_state(folder, change)
    refuse(folder, f"must hold the tensors of its model: {message}")


def test_fused_tensors_are_checked(tmp_path: Path) -> None:
    save_fused(tiny_model("qwen2_moe"), tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_state(tmp_path, lambda state: state.update({name: state[name][:7].contiguous()}))
    refuse(tmp_path, rf"{name} of shape \(7, 64, 32\) must be \(8, 64, 32\)$")
    edit_state(tmp_path, lambda state: state.pop(name))
    refuse(tmp_path, "missing in layer 0: gate_up_proj$")


def test_broken_folders(tmp_path: Path, folder: Path) -> None:
    refuse(tmp_path / "nothing", "nothing' must hold a config.json")
    weights = (folder / "model.safetensors").read_bytes()
    for part in (weights[:-100], weights[:20]):
        (folder / "model.safetensors").write_bytes(part)
        refuse(folder, "is damaged: model.safetensors cannot be read")
    (folder / "model.safetensors").unlink()
    refuse(folder, "must hold model.safetensors or model.safetensors.index.json$")

    index = {"model.norm.weight": "one.safetensors", "model.lost.weight": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refuse(folder, "must hold one.safetensors: it is gone")
    for name in ("one", "two"):
        save_file({"model.norm.weight": torch.zeros(32)}, folder / f"{name}.safetensors")
    refuse(folder, "model.safetensors.index.json promises model.lost.weight, the files lack them$")
    (folder / "model.safetensors.index.json").write_text("{")
    refuse(folder, "is damaged: model.safetensors.index.json cannot be read")


def test_of_two_files_with_a_tensor_the_one_that_the_index_names_counts(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    name = "model.norm.weight"
    for file, other in (("1.safetensors", state), ("2.safetensors", {name: state[name] + 1})):
        save_file(other, folder / file, metadata={"format": "pt"})
    for file, added in (("1.safetensors", 0), ("2.safetensors", 1)):
        index = dict.fromkeys(state, "1.safetensors") | {name: file, "lm_head.weight": "2.safetensors"}  # it is not
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert torch.equal(hf.load_pretrained(folder).model.norm.weight, state[name] + added)


def test_refused_configurations(folder: Path) -> None:
    group = make_group(tiny_model("mixtral"))
    other = "must be the group's torch.float32, or None"
    refuse(folder, f"dtype=torch.bfloat16 {other}", group=group, dtype=torch.bfloat16)
    refuse(folder, "device=cuda must be the group's cpu, or None", group=group, device="cuda")
    group.close()
    refuse(folder, "dtype=torch.float64 must be one of", dtype=torch.float64)
    edit_config(folder, hidden_act="gelu")
    refuse(folder, "hidden_act='gelu' of the mixtral model must be one of")
    edit_config(folder, hidden_act="silu", quantization_config={"quant_method": "awq"})
    refuse(folder, "quant_method='awq' of quantization_config must be 'fp8': .*; dequantise the checkpoint first$")
    edit_config(folder, quantization_config=None, model_type="llama")
    refuse(folder, "model_type='llama' must be one of mixtral, qwen2_moe, qwen3_moe, deepseek_v3, gpt_oss$")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per naming of experts as transformers saves it (one by one, in several files), and a fused one."""
    found = {}
    for family in ("mixtral", "deepseek_v3", "deepseek_v3 fused"):
        found[family] = tmp_path_factory.mktemp("saved")
        if family.endswith("fused"):
            save_fused(tiny_model("deepseek_v3"), found[family])
        else:
            tiny_model(family).save_pretrained(found[family], max_shard_size="40KB")
            assert len(list(found[family].glob("*.safetensors"))) > 1, "the index is not tested"
    return found


@pytest.mark.slow
@in_ranks(4, timeout=300)
def test_groups(rank: int, world_size: int, saved: dict[str, Path]) -> None:
    """Two groups of two side by side, then one of four: importing transformers costs more than checks."""
    torch.use_deterministic_algorithms(True)
    for ep, tp, families in ((2, 1, FAMILIES), (1, 2, FAMILIES), (2, 2, ("qwen3_moe",))):
        for family, logits in zip(families, check_families(rank, ep, tp, families), strict=True):
            assert_ranks_agree(logits, f"{family}, ep {ep}, tp {tp}")
        check_token_counts(rank, ep, tp)
        check_loading(rank, ep, tp, saved)


@pytest.mark.slow
@in_ranks(2, timeout=300)
def test_slices_may_be_narrow_where_warp_decode_is_off(rank: int, world_size: int) -> None:
    """F / TP = 24: warp decode takes multiples of 16 only."""
    check_token_counts(rank, 1, 2, ffn_size=48)


@in_ranks(2, timeout=300)
def test_sampling_and_an_assistant_over_ranks(rank: int, world_size: int) -> None:
    """The assistant proposes several tokens, so steps of one and of more tokens alternate, of two models."""
    stock, ids, made = tiny_model("deepseek_v3"), prompt(1, 5), []
    group, settings = make_group(stock, 2), dict(attention_mask=torch.ones_like(ids), max_new_tokens=6)
    converted = hf.convert(copy.deepcopy(stock), group, decode_tokens=DECODE_TOKENS)
    for model in (stock, converted):
        assisted = model.generate(ids, assistant_model=copy.deepcopy(model), do_sample=False, **settings)
        torch.manual_seed(5)
        drawn = model.generate(ids, do_sample=True, temperature=1.5, top_p=0.95, **settings)
        made.append(torch.cat([greedy(model, ids), assisted, drawn]))
    assert torch.equal(*made)
    assert torch.equal(made[0][0], made[0][1])
    assert not torch.equal(made[0][0], made[0][2]), "a draw must be seen"
    hf.check(converted)
    group.close()


EXPERT = 3 * 32 * 64 * 4
TWO = dict(num_experts_per_tok=2, moe_intermediate_size=64)
STORES: dict[str, dict[str, Any]] = {
    "host": {},
    "file": {"expert_store": "file", "host_budget": 0.6},
    "mxfp4": {"expert_dtype": "mxfp4"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {style: tmp_path_factory.mktemp("folder") for style in ("one by one", "fused")}
    tiny_model("qwen3_moe", **TWO).save_pretrained(found["one by one"], max_shard_size="30KB")
    save_fused(tiny_model("qwen3_moe", **TWO), found["fused"])
    return found


def check_budgets(rank: int, world_size: int, ep: int, tp: int, cases: list[tuple[str, Path]]) -> None:
    """Models with some experts in slots answer as with all of them, bit for bit, drawn tokens too."""
    for store, folder in cases:
        group, found = make_group(tiny_config("qwen3_moe", **TWO), ep, tp), []
        with CountedReads() as counted:
            budgeted = hf.load_pretrained(folder, group, expert_budget=0.75, **STORES[store])
            read = counted.expert_bytes()
        whole = hf.load_pretrained(folder, group)
        assert type(budgeted) is type(whole)
        held = {name for name, _ in whole.named_parameters() if ".experts." not in name}
        assert {name for name, _ in budgeted.named_parameters()} == held
        for name, weight in whole.named_parameters() if store == "mxfp4" else ():
            if ".experts." in name:
                weight.data.copy_(quantize_mx(weight.data, store).dequantize())
        for model in (budgeted, whole):
            logits, tokens = logits_with_cache(model, prompt(1, 20), 1), greedy(model, prompt(2, 9))
            torch.manual_seed(5)
            drawn = model.generate(prompt(1, 1), max_new_tokens=20, do_sample=True, top_k=0)
            found.append(torch.cat([logits.flatten(), tokens.flatten(), drawn.flatten()]))
            hf.check(model)
        assert torch.equal(*found), store
        assert_ranks_agree(found[0], store)
        report, stored = cache_report(budgeted), EXPERT // tp
        if store == "mxfp4":
            stored = EXPERT // 4 // 2 // tp + EXPERT // 4 // 32 // tp
        assert cache_report(whole) is None
        assert report.slots == 8 // ep * 3 // 4
        assert report.needed > report.fetched > 2 * report.slots, "slots were given away"
        assert report.fetched_bytes == report.fetched * stored
        assert read == (0 if store == "file" else 2 * 8 * EXPERT // (ep * tp)), "its own part, once"
        assert store != "file" or 0 < report.staged_bytes < report.fetched_bytes
        group.close()


@pytest.mark.parametrize(
    ("ep", "tp", "cases"),
    [
        (1, 1, {"host": "one by one", "file": "fused"}),
        (2, 1, {"host": "one by one", "file": "fused"}),
        (1, 2, {"host": "fused", "mxfp4": "one by one"}),
        slow(2, 1, {"mxfp4": "fused"}),
        slow(2, 2, {"host": "one by one", "file": "fused"}),
    ],
)
def test_ranks_answer_as_with_all_experts(ep: int, tp: int, cases: dict[str, str], folders: dict[str, Path]) -> None:
    run_ranks(check_budgets, ep * tp, ep, tp, [(store, folders[style]) for store, style in cases.items()], timeout=300)


@pytest.mark.parametrize(("tp", "store"), [(1, "file"), slow(2, "host"), slow(2, "file")])
@in_ranks(2, timeout=300)
def test_block_fp8_is_kept_over_ranks(rank: int, world_size: int, whole: Path, tp: int, store: str) -> None:
    group = make_group(tiny_config("deepseek_v3", **WHOLE), 2 // tp, tp)
    budget = {"expert_budget": 0.5 * tp, **STORES[store]}
    models = [hf.load_pretrained(whole, group, keep_fp8=True, **each) for each in ({}, budget)]
    tokens = [greedy(model, prompt(1, 3)) for model in models]
    assert torch.equal(*tokens)
    assert_ranks_agree(tokens[0], store)
    report = cache_report(models[1])
    assert report.fetched > 0
    assert (report.staged_bytes > 0) == (store == "file")
    group.close()


@in_ranks(2)
def test_ranks_agree_where_one_cannot_pin(rank: int, world_size: int, folders: dict[str, Path]) -> None:
    memory = comet.experts.store.host_memory
    if rank == 1:
        comet.experts.store.host_memory = lambda *given: (memory(*given)[0], False)
    group = make_group(tiny_config("qwen3_moe", **TWO), 2, 1)
    loaded = hf.load_pretrained(folders["fused"], group, expert_budget=0.5)
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(tiny_model("qwen3_moe", **TWO), prompt(2, 9)))
    assert cache_report(loaded).staged_bytes > 0, "the host copies on both, which then take equal steps"
    group.close()


@in_ranks(2)
def test_ranks_with_different_prompts_all_say_so(rank: int, world_size: int) -> None:
    group = make_group(tiny_config("qwen3_moe"), ep=world_size)
    model, ids = hf.convert(tiny_model("qwen3_moe"), group), torch.arange(6).view(1, 6)
    with pytest.raises(ValueError, match=r"^input_ids of ranks \[1\] must be those of rank 0: all ranks of a group"):
        model.generate(ids + rank, max_new_tokens=2)
    assert torch.equal(greedy(model, ids), greedy(tiny_model("qwen3_moe"), ids)), "they go on"
    group.close()
