"""Arguments of from_pretrained, and files of a folder: each has its stock meaning in load_pretrained, or is refused."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import edit_state, greedy, logits_with_cache, prompt, same_state, tiny_config, tiny_model
from torch import Tensor

from comet.integrations import hf

transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
LEFT_OUT = "tensors that the model has no place for"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3_moe").save_pretrained(path)
    return path


def stock(folder: Path, **arguments: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **arguments)


def logits(model: Any) -> Tensor:
    return logits_with_cache(model, prompt(1, 12), 8)


def assert_as_stock(folder: Path, **arguments: Any) -> Any:
    loaded, expected = hf.load_pretrained(folder, **arguments), stock(folder, **arguments)
    torch.testing.assert_close(logits(loaded), logits(expected))
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(expected, prompt(2, 9)))
    return loaded


def test_subfolders_and_variants_hold_other_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    other = tiny_model("qwen3_moe", num_experts_per_tok=2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.generation_config.max_new_tokens = 3
    other.save_pretrained(tmp_path / "checkpoint-7")
    other.save_pretrained(tmp_path / "shards", variant="fp16", max_shard_size="40KB")
    other.save_pretrained(tmp_path, variant="fp16")
    loaded = assert_as_stock(tmp_path, subfolder="checkpoint-7")
    assert same_state(loaded, other)
    assert (loaded.config.num_experts_per_tok, loaded.generation_config.max_new_tokens) == (2, 3)
    assert same_state(hf.load_pretrained(tmp_path, variant="fp16"), other)
    assert (tmp_path / "shards" / "model.safetensors.index.fp16.json").is_file()
    assert_as_stock(tmp_path, variant="fp16", subfolder="shards")
    assert_as_stock(tmp_path, subfolder="", variant=None)
    with pytest.raises(
        ValueError, match=r"must hold model\.fp32\.safetensors or model\.safetensors\.index\.fp32\.json"
    ):
        hf.load_pretrained(tmp_path, variant="fp32")
    with pytest.raises(ValueError, match=r"checkpoint-8' must hold a config\.json"):
        hf.load_pretrained(tmp_path, subfolder="checkpoint-8")


def test_fields_of_the_configuration_may_be_changed(folder: Path) -> None:
    changed = dict(num_experts_per_tok=2, norm_topk_prob=False, use_cache=True, rms_norm_eps=0.01)
    loaded = assert_as_stock(folder, **changed)
    assert {name: getattr(loaded.config, name) for name in changed} == changed
    whole = transformers.AutoConfig.from_pretrained(folder, **changed)
    before = whole.to_dict()
    by_object = hf.load_pretrained(folder, config=whole)
    assert torch.equal(logits(by_object), logits(loaded))
    assert whole.to_dict() == before, "the caller's stays as it was"
    yarn = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16)
    assert_as_stock(folder, rope_parameters=yarn)
    with pytest.raises(ValueError, match="num_experts_per_tok must be set in config"):
        hf.load_pretrained(folder, config=whole, num_experts_per_tok=2)
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.mlp\.experts .*, with act_fn=GELUActivation\(\), must compute"
    ):
        hf.load_pretrained(folder, hidden_act="gelu")


def test_a_configuration_may_come_from_another_folder(folder: Path, tmp_path: Path) -> None:
    tiny_config("qwen3_moe", num_experts_per_tok=1).save_pretrained(tmp_path)
    loaded = hf.load_pretrained(folder, config=str(tmp_path))
    assert loaded.config.num_experts_per_tok == 1
    # AutoModelForCausalLM drops a path, the model's class takes it.
    torch.testing.assert_close(logits(loaded), logits(type(loaded).from_pretrained(folder, config=str(tmp_path))))


def test_loading_information_types_and_devices_are_those_asked_for(folder: Path) -> None:
    _, report = hf.load_pretrained(folder, output_loading_info=True)
    wanted = stock(folder, output_loading_info=True)[1]
    assert {name: set(report[name]) for name in wanted if name != "error_msgs"} == {
        name: set(wanted[name]) for name in wanted if name != "error_msgs"
    }
    assert not report["missing_keys"]
    for dtype in ("bfloat16", "auto", torch.float16):
        assert hf.load_pretrained(folder, dtype=dtype).dtype == stock(folder, dtype=dtype).dtype
    for device in ("cpu", torch.device("cpu"), {"": "cpu"}):
        assert hf.load_pretrained(folder, device_map=device).device == torch.device("cpu")
    settings = transformers.GenerationConfig(max_new_tokens=2)
    assert hf.load_pretrained(folder, generation_config=settings).generation_config.max_new_tokens == 2
    assert hf.load_pretrained(folder, attn_implementation="eager").config._attn_implementation == "eager"


def test_arguments_of_no_effect_are_taken(folder: Path) -> None:
    assert_as_stock(folder, local_files_only=True, low_cpu_mem_usage=True, trust_remote_code=True, weights_only=True)
    assert_as_stock(folder, revision="main", state_dict=None, use_safetensors=True, token=None, force_download=False)
    hf.load_pretrained(folder, experts_implementation="comet")


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(revision="v2"), "revision='v2' must be left out in load_pretrained: the folder is on this machine, get it"),
    (dict(cache_dir="/tmp"), "cache_dir='/tmp' must be left out"),
    (dict(token="secret"), "token='secret' must be left out"),
    (
        dict(state_dict={"a": torch.zeros(3)}),
        r"state_dict=\{'a': tensor.* must be left out .*: the weights are the saf",
    ),
    (dict(use_safetensors=False), "use_safetensors=False must be left out"),
    (dict(ignore_mismatched_sizes=True), "ignore_mismatched_sizes=True must be left out"),
    (dict(key_mapping={"a": "b"}), "key_mapping="),
    (dict(gguf_file="x.gguf"), "gguf_file="),
    (dict(device_map="auto"), "device_map='auto' must name one device"),
    (dict(device_map={"model.embed_tokens": "cpu", "lm_head": 0}), "device_map=.* must name one device"),
    (dict(device_map={"": "disk"}), "device_map=.* must name one device"),
    (dict(device_map="cpu", device="cuda"), "device=cuda must be the one of device_map='cpu'"),
    (dict(max_memory={0: "1GB"}), "max_memory=.* expert_budget"),
    (dict(offload_folder="x"), "offload_folder='x' must be left out"),
    (dict(tp_plan="auto"), "tp_plan='auto' must be left out .*: ranks share experts by load_pretrained"),
    (dict(experts_implementation="eager"), "experts_implementation='eager' must be left out .*: Comet computes"),
    (dict(use_kernels=True), "use_kernels=True must be left out"),
    (dict(quantization_config={"load_in_4bit": True}), "quantization_config=.* see keep_fp8 and expert_dtype"),
    (dict(adapter_kwargs={"revision": "x"}), "adapter_kwargs="),
    (dict(not_a_field=1), "not_a_field must be arguments of load_pretrained or from_pretrained, or fields of"),
    (dict(dtype="float99"), "dtype=float99 must be one of"),
    (dict(config={"model_type": "qwen3_moe"}), "config=.* must be a configuration of transformers, or the folder"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_arguments_that_do_not_apply_are_refused_by_name(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(folder, **arguments)


def test_no_argument_of_from_pretrained_is_a_type_error(folder: Path) -> None:
    """Names come from the signature and source of the installed transformers."""
    method = transformers.PreTrainedModel.from_pretrained
    source = inspect.getsource(method)
    names = {name for name in inspect.signature(method).parameters if name not in ("config", "kwargs", "model_args")}
    names |= {part.split('"')[1] for part in source.split("kwargs.pop(")[1:] if part.startswith('"')}
    assert {"subfolder", "variant", "revision", "tp_plan"} <= names
    taken = {"attn_implementation", "local_files_only", "output_loading_info", "trust_remote_code", "weights_only"}
    names -= taken | {"pretrained_model_name_or_path", "low_cpu_mem_usage"}
    for name in sorted(each for each in names if not each.startswith("_")):
        with pytest.raises((ValueError, RuntimeError), match=r"\S") as refused:
            hf.load_pretrained(folder, **{name: "x"})
        blamed = {"subfolder": "config.json", "variant": "model.x.safetensors", "device_map": "device type"}
        assert blamed.get(name, name) in str(refused.value), name


def test_a_folder_with_code_of_its_own_says_that_stock_code_runs(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(hf.load_pretrained(tmp_path)), logits(hf.load_pretrained(folder)))
    with pytest.raises(ValueError, match="trust_remote_code=True must be left out with auto_map in"):
        hf.load_pretrained(tmp_path, trust_remote_code=True)


def copy_layer(source: int, target: int, prefix: str = "model.") -> Any:
    """Copy a layer's tensors to a number behind the last one, where checkpoints have a prediction layer."""

    def change(state: dict[str, Tensor]) -> None:
        name = f"model.layers.{source}."
        found = {each: value for each, value in state.items() if each.startswith(name)}
        state.update((f"{prefix}layers.{target}.{each.removeprefix(name)}", value + 1) for each, value in found.items())
        state[f"{prefix}layers.{target}.eh_proj.weight"] = torch.zeros(2, 2)

    return change


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_layers_behind_the_last_one_are_left_out_as_in_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    layers = model.config.num_hidden_layers
    edit_state(tmp_path, copy_layer(layers - 1, layers))
    edit_state(tmp_path, copy_layer(layers - 1, 0, "mtp."))
    edit_state(tmp_path, lambda state: state.update({"model.other.weight": torch.zeros(1)}))
    with caplog.at_level(logging.WARNING, "comet"):
        loaded, report = hf.load_pretrained(tmp_path, output_loading_info=True)
    assert same_state(loaded, hf.convert(model))
    warned = [record.getMessage() for record in caplog.records if LEFT_OUT in record.getMessage()]
    assert len(warned) == 1
    assert report["unexpected_keys"] >= {"model.other.weight", f"model.layers.{layers}.eh_proj.weight"}
    assert_as_stock(tmp_path)


def test_deepseeks_layer_61_is_ignored_only_where_the_model_has_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers ignores layer 61 if it is unexpected: of 61 layers it is DeepSeek-V3's prediction layer."""
    sizes = dict(hidden_size=16, moe_intermediate_size=16, n_routed_experts=4, n_group=2, vocab_size=32)
    for layers in (61, 64):
        folder = tmp_path / str(layers)
        model = tiny_model("deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=58, **sizes)
        model.save_pretrained(folder)
        if layers == 61:
            edit_state(folder, copy_layer(60, 61))
        caplog.clear()
        assert same_state(hf.load_pretrained(folder), model)
        assert not [record for record in caplog.records if LEFT_OUT in record.getMessage()]


def test_fewer_layers_than_the_checkpoint_has_are_as_in_transformers(folder: Path) -> None:
    loaded = assert_as_stock(folder, num_hidden_layers=2)
    assert len(loaded.model.layers) == 2
    with pytest.raises(ValueError, match=r"must be complete and no more: missing in model\.layers\.3\.mlp\.experts"):
        hf.load_pretrained(folder, num_hidden_layers=4)


@pytest.mark.parametrize("base", ["as a folder of its own", "in the folder of its base"])
def test_an_adapter_is_called_one(base: str, folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    adapted = peft.get_peft_model(stock(folder), peft.LoraConfig(target_modules=["q_proj"], r=2))
    adapted.save_pretrained(tmp_path)
    if base != "as a folder of its own":
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(
        ValueError, match=r"must hold a whole model, but is an adapter of '.*' \(adapter_config\.json\)"
    ):
        hf.load_pretrained(tmp_path)


BROKEN = [
    ("", r"generation_config\.json must be JSON, is it complete\?"),
    ('{"eos_token', r"generation_config\.json must be JSON, is it complete\?"),
    ("[1]", r"generation_config\.json must hold settings by name, not \[1\]$"),
    ('{"max_new_tokens": "x"}', r"generation_config\.json has a value that transformers does not take: "),
    *(
        (json.dumps({"eos_token_id": value}), r"eos_token_id=.* of .*generation_config\.json must be a token's number")
        for value in ("<end>", "2", 1.0, True, -1, [[1]], [1, "a"], [1, None], {"id": 1})
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_generation_config_is_refused_by_name(text: str, message: str, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)
