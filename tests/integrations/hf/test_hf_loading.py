"""Loading folders, in one process and over ranks: what is understood, and that nothing broken is ever handed out."""

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
    PROMPT,
    CountedReads,
    Expected,
    assert_ranks_agree,
    check_families,
    edit_state,
    greedy,
    logits_with_cache,
    make_group,
    prompt,
    routed,
    same_state,
    save_fused,
    tiny_config,
    tiny_model,
)
from layer_cases import assert_as_close
from ranks import in_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from comet.decode.runners import DataParallelDecode
from comet.integrations import hf
from comet.integrations.hf.convert import require_same_model
from comet.layout import RoutedTokens

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


State = dict[str, Tensor]
MIXTRAL = "model.layers.1.block_sparse_moe.experts."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Mixtral checkpoint as published: one tensor per expert and projection."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    return tmp_path


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


def test_one_tensor_in_16_bits_narrows_no_other(tmp_path: Path) -> None:
    """A folder that was put together by hand may have such a tensor."""
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[0].copy_(experts.gate_up_proj[0].half())
        experts.gate_up_proj[1, 0, 0] = 100_001  # more than float16 holds
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    edit_state(tmp_path, lambda state: state.update({name: state[name].half()}))
    loaded = hf.load_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.model.layers[0].mlp.experts.gate_up_proj, experts.gate_up_proj)


def test_buffers_of_deepseek_stay_float32(tmp_path: Path) -> None:
    tiny_model("deepseek_v3", torch.bfloat16).save_pretrained(tmp_path)
    loaded = hf.load_pretrained(tmp_path)
    assert loaded.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert loaded.model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16


def has(name: str, tensor: Tensor) -> Callable[[State], object]:
    return lambda state: state.update({name: tensor})


def lacks(*names: str) -> Callable[[State], object]:
    return lambda state: [state.pop(name) for name in names]


MATRIX = torch.zeros(32, 32)
DOWN = [f"{MIXTRAL}{expert}.w2.weight" for expert in range(4)]
EXPERT_EDITS: list[tuple[Callable[[State], object], str]] = [
    (lacks(f"{MIXTRAL}2.w3.weight"), "missing in model.layers.1.mlp.experts: expert 2's up$"),
    (
        lacks(*DOWN),
        "missing in model.layers.1.mlp.experts: expert 0's down, expert 1's down, expert 2's down and 1 more$",
    ),
    (has(f"{MIXTRAL}4.w1.weight", MATRIX), f"surplus {MIXTRAL}4.w1.weight$"),
    (has(f"{MIXTRAL}0.w4.weight", torch.zeros(1)), f"surplus {MIXTRAL}0.w4.weight$"),
    (has(f"{MIXTRAL}0.w1.bias", torch.zeros(1)), f"surplus {MIXTRAL}0.w1.bias$"),
    # named twice: under the old and the new name
    (has("model.layers.1.mlp.experts.0.w1.weight", MATRIX), r"surplus model.layers.1.\w+.experts.0.w1.weight$"),
    (
        has(f"{MIXTRAL}gate_up_proj", torch.zeros(4, 64, 32)),
        "missing in model.layers.1.mlp.experts: down_proj; surplus .* and 9 more$",
    ),
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
    refuse(tmp_path, "missing in model.layers.0.mlp.experts: gate_up_proj$")


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
    from transformers import AutoModelForCausalLM

    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    name = "model.norm.weight"
    for file, other in (("1.safetensors", state), ("2.safetensors", {name: state[name] + 1})):
        save_file(other, folder / file, metadata={"format": "pt"})
    for file, added in (("1.safetensors", 0), ("2.safetensors", 1)):
        index = dict.fromkeys(state, "1.safetensors") | {name: file, "lm_head.weight": "2.safetensors"}  # it is not
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert torch.equal(hf.load_pretrained(folder).model.norm.weight, state[name] + added)
    stock = tiny_model("mixtral")
    with torch.no_grad():
        stock.model.norm.weight.add_(5)
    stock.save_pretrained(folder)  # into a single file, which transformers reads first; the former index stays
    assert (folder / "model.safetensors.index.json").is_file()
    for load in (AutoModelForCausalLM.from_pretrained, hf.load_pretrained):
        assert torch.equal(load(folder).model.norm.weight, stock.model.norm.weight)


def test_refused_configurations(folder: Path) -> None:
    group = make_group(tiny_model("mixtral"))
    other = "must be the group's torch.float32, or None"
    refuse(folder, f"dtype=torch.bfloat16 {other}", group=group, dtype=torch.bfloat16)
    refuse(folder, "device=cuda must be the group's cpu, or None", group=group, device="cuda")
    group.close()
    refuse(folder, "dtype=torch.float64 must be one of", dtype=torch.float64)
    tiny_config("mixtral", hidden_act="gelu").save_pretrained(folder)
    refuse(folder, "model\\.layers\\.0\\.mlp\\.experts .*, with act_fn=GELUActivation.*, must compute")
    refuse(folder, "torch_dtype=torch.bfloat16 must be given as dtype=torch.bfloat16", torch_dtype=torch.bfloat16)


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


def check_token_counts(rank: int, ep: int, tp: int, ffn_size: int = 32) -> None:
    """The path with counts that W does not divide, fewer than W, none, and more than the pool holds at once."""
    model = tiny_model("qwen2_moe", moe_intermediate_size=ffn_size)
    stock = copy.deepcopy(model.model.layers[0].mlp.experts)
    exact = copy.deepcopy(stock).double()
    group = make_group(model, ep, tp, max_tokens=100)  # rounded up to 128
    hf.convert(model, group, decode_tokens=0)
    experts = model.model.layers[0].mlp.experts
    path, brought = experts.runner.path, []

    def counted_path(routed: RoutedTokens, **weights: Tensor) -> Tensor:
        brought.append(len(routed.tokens))
        return path(routed, **weights)

    experts.runner.path = counted_path
    for num_tokens in (0, 1, ep * tp - 1, ep * tp + 1, 2 * ep * tp, 128 * ep * tp + 3):
        tokens, ids, weights = routed(num_tokens, seed=num_tokens)
        with torch.no_grad():
            actual = experts(tokens, ids, weights)
            same, truth = stock(tokens, ids, weights), exact(tokens.double(), ids, weights.double())
        assert_as_close(actual, truth, same, torch.float32, f"{num_tokens} tokens, ep {ep}, tp {tp}, rank {rank}")
        assert sum(brought) <= -(-num_tokens // (ep * tp)) + 1, f"{num_tokens} tokens, rank {rank} computed {brought}"
        brought.clear()
    group.close()


def check_loading(rank: int, ep: int, tp: int, folders: dict[str, Any]) -> None:
    """Every folder loaded as shards equals the whole model converted, bit for bit; each rank reads its bytes once."""
    for label, folder in folders.items():
        model = tiny_model(label.split(" ")[0])
        group = make_group(model, ep, tp)
        experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
        with CountedReads() as counted:
            loaded = hf.load_pretrained(folder, group, decode_tokens=DECODE_TOKENS)
        assert counted.expert_bytes() * ep * tp == experts, f"{label}, rank {rank}"
        hf.convert(model, group, decode_tokens=DECODE_TOKENS)
        assert same_state(loaded, model), f"{label}, ep {ep}, tp {tp}, rank {rank}: other weights"
        ids = prompt(*PROMPT)
        assert torch.equal(logits_with_cache(loaded, ids, 7), logits_with_cache(model, ids, 7)), label
        group.close()


@pytest.mark.slow
@in_ranks(4, timeout=300)
def test_groups(rank: int, world_size: int, saved: dict[str, Path]) -> None:
    """Two groups of two run side by side, then one of four: importing transformers costs more than the checks."""
    torch.use_deterministic_algorithms(True)
    for ep, tp, families in ((2, 1, FAMILIES), (1, 2, ("mixtral", "deepseek_v3")), (2, 2, ("qwen3_moe",))):
        for family, logits in zip(families, check_families(rank, ep, tp, families), strict=True):
            assert_ranks_agree(logits, f"{family}, ep {ep}, tp {tp}")
        check_token_counts(rank, ep, tp)
        check_loading(rank, ep, tp, saved)


@pytest.mark.slow
@in_ranks(2, timeout=300)
def test_slices_may_be_narrow_where_warp_decode_is_off(rank: int, world_size: int) -> None:
    """F / TP = 24: warp decode takes multiples of 16 only."""
    check_token_counts(rank, 1, 2, ffn_size=48)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    tiny_model("mixtral", intermediate_size=48).save_pretrained(folder)
    return folder


@in_ranks(2, timeout=300)
def test_narrow_slices_of_experts_need_no_setting(rank: int, world_size: int, narrow: Path) -> None:
    """F / TP = 24 is no multiple of 16, so warp decode is off unless it is required."""
    model = tiny_model("mixtral", intermediate_size=48)
    expected, group = Expected.of(model), make_group(model, 1, 2)
    with pytest.raises(ValueError, match="ffn_size=48 must be a multiple of 32: 16 x tp, or give"):
        hf.convert(model, group, decode_tokens=4)
    with pytest.raises(ValueError, match="ffn_size=48 / tp=2 = 24 must be a multiple of 16 with an expert_budget"):
        hf.load_pretrained(narrow, group, expert_budget=0.5)
    assert DataParallelDecode(hf.moe_config(model.config), group).decode_tokens == 0
    expected.check(hf.load_pretrained(narrow, group), f"load_pretrained, rank {rank}")
    expected.check(hf.convert(model, group), f"convert, rank {rank}")
    group.close()


@in_ranks(2, timeout=300)
def test_sampling_and_an_assistant_over_ranks(rank: int, world_size: int) -> None:
    """The assistant proposes several tokens, so steps of one token and of more alternate between two models."""
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


@in_ranks(2)
def test_ranks_with_different_prompts_all_say_so(rank: int, world_size: int) -> None:
    group = make_group(tiny_config("qwen3_moe"), ep=world_size)
    model, ids = hf.convert(tiny_model("qwen3_moe"), group), torch.arange(6).view(1, 6)
    with pytest.raises(ValueError, match=r"^input_ids of ranks \[1\] must be as on rank 0: all ranks take"):
        model.generate(ids + rank, max_new_tokens=2)
    assert torch.equal(greedy(model, ids), greedy(tiny_model("qwen3_moe"), ids)), "they go on"
    group.close()


@in_ranks(2)
def test_ranks_with_different_models_all_say_so(rank: int, world_size: int) -> None:
    group = make_group(tiny_config("qwen3_moe"), ep=world_size)
    stock, ids = tiny_model("qwen3_moe"), torch.arange(6).view(1, 6)
    stock.model.norm.weight.data[3] += rank  # two folders differ like this
    model = hf.convert(stock, group)
    with pytest.raises(ValueError, match=r"^model of ranks \[1\] must be as on rank 0: .* is the folder the same\?$"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"^model of ranks \[1\] must be as on rank 0"):
        require_same_model(group, model)
    group.close()
